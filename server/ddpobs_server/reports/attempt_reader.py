"""What the readers of one attempt's data share."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs_server.analysis.steps.pipeline import Stage, stages_of
from ddpobs_server.analysis.steps.rank_groups import RankGroup, groups_of
from ddpobs_server.reports.liveness import world_size_of
from ddpobs_server.store import Source, Store


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

    def parts(self, sources: list[Source]) -> list[Stage] | list[RankGroup]:
        """Return the stages of a pipeline, else the process groups, whose ranks are compared; empty if all are."""
        hellos = {source.rank: source.hello for source in sources if source.hello}
        stages = stages_of(self.store.first_events(self.run, self.attempt))
        return stages or groups_of(hellos, world_size_of(sources))
