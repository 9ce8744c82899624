"""From a closed step to the numbers of a batch, and the account of the time around the steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import structs

from ddpobs import wire
from ddpobs.clocks import Clock, Stamp
from ddpobs.config import TelemetryConfig
from ddpobs.never_raises import never_raises
from ddpobs.recording.probes.compilations import Compilations
from ddpobs.steps.account import Account, Piece, Tail
from ddpobs.steps.own_cost import OwnCost
from ddpobs.steps.raw_step import RawStep
from ddpobs.steps.step_columns import RawSteps
from ddpobs.steps.summary import Summary

_STEPS_PER_RECORD = 256
"""Maximum number of steps in one record of the queue; a quarter of the queue or of a batch, if that is less."""


class StepFlow:
    """Collects closed steps as numbers, as soon as the device has finished them.

    Args:
        config: Sizes of the queue and of a batch.
        clock: Source of the steps' stamps.
        offer: Puts a record into the queue of the exporter, with the number of its records and its weight.
        account: Where the process's wall time went until the first step.

    Attributes:
        own_cost: Measures the cost of telemetry by its rests; None if it never rests.
        compilations: Compilations of torch.compile.
        finished: Training is over, without an error or an interrupt.
    """

    def __init__(self, config: TelemetryConfig, clock: Clock, offer: Callable[..., object], account: Account) -> None:
        self._clock, self._offer, self._account = clock, offer, account
        self._most_steps = min(_STEPS_PER_RECORD, config.queue_records // 4)
        self._most_records = config.batch_spans / 4
        self._steps = RawSteps()
        self._tail = Tail(time.monotonic_ns())
        self.own_cost = OwnCost(config.rest_every) if config.rest_every else None
        self.compilations = Compilations(config.traceback)
        self.finished = False

    def add(self, raw: RawStep) -> None:
        """Collect a step as numbers if the device has finished it, else queue it; the journal's replay calls this."""
        if not (has_passed(self._clock, raw) and self.read(self._steps, raw)):
            self.offer_steps()
            self._offer(raw, raw.records)
        elif len(self._steps.number) >= self._most_steps or self._steps.records >= self._most_records:
            self.offer_steps()

    @never_raises
    def offer_steps(self) -> None:
        """Put the collected steps into the queue."""
        if self._steps.number:
            steps, self._steps = self._steps, RawSteps()
            self._offer(steps, steps.records, len(steps.number))

    def caught_up(self, number: int, began: bool, outside: list[tuple[int, Stamp, Stamp]]) -> None:
        """Offer the steps, and keep the time since the last one, as `Journal`'s `on_caught_up`."""
        self.offer_steps()
        self._look_at_tail(number, began, outside)

    @never_raises
    def _look_at_tail(self, number: int, began: bool, outside: list[tuple[int, Stamp, Stamp]]) -> None:
        now_ns, ready = time.monotonic_ns(), self._clock.is_ready
        pieces = [
            Piece(kind, self._clock.times([begins])[0], self._clock.times([ends])[0] if ends else now_ns)
            for kind, begins, ends in outside
            if ready(begins) and (not ends or ready(ends))
        ]
        self._tail = Tail(now_ns, number, began, pieces, self.finished)

    @never_raises
    def account_with(self, summary: Summary | None) -> wire.Account | None:
        """Return the account up to now, after these steps were added."""
        if summary is not None:
            self._account.add(summary.steps, summary.outside, summary.compiled_ns)
        account = self._account.at(self._tail, self.compilations.latest)
        return account if self.own_cost is None else structs.replace(account, telemetry=self.own_cost.estimate())

    @never_raises
    def read(self, steps: RawSteps, raw: RawStep) -> bool:
        """Add a step to columns. A failed device fails for each step; other records still travel."""
        steps.add(raw, self._clock)
        return True


def has_passed(clock: Clock, record: object) -> bool:
    """Whether the device has reached a step's end. A hanging device delays its steps, but not the thread.

    A failed device counts as having reached it; reading the step then raises.
    """
    try:
        return not isinstance(record, RawStep) or clock.is_ready(record.end)
    except Exception:
        return True
