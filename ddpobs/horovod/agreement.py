"""Whether every rank calls the same collective, which Horovod negotiates for each: here it is predicted.

The ranks call the same collectives again and again. So each rank predicts the next one from the latest ones; all ranks
have seen the same, and predict the same. A rank whose call is the predicted one starts it at once. Another call is an
exchange through the rendezvous store: no rank starts it before all ranks have come with the same. A prediction is what
followed last time, so that two ranks cannot start different collectives.

If only some ranks come with another call, the others have started the predicted one, and wait in it. A rank that waits
for longer than a moment writes its place (`board`), and reads whether the ranks differ.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist

from ddpobs.comm.side_groups import create_named, timeout_of
from ddpobs.errors import HorovodError, HorovodInternalError, MismatchError
from ddpobs.horovod.board import Board, Entry, Verdict, find_deadlock, find_mismatch
from ddpobs.horovod.calls import Call, Facts, digest, facts_of, summary
from ddpobs.horovod.failures import failures_as_internal_errors
from ddpobs.torch_seam.collectives import name_of, ranks_of
from ddpobs.torch_seam.modes import unseen

_CONTEXT = 8
"""Latest collectives from which the next one is predicted."""
_MAX_PLACES = 10_000
MOMENT_S = 0.05
"""Wait after which a rank writes its place, and reads whether the ranks differ."""
_MOMENT = timedelta(seconds=MOMENT_S)
_LONG_S = 1.0
"""Wait after which it also looks for ranks that wait for each other."""
_SHORTEST_S, _LONGEST_S = 1e-4, 5e-3
"""Pauses of a rank that waits for consent, which grow with the wait."""
_PATIENCE = 20
"""Such a pause is at most this fraction of the wait."""
_FEW = 8
"""Approximate number of a large group's ranks that compare all ranks. Others do after as many seconds."""
_GROWTH = 1.5

Key = tuple[Any, ...]
"""A collective in a form that is compared fast; its name is the second element."""


class _Place:
    """A place in the sequence of collectives: the one that followed here last time, and the place behind it."""

    __slots__ = ("call", "key", "next")

    def __init__(self) -> None:
        self.key: Key | None = None
        self.call: Call | None = None
        self.next: _Place = self


class Running(Protocol):
    """A collective that was started."""

    @property
    def is_running(self) -> bool:
        """Whether it is not complete."""


