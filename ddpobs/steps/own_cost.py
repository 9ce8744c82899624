"""Cost of telemetry, from blocks of steps in which it rests."""

from __future__ import annotations

from ddpobs import wire
from ddpobs.shared.paired_blocks import PairedRatio, Rests, TimedStep

_RESTING, _RECORDING = 0, 1


class OwnCost:
    """Compares the resting block of each cycle with the cycle's other steps.

    A step is timed from the start of one synchronised backward to that of the next, by the host's clock. The two steps
    in which a rest begins and ends belong to no arm.

    Args:
        cycle_steps: As for `Rests`.
    """

    def __init__(self, cycle_steps: int) -> None:
        self._cycle_steps = cycle_steps
        self.rests = Rests(cycle_steps)
        self._ratio = PairedRatio()
        self._cycle: list[TimedStep] = []
        self._previous = (-1, 0, False)

    def backward_began(self, number: int, at_ns: int, resting: bool, kind: int, disturbed: bool) -> None:
        """Add the step that ends with the start of a backward.

        Args:
            number: Number of the backward, from 0.
            at_ns: Its start.
            resting: Telemetry rests.
            kind: Forwards since the previous backward.
            disturbed: An evaluation or a checkpoint was among them.
        """
        (previous, began_ns, rested), self._previous = self._previous, (number, at_ns, resting)
        if previous // self._cycle_steps != number // self._cycle_steps:
            self._ratio.add(self._cycle)
            self._cycle.clear()
        elif previous == number - 1 and rested == resting:
            self._cycle.append(
                TimedStep(_RESTING if resting else _RECORDING, at_ns - began_ns, kind=kind, disturbed=disturbed)
            )

    def estimate(self) -> wire.TelemetryCost | None:
        """Return the cost; None while there are too few rests."""
        ratio = self._ratio.estimate()
        return None if ratio is None else wire.TelemetryCost(**ratio._asdict())
