"""Places in the training code, from the looks of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from ddpobs import wire

MIN_LOOKS = 8
"""Minimum number of looks in a phase from which its places are judged."""
_NORMAL_95 = 1.645
"""Quantile of the standard normal distribution at 95 %."""
COPIES = frozenset({"to", "cuda", "copy_", "pin_memory"})
"""Functions that copy or convert tensors."""


class Place(NamedTuple):
    """A place in the code.

    Attributes:
        text: Its lines; empty if texts are not sent.
        calls: Function that the innermost line calls; empty if there is none.
        iterates: The training loop waits there for an iterator that is not torch's.
    """

    text: str
    calls: str
    iterates: bool

    def __str__(self) -> str:
        """The lines, with the function called."""
        return f"{self.text} ({self.calls})" if self.calls else self.text


@dataclass(frozen=True)
class Places:
    """Looks of all ranks in one phase.

    Attributes:
        looks: Looks at each place.
        times_ns: Time for which these looks stand, by place, the largest first.
        effective: Looks in the phase, of equal weight, that would be as exact.
    """

    looks: Counter[Place]
    times_ns: Counter[Place]
    effective: float

    @property
    def in_phase(self) -> int:
        """Looks in the phase."""
        return self.looks.total()

    @property
    def is_judged(self) -> bool:
        """Whether there are enough looks."""
        return self.in_phase >= MIN_LOOKS

    @property
    def largest(self) -> Place:
        """The place with the most time; there is one if the looks are judged."""
        return self.times_ns.most_common(1)[0][0]

    def share(self, place: Place) -> float:
        """Share of the phase's time at a place."""
        return self.times_ns[place] / max(1, self.times_ns.total())

    def error_ratio(self, place: Place) -> float:
        """Standard error of the share, as a part of it: that of a binomial proportion."""
        share = self.share(place)
        return sqrt(share * (1 - share) / max(1.0, self.effective)) / share

    def least_share(self, place: Place) -> float:
        """Share of the phase's time at a place of which the looks make 95 % sure: the lower bound of a proportion.

        Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927).
        """
        share, count, square = self.share(place), max(1.0, self.effective), _NORMAL_95**2
        spread = sqrt(square * share * (1 - share) / count + square**2 / (4 * count**2))
        return (share + square / (2 * count) - spread) / (1 + square / count)

    @property
    def copy_share(self) -> float:
        """Share of the phase's time at calls that copy or convert tensors; 0 with too few looks."""
        return sum(self.share(place) for place in self.times_ns if place.calls in COPIES) if self.is_judged else 0.0

    @property
    def iterating_share(self) -> float:
        """Share of the phase's time in which the training loop waited for an iterator that is not torch's."""
        return sum(self.share(place) for place in self.times_ns if place.iterates)

    def listed(self, most: int = 5) -> list[dict[str, object]]:
        """Return the places with the most time for a finding's evidence."""
        return [
            {"place": str(place), "looks": self.looks[place], "share": round(self.share(place), 4)}
            for place, _ in self.times_ns.most_common(most)
        ]


def places_in(phase: str, pulses: Iterable[wire.Pulse]) -> Places:
    """Add up the looks of all ranks in a phase."""
    looks, times_ns, effective = Counter[Place](), Counter[Place](), 0.0
    for pulse in pulses:
        for code in (code for code in pulse.code if code.phase == phase):
            place = Place(code.place, code.calls, code.iterates)
            looks[place] += code.looks
            times_ns[place] += code.time_ns or code.looks
            effective += code.looks * (pulse.effective_looks / pulse.looks if pulse.effective_looks else 1.0)
    return Places(looks, times_ns, effective)
