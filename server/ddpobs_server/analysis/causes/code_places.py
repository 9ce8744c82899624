"""Places in the training code, from the looks of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ddpobs import wire

MIN_LOOKS = 8
"""Minimum number of looks in a phase from which its places are judged."""
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


class Places(NamedTuple):
    """Looks of all ranks in one phase.

    Attributes:
        looks: Looks at each place, the most frequent place first.
        in_phase: Looks in the phase.
    """

    looks: Counter[Place]
    in_phase: int

    @property
    def is_judged(self) -> bool:
        """Whether there are enough looks."""
        return self.in_phase >= MIN_LOOKS

    @property
    def copy_share(self) -> float:
        """Share of the phase's looks at calls that copy or convert tensors; 0 with too few looks."""
        copies = sum(count for location, count in self.looks.items() if location.calls in COPIES)
        return copies / self.in_phase if self.is_judged else 0.0

    @property
    def iterating_share(self) -> float:
        """Share of the phase's looks that found the training loop at an iterator that is not torch's."""
        return sum(count for location, count in self.looks.items() if location.iterates) / max(1, self.in_phase)

    def listed(self, most: int = 5) -> list[dict[str, object]]:
        """Return the most frequent places for a finding's evidence."""
        return [{"place": str(location), "looks": count} for location, count in self.looks.most_common(most)]


def places_in(phase: str, pulses: Iterable[wire.Pulse]) -> Places:
    """Add up the looks of all ranks in a phase."""
    looks: Counter[Place] = Counter()
    for code in (code for pulse in pulses for code in pulse.code if code.phase == phase):
        looks[Place(code.place, code.calls, code.iterates)] += code.looks
    return Places(looks, looks.total())
