"""What the readers of one attempt's data share."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs_server.store import Store


@dataclass(frozen=True)
class AttemptReader:
    """Reads one attempt.

    Attributes:
        store: Source of the columns.
        run: Key of the run.
        attempt: The attempt.
    """

    store: Store
    run: str
    attempt: str
