"""The batches of traces: what their ranks would have sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import msgspec

from ddpobs import wire
from ddpobs.errors import TraceFileError
from ddpobs.imports import envelope
from ddpobs.imports.arrivals import Arrival, arrivals, common_steps, peers
from ddpobs.imports.groups import Compared, Group, groups_of
from ddpobs.imports.rank_trace import RankTrace
from ddpobs.imports.replay import Replayed, replay
from ddpobs.shared.words import format_ranks
from ddpobs.steps.account import Account, StartUp, Tail

_SHARDED = ("fully_shard", "deepspeed")
"""Layouts of models whose units or collectives take the place of DDP's buckets."""
_STEPS = 1_000
"""Steps of a batch."""
_NO_STEP = "they have no step in common"


def numbered(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Give each trace a rank: its own, or if no file tells one, its position.

    Raises:
        TraceFileError: Two files are of the same rank or of runs of different size, or some tell no rank.
    """
    if all(trace.rank is None for trace in traces):
        return [replace(trace, rank=index, world_size=len(traces)) for index, trace in enumerate(traces)]
    by_rank: dict[int, RankTrace] = {}
    for trace in traces:
        if trace.rank is None:
            raise TraceFileError(trace.source, "the number of the rank, as the other files tell it", "none")
        if trace.world_size != traces[0].world_size:
            expected = f"a file of the same run as {traces[0].source}, with {traces[0].world_size} ranks"
            raise TraceFileError(trace.source, expected, f"{trace.world_size}")
        if trace.rank in by_rank:
            other = by_rank[trace.rank].source
            raise TraceFileError(trace.source, "one file of each rank", f"rank {trace.rank}, as in {other}")
        by_rank[trace.rank] = trace
    return [by_rank[rank] for rank in sorted(by_rank)]


class TracedRun:
    """The ranks' traces with their steps.

    Args:
        traces: One of each rank, as `numbered` returns them.
        run: Name of the run.
        file_format: Name of the format, which the run shows.
        replayed: Their steps, in the same order; None if the traces are to be replayed.

    Raises:
        TraceFileError: A trace has no step that reduced gradients.
    """

    def __init__(
        self, traces: Sequence[RankTrace], run: str, file_format: str, replayed: Sequence[Replayed] | None = None
    ) -> None:
        self._traces, self._run, self._format = traces, run, file_format
        self.ranks = [trace.rank or 0 for trace in traces]
        self.world_size = max(len(traces), *(trace.world_size or 0 for trace in traces), *(r + 1 for r in self.ranks))
        self._replayed = [replay(trace) for trace in traces] if replayed is None else replayed

    @property
    def steps(self) -> list[wire.Steps]:
        """Steps of each rank."""
        return [replayed.summary.steps for replayed in self._replayed]

    @cached_property
    def _compared(self) -> Compared:
        return groups_of(self._traces, self.steps, [replayed.group for replayed in self._replayed])

    @cached_property
    def _groups(self) -> list[list[int]]:
        """Indices of the ranks that are compared: those that reduce gradients together."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, group in enumerate(self._compared.groups):
            groups.setdefault((index,) if self._compared.reason else group, []).append(index)
        return list(groups.values())

    def _of(self, group: Sequence[int]) -> tuple[list[wire.Steps], list[int]]:
        """Steps and numbers of these ranks."""
        steps = self.steps
        return [steps[index] for index in group], [self.ranks[index] for index in group]

    @property
    def arrivals(self) -> list[Arrival]:
        """The ranks that arrived last, of each group."""
        return [arrival for group in self._groups for arrival in arrivals(*self._of(group))]

    @property
    def lines(self) -> list[str]:
        """The number of steps, and who arrived last."""
        found = [f"{max(len(steps) for steps in self.steps)} steps of {format_ranks(self.ranks)}"]
        if self._compared.reason:
            reason = self._compared.reason if common_steps(self.steps) else _NO_STEP
            return [*found, f"{format_ranks(self.ranks)} are not compared: {reason}"]
        for group in self._groups:
            steps, ranks = self._of(group)
            where = f"of {format_ranks(ranks)}, " if len(self._groups) > 1 else ""
            late = arrivals(steps, ranks)
            found += [f"{where}{arrival}" for arrival in late]
            if len(ranks) > 1 and not late:
                found.append(f"{format_ranks(ranks)} {_together(common_steps(steps))}")
        return found

    def batches(self) -> Iterator[wire.Batch]:
        """Yield the run's batches, rank by rank."""
        attempt = envelope.nonce(self._run, *map(_identity, self._traces, self.steps))
        compared = {group[0]: peers(*self._of(group)) for group in self._groups}
        for index, (trace, replayed) in enumerate(zip(self._traces, self._replayed, strict=True)):
            group, reason = self._compared.groups[index], self._compared.reason
            rank = trace.rank or 0
            begun = envelope.first_batch(
                run=self._run,
                attempt=attempt,
                rank=rank,
                world_size=self.world_size,
                anchor=_anchor(trace, int(replayed.summary.steps.end_ns[-1])),
                hello=envelope.hello(
                    self._format,
                    trace.source,
                    _settings(replayed, group, reason),
                    host=trace.host,
                    device=trace.device,
                    backend=trace.backend,
                ),
            )
            found = compared.get(index)
            begun = msgspec.structs.replace(
                begun, layouts=replayed.layouts, peers=[found] if found else [], events=trace.events
            )
            yield from _filled(begun, replayed)


def _together(steps: int) -> str:
    """What ranks do of which none is named."""
    return f"arrived together in {steps} steps" if steps else f"are not compared: {_NO_STEP}"


def _settings(replayed: Replayed, group: Group, reason: str) -> dict[str, wire.Scalar]:
    """What findings must know: that the model has units, the ranks that reduce its gradients, or why none compare."""
    settings: dict[str, wire.Scalar] = {}
    if replayed.layouts and replayed.layouts[0].comm in _SHARDED:
        settings["reducer"] = replayed.layouts[0].comm
    if reason:
        settings["not_compared"] = reason
    elif group:
        settings |= {"group_ranks": len(group), "group_first": min(group)}
    return settings


def _filled(begun: wire.Batch, replayed: Replayed) -> Iterator[wire.Batch]:
    """Yield the batches of a rank: the first one as it is begun, with the first steps."""
    steps, spans, comms = replayed.summary[:3]
    account = Account(_start(steps))
    account.add(steps, replayed.summary.outside, replayed.summary.compiled_ns)
    end_ns, emitted = int(steps.end_ns[-1]), 0
    begins = range(0, len(steps), _STEPS)
    for seq, begin in enumerate(begins):
        part = steps.select(slice(begin, begin + _STEPS))
        first, last = int(part.step[0]), int(part.step[-1])
        is_last = seq == len(begins) - 1
        batch = msgspec.structs.replace(
            begun,
            seq=seq,
            layouts=begun.layouts if seq == 0 else [],
            peers=begun.peers if seq == 0 else [],
            steps=part,
            spans=spans.select((spans.step >= first) & (spans.step <= last)),
            comms=comms.select((comms.step >= first) & (comms.step <= last)),
            account=_account(account, end_ns, last) if is_last else None,
            events=[*begun.events] * (seq == 0) + [wire.Event(kind="goodbye", at_ns=end_ns, step=last)] * is_last,
        )
        emitted += wire.records(batch)
        yield msgspec.structs.replace(batch, emitted=emitted)


def _account(account: Account, end_ns: int, last: int) -> wire.Account:
    """The account of the steps; the first batch of a trace is seldom that of the training, so it is no start-up."""
    return msgspec.structs.replace(account.at(Tail(end_ns, last + 1, finished=True)), first_batch_ns=0)


def _start(steps: wire.Steps) -> StartUp:
    """A trace begins when its first step does: nothing is known of the process before."""
    begin_ns = int(steps.start_ns[0])
    return StartUp(None, begin_ns, begin_ns)


def _anchor(trace: RankTrace, end_ns: int) -> wire.Anchor:
    return wire.Anchor(wall_ns=trace.wall_ns + end_ns, monotonic_ns=end_ns)


def _identity(trace: RankTrace, steps: wire.Steps) -> str:
    return f"{trace.source} {trace.rank} {hashlib.sha256(steps.table.tobytes()).hexdigest()}"