class Agreement:
    """The agreement of a process group's ranks on their collectives.

    Args:
        group: The process group.

    Attributes:
        ranks: Its ranks.
        started: Number of collectives that this rank has started.
        mismatch: The difference, after which the group cannot be used any more: some ranks have started a collective
            that the others will not start.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.started, self.mismatch = 0, ""
        self.ranks = ranks_of(group)
        name = name_of(group)
        self._name = f"{name}.{_times_named[name]}"  # A script may destroy and create groups.
        _times_named[name] += 1
        self._suspected: Verdict | None = None
        self._place = _Place()
        self._places: dict[tuple[Any, ...], _Place] = {}
        self._latest: deque[Any] = deque(maxlen=_CONTEXT)
        self._call: Call | None = None
        self._running: WeakValueDictionary[Key, Running] = WeakValueDictionary()
        self._agreed = 0
        self._mismatches = 0
        self._used_keys: list[str] = []

    @property
    def key(self) -> str:
        """The keys of the store since the last mismatch."""
        return f"{self._name}/{self._mismatches}"

    def check(self, key: Key, build: Callable[[], Call] | None = None, always: bool = False) -> None:
        """Return when this rank may start a collective.

        Args:
            key: The collective, or a tuple that is built faster, and equal for equal collectives only.
            build: Returns the collective, if `key` is such a tuple.
            always: Exchange it even if it is the predicted one, so that no rank waits in it for ranks that do not come.

        Raises:
            HorovodError: One of the same function and name is running.
            MismatchError: The ranks called different ones. Raised on every rank of the group.
            HorovodInternalError: A rank has left, or did not come in time.
        """
        if key[1] is not None:
            self._refuse_taken_name(key)
        if always or self._place.key != key:
            call: Any = key if build is None else build()
            self._exchange(call)
            self._learn(key, call)
        self._call = self._place.call
        self._place = self._place.next
        self._latest.append(key[1] or key)
        self.started += 1

    def takes_name(self, running: Running) -> None:
        """The collective that was checked last is running: its name, if it has one, is taken until it is complete."""
        assert self._call is not None
        if self._call.name is not None:
            self._running[self._call[:2]] = running

    def _refuse_taken_name(self, key: Key) -> None:
        first = self._running.get(key[:2])
        if first is not None and first.is_running:
            raise HorovodError(
                f"{key[0]} {key[1]!r} was started and is not complete: wait for it with synchronize(), or give the "
                "second one another name"
            )

    def _exchange(self, call: Call) -> None:
        if len(self.ranks) == 1:
            return
        store = board().store
        exchange = f"{self.key}/{self.started}"
        keys = [f"{exchange}/{digest(call)}", f"{exchange}/agreed"]
        with failures_as_internal_errors():
            if store.add(keys[0], 1) == len(self.ranks):
                store.set(keys[1], "")
            else:
                self._await(keys[1], call)
            if self.group.rank() == 0:
                # All ranks have come here, and need the keys of the exchange before no more.
                for key in self._used_keys:
                    store.delete_key(key)
                self._used_keys = keys
        self._agreed = self.started + 1

    def _await(self, key: str, call: Call) -> None:
        """Wait for the last rank's consent."""
        store, pause_s = board().store, _SHORTEST_S
        began_s = time.monotonic()
        look = Look(self, call, announces=True, after_s=MOMENT_S)
        try:
            while not store.check([key]):
                waited_s = time.monotonic() - began_s
                if look.again() and (reason := self._why_nobody_comes(waited_s)):
                    if store.check([key]):  # A rank may have left after the collective.
                        return
                    raise HorovodInternalError(f"{summary(facts_of(call))}: {reason}")
                time.sleep(pause_s)
                pause_s = min(pause_s * _GROWTH, max(_LONGEST_S, waited_s / _PATIENCE))
        finally:
            look.end()

    @unseen
    def _why_nobody_comes(self, waited_s: float) -> str:
        if (left := board().left(self.ranks)) is not None:
            return f"rank {left} has left"
        timeout = timeout_of(self.group, torch.device("cpu"))
        if waited_s > timeout.total_seconds():
            return f"not all of the ranks {', '.join(map(str, self.ranks))} came within {waited_s:.0f} s"
        return ""

    def _learn(self, key: Key, call: Call) -> None:
        """Predict this call the next time that the latest ones are the same."""
        if len(self._places) >= _MAX_PLACES:
            self._places.clear()
        context = (*self._latest, key[1] or key)[-_CONTEXT:]
        self._place.key, self._place.call = key, call
        self._place.next = self._places.setdefault(context, _Place())

    def wait(self, work: Any) -> None:
        """Wait for a started collective, on the host; the wait ends if the ranks differ.

        Raises:
            MismatchError: Some ranks called another one. Raised on every rank of the group.
            HorovodInternalError: The collective failed, or a rank has left.
        """
        try:
            work.wait(_MOMENT)
        except RuntimeError:
            self._wait_long(work)

    def _wait_long(self, work: Any) -> None:
        if self.mismatch and not work.is_completed():
            raise MismatchError(self.mismatch)
        look = self.look()
        try:
            while not _finished_within(work, timedelta(seconds=look.pause_s)):
                look.again()
        finally:
            look.end()

    def look(self, after_s: float = 0.0) -> Look:
        """Return the looks of a wait for a started collective, of which the first is due after this time."""
        assert self._call is not None
        return Look(self, self._call, announces=False, after_s=after_s)

    def entry(self, call: Call, announces: bool) -> Entry:
        """This rank's place, in a wait for a collective."""
        expected = self._place.call if announces else None
        return Entry(
            started=started(),
            waits_in=self.key,
            ranks=tuple(self.ranks),
            index=self.started - (not announces),
            call=facts_of(call),
            expected=None if expected is None else facts_of(expected),
            announces=announces,
        )

    def awaited(self) -> Facts | None:
        """The next collective, in which other ranks wait for this one; None if there is none yet."""
        entries = board().entries(self.ranks).values()
        if any(entry.started.get(self.key, 0) > self.started for entry in entries):
            return None if self._place.call is None else facts_of(self._place.call)  # They started the predicted one.
        at_this = (entry for entry in entries if entry.waits_in == self.key and entry.index == self.started)
        return next((entry.call for entry in at_this if entry.announces), None)

    def find(self, deadlocks: bool) -> Verdict | None:
        """Read the verdict on this group, or pass it if all facts are there."""
        places = board()
        verdict = places.verdict(self.key)
        if verdict is not None:
            return verdict
        entries = places.entries(self.ranks)
        found = find_mismatch(self.key, entries, self.ranks, self._agreed)
        if found is None and deadlocks:
            # A rank writes the end of its wait a little after it: only what is seen twice is true.
            suspected, self._suspected = self._suspected, find_deadlock(entries)
            found = suspected if suspected == self._suspected else None
        if found is not None:
            places.judge(found)
        return places.verdict(self.key)

    @property
    def judges(self) -> bool:
        """Whether this rank compares all ranks early: a few of many do, for the store's sake."""
        return self.group.rank() % max(1, len(self.ranks) // _FEW) == 0

    def settle(self, verdict: Verdict) -> None:
        """Go on after a mismatch: all ranks predict nothing, and exchange the next call."""
        self._mismatches += 1
        self._place = _Place()
        self._latest.clear()
        self._used_keys = []
        if verdict.started:
            self.mismatch = verdict.message


class Look:
    """Looks at the other ranks' places, ever more rarely, during one wait.

    Args:
        agreement: Of the group.
        call: The collective.
        announces: Whether this rank has not started it.
        after_s: Time until the first look.

    Attributes:
        pause_s: Time until the next look.
    """

    def __init__(self, agreement: Agreement, call: Call, announces: bool, after_s: float) -> None:
        self._agreement, self._call, self._announces = agreement, call, announces
        self.pause_s = MOMENT_S
        self._began_s = time.monotonic()
        self._next_s = self._began_s + after_s
        self._has_written = False

    def again(self) -> bool:
        """Look at the store, unless the last look was a moment ago; return whether this call did.

        Raises:
            MismatchError: The ranks called different collectives.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        if not self._has_written:
            board().write(self._agreement.entry(self._call, self._announces))
            self._has_written = True
        waited_s = now_s - self._began_s
        is_long = waited_s > _LONG_S
        self.pause_s = min(self.pause_s * _GROWTH, max(_LONG_S, waited_s / _FEW))
        self._next_s = now_s + self.pause_s
        if (self._announces or is_long) and (self._agreement.judges or waited_s > _FEW * _LONG_S):
            verdict = self._agreement.find(deadlocks=is_long)
        else:
            verdict = board().verdict(self._agreement.key)
        if verdict is not None:
            for agreement in list(_agreements):
                if agreement.key in verdict.keys:
                    agreement.settle(verdict)
            self.end()
            raise MismatchError(verdict.message)
        return True

    def end(self) -> None:
        """The wait is over."""
        if self._has_written:
            self._has_written = False
            with suppress(RuntimeError):
                board().write(Entry())


def _finished_within(work: Any, limit: timedelta) -> bool:
    """Wait for a work for a limited time; return whether it is complete."""
    try:
        work.wait(limit)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # It raises the collective's own error, if it failed.
    return True


class ProcessSet(Protocol):
    """The participants of a collective, as `ddpobs.horovod.process` has them."""

    group: dist.ProcessGroup
    agreement: Agreement | None


_current: Board | None = None
_numbers = count()
_agreements: WeakSet[Agreement] = WeakSet()
"""Weak: a reference to a process group keeps its connections open, for which other ranks wait after a failure."""
_times_named: Counter[str] = Counter()


def of(process_set: ProcessSet) -> Agreement:
    """Return the agreement of a process set's ranks. After a mismatch the set may get a new process group."""
    group, found = process_set.group, process_set.agreement
    if found is not None and found.mismatch:
        group = process_set.group = create_named(group, f"{board().number}", torch.device("cpu"))
    if found is None or found.group is not group:
        found = process_set.agreement = Agreement(group)
        _agreements.add(found)
    return found


def board() -> Board:
    """Where the ranks of this initialization write their places."""
    assert _current is not None
    return _current


def connect() -> None:
    """The ranks are connected: begin anew. Every rank must call this, equally often in its life."""
    global _current  # noqa: PLW0603 - one Horovod a process
    _agreements.clear()
    _times_named.clear()
    _current = Board(dist.distributed_c10d._get_default_store(), next(_numbers))


def leave() -> None:
    """This rank will not take part any more: ranks that wait for it raise an error."""
    if _current is not None:
        with suppress(RuntimeError):  # The store may be gone.
            _current.leave()


def started() -> dict[str, int]:
    """Number of collectives that this rank has started, by process set."""
    return {agreement.key: agreement.started for agreement in _agreements}


def settle() -> None:
    """Take in the verdicts on this rank's process sets, outside of a wait."""
    for agreement in list(_agreements):
        if (verdict := board().verdict(agreement.key)) is not None:
            agreement.settle(verdict)
