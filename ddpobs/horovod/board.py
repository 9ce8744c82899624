"""Where each rank waits, in the rendezvous store: written only by ranks that wait for longer than a moment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import permutations
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ddpobs.horovod.calls import Facts, by_rank, difference, summary


@dataclass(frozen=True)
class Entry:
    """A rank's place.

    Attributes:
        started: By process set, the number of collectives that the rank has started.
        waits_in: The process set in whose collective the rank waits; empty if it waits in none.
        ranks: The ranks of that set.
        index: The collective's number in that set.
        call: The collective.
        expected: The collective that all ranks expect there, if this rank has not started its own; else None.
        announces: Whether the rank has not started its own, and waits for the others' consent.
        joined: Whether the rank is out of data, in `join`.
        zeros_in: If so, the process set in whose all-reduces it takes part with zeros; empty for none.
    """

    started: Mapping[str, int] = field(default_factory=dict)
    waits_in: str = ""
    ranks: tuple[int, ...] = ()
    index: int = 0
    call: Facts | None = None
    expected: Facts | None = None
    announces: bool = False
    joined: bool = False
    zeros_in: str = ""


@dataclass(frozen=True)
class Verdict:
    """A difference that every rank of one or two process sets raises.

    Attributes:
        keys: The process sets.
        message: The difference, with the ranks' values.
        started: Whether some ranks have started a collective that the others will not start.
    """

    keys: list[str]
    message: str
    started: bool


class Board:
    """The entries and verdicts of one initialization.

    Args:
        base: The rendezvous store.
        number: Of the initialization, the same on every rank: a store may outlive several.

    Attributes:
        number: As given.
    """

    def __init__(self, base: Store, number: int) -> None:
        self.number, self._rank = number, dist.get_rank()
        self.store: Any = PrefixStore(f"ddpobs/collectives/{number}", base)

    def write(self, entry: Entry) -> None:
        """Write this rank's entry."""
        self.store.set(f"entry/{self._rank}", json.dumps(asdict(entry)))

    def entries(self, ranks: Iterable[int]) -> dict[int, Entry]:
        """Return the entries of the ranks that have written one."""
        texts = {rank: self._read(f"entry/{rank}") for rank in ranks}
        return {rank: Entry(**json.loads(text)) for rank, text in texts.items() if text}

    def verdict(self, key: str) -> Verdict | None:
        """Return the verdict on a process set, if there is one."""
        text = self._read(f"{key}/verdict")
        return Verdict(**json.loads(text)) if text else None

    def judge(self, verdict: Verdict) -> None:
        """Write a verdict, unless another rank was earlier."""
        for key in verdict.keys:
            self.store.compare_set(f"{key}/verdict", "", json.dumps(asdict(verdict)))

    def leave(self) -> None:
        """Mark this rank as one that will not take part any more."""
        self.store.set(f"left/{self._rank}", "1")
        self.store.set("left", "1")

    def left(self, ranks: Iterable[int]) -> int | None:
        """Return one of the ranks that has left; None if none has."""
        if not self.store.check(["left"]):
            return None
        return next((rank for rank in ranks if self.store.check([f"left/{rank}"])), None)

    def _read(self, key: str) -> str:
        """A key's text; empty if nobody has written it. `get` would wait for it."""
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""


def find_mismatch(key: str, entries: Mapping[int, Entry], ranks: Iterable[int], agreed: int) -> Verdict | None:
    """Compare the ranks' calls of the first collective that is not agreed on.

    Args:
        key: The process set.
        entries: The entries of its ranks.
        ranks: Its ranks.
        agreed: Number of the set's collectives on which all ranks are known to agree.

    Returns:
        None while a rank has not come there yet, or if there is no difference.
    """
    announcing = {
        rank: entry
        for rank, entry in entries.items()
        if entry.waits_in == key and entry.announces and entry.index >= agreed
    }
    if not announcing:
        return None
    index = min(entry.index for entry in announcing.values())
    expected = next(entry.expected for entry in announcing.values() if entry.index == index)
    calls: dict[int, Facts] = {}
    started = False
    for rank in ranks:
        if rank in announcing and announcing[rank].index == index:
            call = announcing[rank].call
        elif rank in entries and entries[rank].started.get(key, 0) > index:
            call, started = expected, True
        else:
            call = None
        if call is None:
            return None
        calls[rank] = call
    message = difference(calls)
    return Verdict([key], message, started) if message else None


def find_deadlock(entries: Mapping[int, Entry]) -> Verdict | None:
    """Find a rank that waits for one in `join`, or two that wait for each other in different process sets."""
    for rank, other in permutations(entries, 2):
        entry, peer = entries[rank], entries[other]
        if not _waits_for(entry, other, peer):
            continue
        if peer.joined and peer.zeros_in != entry.waits_in:
            return Verdict(
                [entry.waits_in],
                f"rank {rank} called {_call(entry)}, but rank {other} is out of data, in join: meanwhile the other "
                "ranks may only use the DistributedOptimizer. Call other collectives before join",
                not entry.announces,
            )
        if peer.waits_in != entry.waits_in and _waits_for(peer, rank, entry):
            return Verdict(
                [entry.waits_in, peer.waits_in],
                "Mismatched process sets: the ranks wait for each other in different ones: "
                f"{by_rank({rank: _call(entry), other: _call(peer)})}. Call the collectives of different process sets "
                "in the same order on every rank",
                True,
            )
    return None


def _waits_for(entry: Entry, other: int, peer: Entry) -> bool:
    """Whether a rank waits for another to start its collective."""
    return other in entry.ranks and peer.started.get(entry.waits_in, 0) <= entry.index


def _call(entry: Entry) -> str:
    return f"{summary(entry.call or {})} over ranks {', '.join(map(str, entry.ranks))}"
