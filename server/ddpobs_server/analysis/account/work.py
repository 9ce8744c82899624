"""What the ranks achieve together in their steps: their time without waiting for each other and without moving data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs.shared.delay import moving
from ddpobs.shared.words import percent
from ddpobs_server.analysis.account.parts import WAITING, group_of
from ddpobs_server.analysis.account.run_account import RunAccount
from ddpobs_server.analysis.slow_ranks.lateness import step_weights
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps

_MIN_SHARE = 0.005
"""A smaller share would be written as 0 %."""


@dataclass(frozen=True)
class Work:
    """Time of some steps, over all ranks.

    Attributes:
        ranks: Number of ranks.
        steps: Number of steps of a rank.
        steps_ns: Time of all ranks in these steps.
        waiting_ns: Part of it in which a rank waits for later ranks.
        moving_ns: Part of it in which data moves and backward does not hide it.
        is_split: Whether waiting is known: waiting for a rank without telemetry looks like moving data.
    """

    ranks: int
    steps: int
    steps_ns: float
    waiting_ns: float
    moving_ns: float
    is_split: bool = True

    @property
    def waiting(self) -> float:
        """Share of the steps' time in which a rank waits for later ranks."""
        return self.waiting_ns / max(1.0, self.steps_ns)

    @property
    def moving(self) -> float:
        """Share of the steps' time in which data moves."""
        return self.moving_ns / max(1.0, self.steps_ns)

    @property
    def efficiency(self) -> float:
        """Share of the steps' time without waiting and moving."""
        return max(0.0, 1 - self.waiting - self.moving)

    @property
    def verdict(self) -> str:
        """How many ranks without communication would do as much."""
        return f"{self.ranks:,} ranks do the work of {self.ranks * self.efficiency:,.1f}"

    @property
    def losses(self) -> str:
        """Both shares in words, without one that is nothing."""
        if not self.is_split:
            return f"{percent(self.moving)} of the time they wait for each other or move data"
        shares = {"they wait for each other": self.waiting, "they move data": self.moving}
        named = ", ".join(f"{percent(share)} {words}" for words, share in shares.items() if share >= _MIN_SHARE)
        return named.replace("they", "of the time they", 1)


def work_of(account: RunAccount) -> Work:
    """Return the work in all steps of a run."""
    of_steps = {part: ns for part, ns in account.parts.items() if group_of(part) == "steps"}
    return Work(
        ranks=max((len(attempt.by_rank) + len(attempt.missing) for attempt in account.attempts), default=0),
        steps=sum(attempt.steps for attempt in account.attempts),
        steps_ns=sum(of_steps.values()),
        waiting_ns=of_steps.get(WAITING, 0),
        moving_ns=of_steps.get("exposed_comm", 0),
        is_split=not any(attempt.missing for attempt in account.attempts),
    )


def work_of_steps(joined: JoinedSteps) -> Work:
    """Return the work in some of a run's steps; no step counts for more than a few median steps."""
    weights = step_weights(joined.window_ns)

    def total_ns(times_ns: Floats) -> float:
        return float(weights @ times_ns) * len(joined.ranks)

    moving_ns = moving(joined.exposed_ns)
    return Work(
        ranks=len(joined.ranks),
        steps=len(joined),
        steps_ns=total_ns(joined.wall_ns.mean(axis=1)),
        waiting_ns=total_ns(np.asarray(joined.exposed_ns.mean(axis=1) - moving_ns)),
        moving_ns=total_ns(moving_ns),
    )
