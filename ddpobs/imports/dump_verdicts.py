"""Which rank did not come to the collective that the others wait in, of the dumps of a hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ddpobs.imports.flight_recorder import Entry, RankDump
from ddpobs.shared.words import format_ranks

MAX_GROUPS = 4
"""Maximum number of process groups and of ranks that are named."""


class Verdict(NamedTuple):
    """What the dumps of a process group show.

    Attributes:
        kind: `absent` if ranks have not come, `mismatch` if the collectives differ, `entered` if every rank has entered
            the same one, `unknown` if the dump of a rank is missing.
        verdict: In which collective the ranks wait, and for whom.
        cause: What each rank did last.
        ranks: The ranks that the others wait for; empty if each of them is in the same collective.
        waits: The collective in which each waiting rank is.
    """

    kind: Literal["absent", "mismatch", "entered", "unknown"]
    verdict: str
    cause: str
    ranks: list[int]
    waits: dict[int, Entry]


def verdicts(dumps: Sequence[RankDump]) -> list[Verdict]:
    """Return a verdict for each process group in which a rank waits, those with an absent rank first; at most four.

    Args:
        dumps: One of each rank.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    groups = dict.fromkeys(entry.process_group for dump in dumps for entry in dump.entries if not entry.is_p2p)
    judged = [_judge(group, by_rank) for group in groups]
    found = [verdict for verdict in judged if verdict is not None]
    return sorted(found, key=lambda verdict: verdict.kind != "absent")[:MAX_GROUPS]


def _judge(group: tuple[str, str], by_rank: dict[int, RankDump]) -> Verdict | None:
    last: dict[int, Entry] = {}
    waits: dict[int, Entry] = {}
    for rank, dump in sorted(by_rank.items()):
        entries = [entry for entry in dump.entries if entry.process_group == group and not entry.is_p2p]
        if not entries:
            continue
        last[rank] = max(entries, key=lambda entry: entry.collective_seq_id)
        if open_entries := [entry for entry in entries if entry.is_open]:
            waits[rank] = min(open_entries, key=lambda entry: entry.collective_seq_id)
    if not waits:
        return None
    members = {rank for dump in by_rank.values() for rank in dump.members.get(group[0], dump.members.get("", []))}
    unknown = sorted(members - set(last))
    number = min(entry.collective_seq_id for entry in waits.values())
    here = [entry for entry in waits.values() if entry.collective_seq_id == number]
    behind = [rank for rank, entry in last.items() if entry.collective_seq_id < number]
    name = group[1] or group[0]
    told = [f"{format_ranks([rank])} last called {_called(last[rank])}" for rank in behind[:MAX_GROUPS]]
    told += [f"{format_ranks(ranks)} {_does(len(ranks), entry, number)}" for entry, ranks in _alike(waits)]
    told += [f"no dump has a call of {format_ranks(unknown)}"] if unknown else []
    hang = f"The ranks hang in {here[0].operation} {number} of group {name}"
    if behind:
        return Verdict("absent", f"{hang}, waiting for {format_ranks(behind)}", "; ".join(told), behind, waits)
    if len({(entry.operation, str(entry.input_sizes)) for entry in here}) > 1:
        different = f"The ranks called different collectives as number {number} of group {name}"
        return Verdict("mismatch", different, "; ".join(told), [], waits)
    if unknown:
        return Verdict("unknown", hang, "; ".join(told), [], waits)
    return Verdict("entered", hang, "; ".join(["every rank has entered it", *told]), [], waits)


def _alike(waits: dict[int, Entry]) -> list[tuple[Entry, list[int]]]:
    """The ranks that wait at the same place in the same collective."""
    groups: dict[tuple[object, ...], tuple[Entry, list[int]]] = {}
    for rank, entry in waits.items():
        key = (entry.operation, entry.collective_seq_id, str(entry.input_sizes), entry.place)
        groups.setdefault(key, (entry, []))[1].append(rank)
    return list(groups.values())


def _does(ranks: int, entry: Entry, number: int) -> str:
    if entry.collective_seq_id > number:
        return f"{'are' if ranks > 1 else 'is'} in a later one, {_called(entry)}"
    return f"{'wait' if ranks > 1 else 'waits'} in {_called(entry)}"


def _called(entry: Entry) -> str:
    place = f" ({entry.place})" if entry.place else ""
    sizes = f" of {entry.input_sizes}" if entry.input_sizes else ""
    return f"{entry.operation} {entry.collective_seq_id}{sizes}{place}"
