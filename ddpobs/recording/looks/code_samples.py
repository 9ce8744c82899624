"""Looks at the training thread's code inside of steps, on the telemetry thread: where its time in no call goes.

The first looks follow each other at 0.05 s, the next ones at 0.25 s, and later ones at 1 s, when the thread wakes up
anyway: a thread that wakes up costs a training on the same processor more than what it does. Each look stands for the
time since the look before it, so that the first seconds of a run weigh no more than others. A look costs 30 µs. It
counts once a training forward has followed without an evaluation or a checkpoint: then it was inside of a step. The
mode of the modules alone is no evaluation: a policy that acts, or a model that generates, does so in evaluation mode.

Own loaders. A generator or an iterator of the user's reports no fetches. If, of at least eight looks between the end
of a step and the next forward, 80 % found the training loop's `for` statement or `next` waiting for an iterator
(`loop_frames.asks_iterator`), that time counts as the data phase from then on, and until it is below 60 %. The looks
support nothing finer: so all of that time counts, or none.

A look needs the interpreter. It comes late where a function written in C keeps it for long, and then finds the line
after that call.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Literal, NamedTuple

from ddpobs import wire
from ddpobs.recording.journal import Journal
from ddpobs.recording.looks.activity import classify, frames_of, place_of, users_frames
from ddpobs.recording.place.place_file import Slot
from ddpobs.recording.probes.loop_frames import asks_iterator, called_name
from ddpobs.steps.raw_step import DATA, OTHER

LOOKS = ((0.05, 64), (0.25, 192), (1.0, None))
"""Seconds between two looks, and the number of looks after which there are no more of these."""
_MAX_LOOKS = 256
"""Maximum number of looks that count: those of four minutes."""
_MAX_OPEN = 64
"""Maximum number of looks kept while no forward follows."""
_JUDGED_LOOKS, _MIN_LOOKS = 64, 8
_BEGINS_SHARE, _ENDS_SHARE = 0.8, 0.6
_MAX_PLACES = 8
_MAX_TEXT = 256
_OUTSIDE_OF_STEPS = ("checkpoint", "compile")


class _Look(NamedTuple):
    """One look.

    Attributes:
        forwards: Training forwards before it.
        phase: `data`, `other`, or empty for every other phase.
        in_gap: The thread was between the end of a step and the next forward.
        iterates: A training loop waited for an iterator.
        key: Identity of the place: a line of the training loop, or a function that it calls.
        place: Its lines.
        calls: Name of the function that the innermost line calls.
        evaluating: Every module was in evaluation mode.
        time_ns: Time since the look before it.
    """

    forwards: int
    phase: Literal["data", "other", ""]
    in_gap: bool = False
    iterates: bool = False
    key: object = None
    place: str = ""
    calls: str = ""
    evaluating: bool = False
    time_ns: int = 0


class CodeSamples:
    """The latest looks at the training thread, and whether its gaps count as the data phase.

    Args:
        journal: Facts of the training thread.
        texts: Keep the lines of code; without them only counts are kept.
        now_ns: The monotonic clock.
    """

    def __init__(self, journal: Journal, texts: bool = True, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._journal, self._texts, self._now_ns = journal, texts, now_ns
        self._last_ns = now_ns()
        self._looks: deque[_Look] = deque(maxlen=_MAX_LOOKS)
        self._open: deque[_Look] = deque(maxlen=_MAX_OPEN)
        """Looks that no forward has followed yet."""
        self._interruptions = 0
        self._gap_is_data = False
        self._ended = False

    def look(self, enough: int | None = None) -> bool:
        """Look once; return whether so many looks count now."""
        self._settle()
        journal, now_ns = self._journal, self._now_ns()
        time_ns, self._last_ns = max(1, now_ns - self._last_ns), now_ns
        if not (journal.thread.paused or self._ended) and journal.forward_places:
            before = self._position()
            look = self._look_now()
            if look is not None and before == self._position():  # Else training went on meanwhile.
                self._open.append(look._replace(time_ns=time_ns))
        return enough is not None and len(self._looks) >= enough

    def end(self) -> None:
        """Look no more: training is over."""
        self._ended = True

    @property
    def count(self) -> int:
        """Looks inside of steps."""
        return len(self._looks)

    @property
    def effective_count(self) -> int:
        """Number of looks of equal weight that would be as exact.

        Source: L. Kish, Survey Sampling (1965): the squared sum of the weights over the sum of their squares.
        """
        times_ns = [look.time_ns for look in tuple(self._looks)]
        return round(sum(times_ns) ** 2 / max(1, sum(ns**2 for ns in times_ns)))

    def places(self) -> list[wire.CodePlace]:
        """The most frequent places in the phases `data` and `other`."""
        groups: dict[object, list[_Look]] = {}
        for look in tuple(self._looks):
            if phase := self._phase(look):
                groups.setdefault((phase, look.key, look.iterates), []).append(look)
        largest = sorted(groups.values(), key=_time_ns, reverse=True)[:_MAX_PLACES]
        return [self._place(looks) for looks in largest]

    def _look_now(self) -> _Look | None:
        """Return a look at the training thread; None outside of steps. In most phases its frames are not needed."""
        journal, phase = self._journal, self._journal.place.slots[Slot.PHASE]
        if phase not in (DATA, OTHER):
            return _Look(journal.forwards, "")
        frames = list(frames_of(journal.thread.ident_or_main))
        evaluating = journal.evaluation.is_evaluating()
        kind, _ = classify(frames, "", bucket_pending=False, waits_in=journal.waits.name, evaluating=False)
        if kind in _OUTSIDE_OF_STEPS:
            return None
        if phase == OTHER and kind in ("collective", "bucket"):
            return _Look(journal.forwards, "")
        in_gap = phase == OTHER and journal.place.awaits_forward
        iterates = in_gap and asks_iterator(frames, journal.forward_places)
        key, place, calls = self._describe(frames)
        name: Literal["data", "other"] = "data" if phase == DATA or kind == "data" else "other"
        return _Look(journal.forwards, name, in_gap and kind == "code", iterates, key, place, calls, evaluating)

    def _describe(self, frames: Sequence[FrameType]) -> tuple[object, str, str]:
        """Identity and text of the place, and the name of the function that it calls."""
        if not self._texts:
            return None, "", ""
        inner = next(iter(users_frames(frames)), None)
        if inner is None:
            return None, "", ""
        line = inner.f_lineno if inner.f_code in self._journal.forward_places else 0
        return (inner.f_code, line), place_of(frames)[:_MAX_TEXT], called_name(inner)[:_MAX_TEXT]

    def _position(self) -> tuple[int, int]:
        slots = self._journal.place.slots
        return slots[Slot.PHASE], slots[Slot.AT_NS]

    def _settle(self) -> None:
        """Count the looks that a forward has followed; drop those of an evaluation or a checkpoint."""
        forwards, interruptions = self._journal.forwards, self._journal.waits.interruptions
        if interruptions != self._interruptions:
            self._interruptions = interruptions
            self._open.clear()
        while self._open and self._open[0].forwards < forwards:
            look = self._open.popleft()
            if not (look.evaluating and look.forwards in self._journal.evaluation.fetched_after):
                self._looks.append(look)
        self._judge()

    def _judge(self) -> None:
        gaps = [look.iterates for look in self._looks if look.in_gap][-_JUDGED_LOOKS:]
        if len(gaps) < _MIN_LOOKS:
            return
        least = _ENDS_SHARE if self._gap_is_data else _BEGINS_SHARE
        counts = sum(gaps) >= least * len(gaps)
        if counts != self._gap_is_data:
            self._gap_is_data = counts
            self._journal.entries.count_gaps_as_data(counts)

    def _phase(self, look: _Look) -> Literal["data", "other", ""]:
        return "data" if look.in_gap and self._gap_is_data else look.phase

    def _place(self, looks: Sequence[_Look]) -> wire.CodePlace:
        place, calls = Counter((look.place, look.calls) for look in looks).most_common(1)[0][0]
        return wire.CodePlace(
            phase=self._phase(looks[0]) or "other",
            place=place,
            calls=calls,
            iterates=looks[0].iterates,
            looks=len(looks),
            time_ns=_time_ns(looks),
        )


def _time_ns(looks: Sequence[_Look]) -> int:
    return sum(look.time_ns for look in looks)
