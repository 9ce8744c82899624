"""The run of a hang's dumps: no steps, and of each rank the collective in which it waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ddpobs import wire
from ddpobs.errors import TraceFileError
from ddpobs.imports import envelope
from ddpobs.imports.dump_verdicts import Verdict, verdicts
from ddpobs.imports.flight_recorder import Entry, RankDump
from ddpobs.wire.facts import DUMPED, DumpFacts

_FORMAT = "torch Flight Recorder"
_FRAMES, _CHARACTERS = 40, 256
"""Maximum number of frames of a stack, and of characters of a frame, on the wire."""
_TEXT = 1000
"""Maximum number of characters of a text on the wire."""


class DumpedRun:
    """Dumps of the ranks of a hang.

    Args:
        dumps: One of each rank.
        run: Name of the run.

    Raises:
        TraceFileError: Two dumps are of the same rank, one is of no rank of the run, or no rank waits.
    """

    def __init__(self, dumps: Sequence[RankDump], run: str) -> None:
        self._run, self._dumps = run, _by_rank(dumps)
        self._verdicts = verdicts(dumps)
        if not self._verdicts:
            raise TraceFileError(dumps[0].source, "dumps of a hang", "no rank that waits in a collective")

    @property
    def lines(self) -> list[str]:
        """The verdict on each process group, and its cause."""
        return [line for one in self._verdicts for line in (one.verdict, f"cause: {one.cause}")]

    def batches(self) -> Iterator[wire.Batch]:
        """Yield a batch of each rank. That of the lowest rank has the first verdict."""
        attempt = envelope.nonce(self._run, *(f"{rank} {_latest_ns(dump)}" for rank, dump in self._dumps.items()))
        members = {rank for dump in self._dumps.values() for ranks in dump.members.values() for rank in ranks}
        for rank, dump in self._dumps.items():
            at_ns = _latest_ns(dump)
            batch = envelope.first_batch(
                run=self._run,
                attempt=attempt,
                rank=rank,
                world_size=max(members | set(self._dumps)) + 1,
                anchor=wire.Anchor(wall_ns=at_ns, monotonic_ns=at_ns),
                hello=envelope.hello(_FORMAT, dump.source),
            )
            events = [_event(self._verdicts[0], at_ns)] if rank == min(self._dumps) else []
            pulse = _pulse(self._verdicts[0].waits.get(rank), at_ns)
            yield msgspec.structs.replace(batch, pulse=pulse, events=events, emitted=len(events))


def _by_rank(dumps: Sequence[RankDump]) -> dict[int, RankDump]:
    by_rank: dict[int, RankDump] = {}
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        if dump.rank in by_rank:
            other = by_rank[dump.rank].source
            raise TraceFileError(dump.source, "one dump of each rank", f"rank {dump.rank}, as in {other}")
        by_rank[dump.rank] = dump
    members = {rank for dump in dumps for ranks in dump.members.values() for rank in ranks}
    for dump in by_rank.values():
        if members and dump.rank not in members:
            raise TraceFileError(dump.source, "a dump of a rank of the run's process groups", f"rank {dump.rank}")
    return by_rank


def _latest_ns(dump: RankDump) -> int:
    return max((entry.time_created_ns for entry in dump.entries), default=0)


def _event(verdict: Verdict, at_ns: int) -> wire.Event:
    facts = DumpFacts(
        kind=verdict.kind,
        verdict=verdict.verdict[:_TEXT],
        cause=verdict.cause[:_TEXT],
        ranks=_listed(verdict.ranks),
        waiting=_listed(verdict.waits),
    )
    return wire.Event(kind=DUMPED, at_ns=at_ns, detail=msgspec.structs.asdict(facts))


def _listed(ranks: Iterable[int]) -> str:
    """The ranks with commas between them, the last ones left out where the text would be too long."""
    text = ",".join(map(str, ranks))
    return text if len(text) <= _TEXT else text[:_TEXT].rpartition(",")[0]


def _pulse(wait: Entry | None, at_ns: int) -> wire.Pulse:
    """What the rank did. A dump does not tell for how long, nor what a rank does outside of a collective."""
    if wait is None:
        return wire.Pulse(at_ns=at_ns, phase="other", step=0)
    return wire.Pulse(
        at_ns=at_ns,
        phase="other",
        step=0,
        idle_ns=1,
        patience_ns=1,
        activity="collective",
        waits_in=wait.operation[:_TEXT],
        collectives=wait.collective_seq_id,
        place=wait.place[:_TEXT],
        stack=[frame[:_CHARACTERS] for frame in wait.stack[-_FRAMES:]],
    )
