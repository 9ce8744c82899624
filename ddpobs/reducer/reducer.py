"""Launch and wait: the reduction of one set of parameters, bucket by bucket, while backward goes on.

One backward, in order:

1. `start_backward`: `Readiness` saw the first gradient, or the first gradient of an output.
2. `bucket_ready`: a bucket's last gradient arrived. `_launch_ready` launches strictly in bucket order, on every rank.
3. `launch_rest`: autograd is done. Only now the last bucket is launched, because it carries the news of a fault to all
   ranks.
4. `finish`: wait for every bucket, raise a fault that any rank reported, and settle unused parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ddpobs.buckets import assignment
from ddpobs.buckets.bucket import Bucket
from ddpobs.buckets.layout import Layout
from ddpobs.comm import AllReduce, BucketComm, CommFactory, Pending, SkippedBucket
from ddpobs.errors import UnusedParametersError
from ddpobs.observers import ModuleObserver
from ddpobs.reducer.bucket_times import BucketTimes
from ddpobs.reducer.fault_broadcast import Fault, FaultBroadcast
from ddpobs.reducer.front_end import FrontEnd
from ddpobs.reducer.late_parameters import Frozen, LateParameters
from ddpobs.reducer.participation import AllRequired, Participation, choose
from ddpobs.reducer.readiness import Hook, Readiness
from ddpobs.reducer.settings import Settings
from ddpobs.reducer.static_graph import StaticGraph
from ddpobs.reducer.unused_parameters import UnusedParameters
from ddpobs.reducer.used_map import UsedMap
from ddpobs.torch_seam import autograd, ranges
from ddpobs.torch_seam.collectives import all_reduce
from ddpobs.torch_seam.interpreter_exit import rest_at_exit
from ddpobs.torch_seam.modes import unseen
from ddpobs.wire.text import joined


class Reducer:
    """Reduces the gradients of one set of parameters.

    Args:
        parameters: The parameters that require a gradient, in the module's order.
        names: Their names.
        expect_sparse: By parameter, whether its gradient is sparse.
        group: The process group.
        comm_factory: Creates the communication strategy for the group.
        settings: The front end's choices.
        recorder: Receives the times of each bucket; None with telemetry off.
        front_end: Its methods are called in each backward.
        frozen: The parameters that require no gradient now, and may do so later.
        wrap_hook: As for `Readiness`.

    Attributes:
        readiness: Follows the gradients.
        layout: The parameters and their buckets.
        comm: The strategy.
        pending: The communications of this backward, in bucket order.
        unused: The parameters that a backward leaves out.
        used_map: How many ranks used each parameter.
        times: Stamps of the backward under way.
        faults: Reports a fault of one rank to all.
        buckets_reduced: Number of buckets launched in the latest backward; a skipped bucket does not count.
        late: The parameters that start to require gradients.
        waits_later: Other work follows before `finish`, so that the wait for the last bucket does not time it.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        expect_sparse: Sequence[bool],
        *,
        group: dist.ProcessGroup,
        comm_factory: CommFactory,
        settings: Settings,
        recorder: ModuleObserver | None,
        front_end: FrontEnd,
        frozen: Iterable[Frozen] = (),
        wrap_hook: Callable[[int, Hook], Hook] | None = None,
    ) -> None:
        rest_at_exit()
        self.settings, self.recorder, self._front_end = settings, recorder, front_end
        self._comm_factory, self.comm = comm_factory, comm_factory(group)
        self.faults = FaultBroadcast(group)
        self.late = LateParameters(frozen)
        self.pending: list[Pending] = []
        self.buckets_reduced = 0
        self.waits_later = False
        self._keeps_graph = False
        self.times = BucketTimes(recorder)
        self.layout = Layout(parameters, names, expect_sparse, settings.as_views, settings.drops.layers_of)
        self.layout.build(
            settings.assignment or assignment.assign(parameters, settings.first_limits_bytes, expect_sparse)
        )
        self.buckets = self.layout.buckets
        self.unused = UnusedParameters(self.layout, recorder, settings.drops)
        self._nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters]
        self.used_map = self._new_used_map()
        self.readiness = Readiness(
            self.layout,
            self._nodes,
            self._choose_participation(),
            self,
            keeps_order=self._rebuilds,
            ends_with_engine=settings.ends_with_engine,
            wrap_hook=wrap_hook,
        )
        self._reduce_over(group)
        self._report_layout()

    def _choose_participation(self) -> Participation:
        return choose(self.settings, self.layout, self._nodes, self.used_map)

    def _new_used_map(self) -> UsedMap:
        device = self.layout.parameters[0].device
        reduce: Callable[[torch.Tensor], dist.Work] = lambda used: all_reduce(self.group, [used])  # noqa: E731
        return UsedMap(len(self.layout.names), device, reduce, self.recorder)

    @property
    def _rebuilds(self) -> bool:
        """Whether the buckets are rebuilt in the order in which gradients arrive in the first backward."""
        return self.settings.assignment is None and (self.settings.static_graph or not self.settings.find_unused)

    @property
    def bucket_bytes(self) -> list[int]:
        """Size of each bucket in launch order."""
        return [bucket.buffer.numel() * bucket.buffer.element_size() for bucket in self.buckets]

    @unseen
    def _reduce_over(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, group.size()
        self.times.use_group(group, self.layout.parameters[0].device)

    # ------------------------------------------------------------------ the start, as Readiness reports it

    def check_backward(self) -> None:
        """Raise if the front end cannot reduce this backward."""
        self._front_end.check_backward()

    def start_backward(self) -> list[Callable[[int], None]]:
        """Open the backward's record, and prepare each bucket's memory and divisor."""
        self.faults.start_backward()
        self.buckets_reduced = 0
        self._keeps_graph = torch.is_grad_enabled()
        self.faults.record(self.late.report(static_graph=self.settings.static_graph))
        stampers = self.times.backward_began(self.layout.flat_index)
        divisor = self._front_end.divisor()
        for bucket in self.buckets:
            bucket.divisor = divisor
            if bucket.copies_on_arrival:  # The other buckets restore their views when they are filled.
                bucket.memory.restore_views()
            if not self.settings.as_views:
                bucket.reallocate_if_held()
            if self._keeps_graph:
                bucket.keep_graph()
        return [*stampers, *self._front_end.arrival_callbacks()]

    def stash_old_gradients(self, unreached: Sequence[int]) -> None:
        """Keep older gradients of parameters that take no part, unless they count."""
        if not self.settings.missing_as_zero:
            self.unused.stash(unreached, self.readiness.used)

    def record_fault(self, fault: Fault | None) -> None:
        """Keep a fault of this rank until the last bucket reports it to the others."""
        self.faults.record(fault)

    # ------------------------------------------------------------------ launch

    def bucket_ready(self, bucket: Bucket) -> None:
        """Every gradient of the bucket has arrived: launch it, unless an earlier bucket is still incomplete."""
        if (record := self.times.record) is not None:
            record.ready_ns[bucket.index] = self.times.now()
        self._outside_graph(self._launch_ready)

    def _outside_graph(self, function: Callable[[], None]) -> None:
        """Call a function that changes gradients; with `create_graph=True` its operations are not recorded."""
        if self._keeps_graph:
            with torch.no_grad():
                function()
        else:
            function()

    def _launch_ready(self, final: bool = False) -> None:
        """Launch complete buckets, strictly in order. At the end of a backward (`final`) all are launched."""
        count = len(self.buckets)
        while len(self.pending) < (count if final or not self.settings.ends_with_engine else count - 1):
            bucket = self.buckets[len(self.pending)]
            if bucket.pending > 0 and not final:
                return
            if not self.readiness.participation.should_launch(bucket.members):
                self.pending.append(SkippedBucket())
                continue
            if self.times.marks_nvtx or ranges.profiler_records():
                with ranges.mark(self._range_name(bucket), self.times.marks_nvtx):
                    self._launch(bucket)
            else:
                self._launch(bucket)

    def _range_name(self, bucket: Bucket) -> str:
        first, *others = bucket.members
        return f"ddpobs bucket {bucket.index}: {self.layout.names[first]}{' ...' if others else ''}"

    def _launch(self, bucket: Bucket) -> None:
        if not self.pending:
            self._front_end.first_launch()
        autograd.leave_context()
        bucket.fill(self.readiness.used)
        if self.unused.stashed:
            self.unused.restore(bucket)
        last, record = bucket is self.buckets[-1], self.times.record
        if last and self.faults.fault is not None and self.carries_faults:
            self.late.save(bucket)
            self.faults.poison(bucket.buffer)
        if record is not None:
            record.launched_ns[bucket.index], record.last_bucket[0] = self.times.now(), bucket.index
        pending = self.comm.launch(bucket, last)
        self.pending.append(pending)
        self.buckets_reduced += 1
        if record is not None:
            # A work keeps its buffer until it is read, so it is not kept for buckets that are about to be rebuilt.
            keeps_work, timed_by_wait = self.readiness.order is None, last and self._last_is_timed_by_wait
            self.times.follow(pending, bucket.index, keeps_work=keeps_work, timed_by_wait=timed_by_wait)
        self._front_end.bucket_launched(bucket, pending)

    @property
    def _last_is_timed_by_wait(self) -> bool:
        """Whether the wait for the last bucket, which begins right after its launch, returns when it is done.

        Then that bucket needs no callback. The process group's thread would want the interpreter for it just when
        training continues, which costs 0.1 ms per step.
        """
        return self.settings.ends_with_engine and type(self.comm) is AllReduce and not self.waits_later

    @property
    def carries_faults(self) -> bool:
        """Whether a NaN in the last bucket reaches every rank."""
        return self.comm.carries_nan and self.buckets[-1].elements > 0 and not self.settings.skip_unused

    # ------------------------------------------------------------------ wait

    def backward_ended(self) -> None:
        """The engine's last callback; the front end calls `finish`."""
        self._outside_graph(self._front_end.backward_ended)

    def finish(self) -> None:
        """Wait for every bucket, after `launch_rest`, and settle the parameters that were left out.

        An error that the other ranks do not receive, as in a user's hook, leaves the backward open. It is then ended by
        `zero_participation.abort`.
        """
        recorder, record = self.recorder, self.times.record
        if self._last_is_timed_by_wait:
            self.times.wait_for(self.pending[-1])
        for pending in self.pending:
            pending.wait()
        late: list[Bucket] = []
        try:
            if reports := self.raise_shared_fault(self.buckets[-1]):
                late = self.reduce_late(reports, self.buckets[-1])
            self._front_end.write_results(late)
            unused = self.readiness.participation.resolve()
            if unused is not None:
                self.unused.settle(*unused, self.pending, self.ranks)
        except UnusedParametersError as error:
            self.unused.report_missing(error.parameters, self.group)
            raise
        finally:
            self.end()
        if recorder is not None and record is not None:
            recorder.finished(record)
        if late:
            self.take_in(late)

    def launch_rest(self) -> None:
        """Launch the buckets that are left at the end of a backward."""
        autograd.leave_context()
        readiness, participation = self.readiness, self.readiness.participation
        if participation.defers_launch:
            for bucket in self.buckets:
                bucket.pending -= 1
            readiness.forget_undefined()
        missing = readiness.unseen()
        fault = participation.end(readiness.used, missing)
        self.faults.record(fault and self._front_end.explain(fault))
        if self.faults.fault is not None and self.faults.fault.added:
            self.faults.record(self.late.report(static_graph=False, all_required=type(participation) is AllRequired))
        self.faults.publish()
        self.stash_old_gradients(missing)
        if self.settings.skip_unused:
            participation.start_map_reduce()
        self._launch_ready(final=True)
        participation.start_map_reduce()

    def raise_shared_fault(self, last: Bucket) -> list[Fault]:
        """Raise the same error on every rank if some rank reported a fault; `last` is its last bucket, reduced.

        Returns:
            Each rank's report if all have the same new parameters; empty otherwise.
        """
        element = last.head if self.carries_faults else self.faults.all_reduce_flag(last.parameters[0].device)
        return self.faults.raise_if_any_failed(element, at_once=self.readiness.participation.is_first_backward)

    def end(self) -> None:
        """Forget this backward: this rank owes the others nothing more of it."""
        readiness = self.readiness
        if readiness.order is not None and not readiness.order:
            # Every rank rebuilds its buckets next, also a rank without any gradient.
            readiness.order = list(reversed(range(len(self.layout.parameters))))
        self.times.record = None
        self.faults.forget()
        self.late.forget_saved()
        readiness.reset()
        self.pending = []
        self.unused.forget()
        self._front_end.reset()

    # ------------------------------------------------------------------ parameters that start to require gradients

    def look_for_late_parameters(self) -> None:
        """Look for parameters that require gradients since the buckets were built; the next backward reduces them."""
        self.late.look()
        if self.late.waiting or self.readiness.waiting_nodes:
            parameters = [parameter for _, parameter, _ in self.late.waiting]
            self.readiness.waiting_nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]

    def reduce_late(self, reports: Sequence[Fault], last: Bucket, has_data: bool = True) -> list[Bucket]:
        """Reduce the new parameters; arguments and result as of `LateParameters.reduce`."""
        divisor, limits = self._front_end.divisor(), self.settings.first_limits_bytes
        return self.late.reduce(
            reports, last, self.layout, self.comm, divisor=divisor, limits_bytes=limits, has_data=has_data
        )

    def take_in(self, buckets: Sequence[Bucket]) -> None:
        """Let the buckets of new parameters join the others, from the next backward on."""
        names, parameters, sparse = map(list, zip(*self.late.taken_in(), strict=True))
        self.layout.append(buckets, parameters, names, sparse)
        self._nodes += [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters]
        self.used_map = self._new_used_map()
        for bucket in buckets:
            bucket.reset()
        # Other strategies may keep state by the bucket's index.
        rebuilds = self._rebuilds and self.settings.ends_with_engine and type(self.comm) is AllReduce
        self.readiness.add_parameters(self._nodes, self._choose_participation(), rebuilds)
        self._front_end.parameters_added(parameters)
        self._report_layout()
        if self.recorder is not None:
            self.recorder.event("parameters_added", parameters=joined(names), count=len(names))

    # ------------------------------------------------------------------ changes of the setup

    def rebuild(self, buckets: Sequence[Sequence[int]] | None = None) -> bool:
        """Build these buckets, or fill them in the order in which gradients arrived last on rank 0. A collective call.

        Returns False if the buckets have to stay as they are.
        """
        arrivals, self.readiness.order = self.readiness.order or [], None
        start = self.recorder.now() if self.recorder is not None else 0
        if buckets is None:
            rebuilt = self.layout.rebuild_in_order(arrivals, self.settings.rebuilt_limits_bytes, self.group)
        else:
            rebuilt = self.layout.rebuild(buckets, self.group)
        if self.recorder is not None:  # As in the buffers' broadcast, most of it is the wait for a slow rank.
            self.recorder.communicated("buffers", start, self.recorder.now())
        if not rebuilt:
            return False
        self._report_layout()
        if self.recorder is not None:
            self.recorder.event("buckets_rebuilt", buckets=len(self.buckets))
        return True

    def _report_layout(self) -> None:
        if self.recorder is not None:
            self.recorder.layout(self.layout.describe(), self.comm.name)

    def set_comm(self, comm: BucketComm) -> None:
        """Communicate full buckets with `comm` from now on."""
        self.comm = comm
        self._report_layout()

    def set_group(self, group: dist.ProcessGroup, keeps_comm: bool) -> None:
        """Reduce over another group from now on, with a new object of the strategy unless `keeps_comm`."""
        self._reduce_over(group)
        self.faults = FaultBroadcast(group)
        if not keeps_comm:
            self.set_comm(self._comm_factory(group))

    def switch_to_static_graph(self) -> None:
        """Expect the same parameters in every backward from now on."""
        if not isinstance(self.readiness.participation, StaticGraph):
            self.settings = replace(self.settings, static_graph=True, skip_unused=False)
            self.restart_participation()

    def restart_participation(self) -> None:
        """Choose the policy anew, without the results of earlier backward passes."""
        self.readiness.restart(self._choose_participation(), self._rebuilds)
