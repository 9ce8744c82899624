"""Launch and wait: the gradient reduction of one set of parameters.

One backward, in order: `begin` (first gradient, or first gradient of an output), a hook per parameter that counts its
bucket down (both in `readiness`), `_launch` strictly in bucket order while autograd goes on, `_finish` as the engine's
last callback, which launches the last bucket: by then it is known whether the backward was as it should be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddpobs.buckets import bucket as bucketing
from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import AllReduce, BucketComm, CommFactory, Pending, SkippedBucket
from ddpobs.errors import ReducerError, UnusedParametersError
from ddpobs.reducer.fault_broadcast import Fault, FaultBroadcast
from ddpobs.reducer.readiness import Readiness, Settings
from ddpobs.reducer.used_map import UsedMap
from ddpobs.torch_seam import autograd
from ddpobs.torch_seam.collectives import all_reduce, time_collectives
from ddpobs.torch_seam.interpreter_exit import rest_at_exit, stay_in_interpreter

if TYPE_CHECKING:
    from ddpobs.clocks import Stamp
    from ddpobs.recording.module_recorder import ModuleRecorder


class Reducer(Readiness):
    """Reduces gradients bucket by bucket while backward goes on.

    Attributes:
        keeps_last: The last bucket is launched when the backward is over, and can tell every rank what was wrong.
        graph_static: This rank's backwards have left out the same parameters so far.

    Args:
        parameters: Those that require a gradient, in the module's order.
        names: Theirs.
        expect_sparse: Which of them get sparse gradients.
        group: The process group.
        comm_factory: Creates the communication strategy for the group.
        settings: The constructor's.
        recorder: Told of each bucket, or None with telemetry off.
    """

    defers_last_bucket = True

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        expect_sparse: Sequence[bool],
        *,
        group: dist.ProcessGroup,
        comm_factory: CommFactory = AllReduce,
        settings: Settings,
        recorder: ModuleRecorder | None,
    ) -> None:
        rest_at_exit()
        self._comm_factory = comm_factory
        self._comm: BucketComm = comm_factory(group)
        self.unused_bytes = 0
        self.graph_static = True
        self._left_out: list[int] | None = None
        self._stashed: dict[int, torch.Tensor] = {}
        self._pending: list[Pending] = []
        device = parameters[0].device
        used_map = UsedMap(len(names), device, lambda used: all_reduce(self._group, [used]), recorder)
        alarm = FaultBroadcast(group)
        super().__init__(
            parameters, names, expect_sparse, settings=settings, used_map=used_map, alarm=alarm, recorder=recorder
        )
        self._reduce_over(group)
        self._report_layout()

    def _reduce_over(self, group: dist.ProcessGroup) -> None:
        """Over these ranks from now on."""
        self._group, self._ranks = group, group.size()
        self._divisor: float = self._ranks
        self._works_time_themselves = self._recorder is not None and time_collectives(group, self._parameters[0].device)

    @property
    def bucket_bytes(self) -> list[int]:
        """Size of each bucket in launch order."""
        return [bucket.buffer.numel() * bucket.buffer.element_size() for bucket in self._buckets]

    @property
    def bucket_members(self) -> list[list[int]]:
        """Indices of each bucket's parameters, in launch order."""
        return [bucket.members for bucket in self._buckets]

    # ------------------------------------------------------------------ a bucket

    def _ready(self, bucket: Bucket) -> None:
        if self._record is not None:
            self._record.ready_ns[bucket.index] = self._now()
        self._launch_ready()

    def _launch_ready(self, final: bool = False) -> None:
        """Launch what is ready, strictly in order; at the end of a backward everything is."""
        count = len(self._buckets)
        while len(self._pending) < (count if final or not self.defers_last_bucket else count - 1):
            bucket = self._buckets[len(self._pending)]
            if bucket.pending > 0 and not final:
                return
            if self._settings.skip_unused and not self._participation.should_launch(bucket.members):
                self._pending.append(SkippedBucket())
                continue
            self._launch(bucket)

    def _divides_by(self) -> float | None:
        return self._divisor if self._comm.divides else None

    def _launch(self, bucket: Bucket) -> None:
        autograd.leave_context()
        bucket.fill(self._used)
        if self._stashed:
            self._restore_stashed(bucket)
        index, last, record = bucket.index, bucket is self._buckets[-1], self._record
        if last and self._faults.fault is not None and self._in_band:
            self._faults.poison(bucket.buffer)
        if record is not None:
            record.launched_ns[index], record.last_bucket[0] = self._now(), index
        pending = self._comm.launch(bucket, last)
        self._pending.append(pending)
        if record is not None:
            # A work keeps its buffer until it is read: not of buckets that are laid anew next.
            if (
                self._works_time_themselves
                and self._order is None
                and (work := getattr(pending, "work", None)) is not None
            ):
                record.works[index] = work
            if not (last and self._last_is_timed_by_wait):
                self._stamp_completion(pending, index, record.done_ns)

    def _stamp_completion(self, pending: Pending, index: int, done_ns: list[Stamp]) -> None:
        """Note when a bucket's communication completes."""
        now = self._now

        def done(_: object) -> None:
            done_ns[index] = now()
            stay_in_interpreter()

        pending.on_done(done)

    def _stash_old_gradients(self, unreached: Sequence[int]) -> None:
        """Keep older gradients of parameters that take no part: replaced only where some rank used them."""
        for index in unreached:
            bucket, gradient = self._bucket_of[index], self._parameters[index].grad
            if gradient is not None and not self._used[index] and not bucket.sparse:
                view = bucket.views[self._index_in_bucket[index]]
                self._stashed[index] = gradient.clone() if gradient is view else gradient

    def _restore_stashed(self, bucket: Bucket) -> None:
        for member in bucket.members:
            if member in self._stashed:
                self._parameters[member].grad = self._stashed[member]

    # ------------------------------------------------------------------ the end of a backward

    def _finish(self) -> None:
        """The engine's last callback: wait for every bucket and settle what was left out.

        An error that no other rank hears of, as one of a user's hook, leaves the backward to `abandon`.
        """
        recorder, record = self._recorder, self._record
        autograd.leave_context()
        self._launch_the_rest()
        if record is not None and self._last_is_timed_by_wait:
            self._pending[-1].wait()
            record.done_ns[-1] = self._now()
        for pending in self._pending:
            pending.wait()
        try:
            self._raise_shared_fault(self._buckets[-1])
            self._resolve_unused()
        except UnusedParametersError as error:
            self._tell_left_out(error.parameters)
            raise
        finally:
            self._end()
        if recorder is not None and record is not None:
            recorder.finished(record)

    def _end(self) -> None:
        """Nothing of the backward is owed to the other ranks any more."""
        self._order_at_least()
        self._reset()
        self._used[:] = bytes(len(self._used))

    def _launch_the_rest(self) -> None:
        participation = self._participation
        if participation.defers_launch:
            for bucket in self._buckets:
                bucket.pending -= 1
        missing = [i for bucket in self._buckets if bucket.pending > 0 for i in bucket.members if not self._seen[i]]
        self._faults.record(self._explained(participation.end(self._used, missing)))
        self._faults.publish()
        self._stash_old_gradients(missing)
        if self._settings.skip_unused:
            participation.start_map_reduce()
        self._launch_ready(final=True)
        participation.start_map_reduce()

    def _explained(self, fault: Fault | None) -> Fault | None:
        """The fault, or what is behind it."""
        return fault

    @property
    def _last_is_timed_by_wait(self) -> bool:
        """Whether the wait for the last bucket, which begins as soon as it is launched, returns when it is done.

        Then that bucket needs no callback, for which the process group's thread would want the interpreter just when
        training goes on: a tenth of a millisecond a step.
        """
        return self.defers_last_bucket and type(self._comm) is AllReduce

    @property
    def _in_band(self) -> bool:
        """Whether the last bucket carries a NaN from one rank to all."""
        return self._comm.carries_nan and self._buckets[-1].elements > 0 and not self._settings.skip_unused

    def _raise_shared_fault(self, last: Bucket) -> None:
        """Raise the same error on every rank where some rank told of a fault."""
        element = last.head if self._in_band else self._faults.all_reduce_flag(last.parameters[0].device)
        self._faults.raise_if_any_failed(element, at_once=self._participation.is_first_backward)

    def _resolve_unused(self) -> None:
        """Give `.grad` to what some rank used, and leave alone what nobody did."""
        found = self._participation.resolve()
        if found is None:
            return
        locally, nobody = found
        self.graph_static = self.graph_static and self._left_out in (None, locally)
        self._left_out = locally
        self.unused_bytes = sum(self._parameters[i].numel() * self._parameters[i].element_size() for i in locally)
        for index in nobody:
            if not isinstance(self._pending[self._bucket_of[index].index], SkippedBucket):
                self._bucket_of[index].return_residual(self._index_in_bucket[index], self._ranks)
        for index in sorted(set(locally) - set(nobody)):
            self._bucket_of[index].assign_grad(self._index_in_bucket[index])
        if self._recorder is not None:
            self._recorder.unused([self._names[i] for i in locally], [self._names[i] for i in nobody])

    def _tell_left_out(self, parameters: dict[str, list[int]]) -> None:
        if self._recorder is not None:
            mine = self._group.rank()
            everywhere = [name for name, ranks in parameters.items() if len(ranks) == self._ranks]
            self._recorder.unused([name for name, ranks in parameters.items() if mine in ranks], everywhere)

    def _reset(self) -> None:
        super()._reset()
        self._pending = []
        self._stashed = {}
        self._divisor = self._ranks

    # ------------------------------------------------------------------ what a rank does that has no gradients

    def participate_with_zeros(self) -> None:
        """Take part in another rank's backward with zeros, call for call: one that is dropped as well."""
        self._faults.poll_flags()
        self._faults.start_backward()
        self._participation.take_part_without_data()
        try:
            self._launch_rest_with_zeros(self._zero_buckets())
            self._participation.resolve()
        except ReducerError as error:
            if not error.interrupted:
                raise
        finally:
            self._participation.forget()
        if self._recorder is not None:
            self._recorder.shadowed()

    def abort_backward(self) -> Iterator[None]:
        """End a backward that an error interrupted: ranks that are still in it get an error too, and none hangs.

        First comes what the others launch while they are in the backward; resumed, what they launch at its end.
        """
        self._faults.fault = Fault(
            message="an error interrupted its backward, so that this one has no result on any rank. Drop the batch "
            "(zero_grad) on every rank, or stop",
            interrupted=True,
        )
        reduced = [bucket for bucket, _ in zip(self._buckets, self._pending, strict=False) if not bucket.sparse]
        try:
            self._participation.end(self._used, [i for i, fired in enumerate(self._seen) if not fired])
            shadows = self._zero_buckets()
            if not (self._participation.defers_launch or self._settings.skip_unused):
                self._pending += [self._comm.launch(bucket, False) for bucket in shadows[len(self._pending) : -1]]
            yield
            for launched in self._pending:
                with suppress(Exception):  # It was told of where it was waited for first, if it is an old one.
                    launched.wait()
            self._pending = [SkippedBucket() for _ in self._pending]
            self._launch_rest_with_zeros(shadows)
        except Exception:
            pass  # Each rank's own, what every other rank raises, or what a hook has raised before.
        finally:
            for bucket in reduced:  # `zero_grad` may have come before the result.
                bucket.buffer.zero_()
            self._end()

    def _zero_buckets(self) -> list[Bucket]:
        return [bucketing.zeros_like(bucket) for bucket in self._buckets]

    def _order_at_least(self) -> None:
        """Every rank rebuilds its buckets next, also one where no gradient came."""
        if self._order is not None and not self._order:
            self._order = list(reversed(range(len(self._parameters))))

    def _launch_rest_with_zeros(self, shadows: Sequence[Bucket]) -> None:
        """Launch what is not launched yet with zeros in it, and wait for all."""
        participation, rest, last = self._participation, shadows[len(self._pending) :], shadows[-1]
        if self._faults.fault is not None and self._in_band:
            self._faults.poison(last.buffer)
        self._faults.publish()
        if self._settings.skip_unused:
            participation.start_map_reduce()
        wanted = [bucket for bucket in rest if participation.should_launch(bucket.members)]
        pending = [*self._pending, *(self._comm.launch(bucket, bucket is last) for bucket in wanted)]
        participation.start_map_reduce()
        for launched in pending:
            launched.wait()
        self._raise_shared_fault(last)

    # ------------------------------------------------------------------ layout

    def rebuild(self) -> bool:
        """Lay the buckets anew, in the order in which gradients came last on rank 0. Every rank calls it alike.

        False where they have to stay as they are.
        """
        came, self._order = self._order or [], None
        began = self._recorder.now() if self._recorder is not None else 0
        laid = self._layout.rebuild_in_order(came, self._settings.rebuilt_limits_bytes, self._group)
        if self._recorder is not None:  # As of the buffers' broadcast, the wait for a slow rank is most of it.
            self._recorder.communicated("buffers", began, self._recorder.now())
        if not laid:
            return False
        self._report_layout()
        if self._recorder is not None:
            self._recorder.event("buckets_rebuilt", buckets=len(self._buckets))
        return True

    def _report_layout(self) -> None:
        if self._recorder is not None:
            self._recorder.layout(self._layout.describe(), self._comm.name)

    def set_comm(self, comm: BucketComm) -> None:
        """Have full buckets handed to `comm` from now on."""
        self._comm = comm
        self._report_layout()
