"""Choices of the reader of a run's pictures: steps, rank, step, and which ranks in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.slow_ranks.delay_map import DelayMap

Order = Literal["cost", "rank", "host"]


@dataclass(frozen=True)
class RankFilter:
    """The rows that are drawn.

    Attributes:
        text: Ranks, ranges of ranks, or a part of a host's name, separated by commas; empty for all.
        order: Order of the rows, from the top.
        hosts: Host by rank.
    """

    text: str
    order: Order
    hosts: dict[int, str]

    def includes(self, rank: int) -> bool:
        """Return whether the text names this rank or its host."""
        words = [word.strip() for word in self.text.split(",") if word.strip()]
        return not words or any(self._matches(word, rank) for word in words)

    def _matches(self, word: str, rank: int) -> bool:
        first, dash, last = word.partition("-")
        if first.isdecimal() and (last.isdecimal() if dash else True):
            return int(first) <= rank <= int(last if dash else first)
        return word.lower() in self.hosts.get(rank, "").lower()

    def rows(self, delays: DelayMap) -> wire.Ints:
        """Return the columns of `delays` to draw, in order from the top."""
        ranks = delays.ranks.tolist()
        keys = {
            "cost": lambda column: (-delays.cost_ns[column], ranks[column]),
            "rank": lambda column: (ranks[column],),
            "host": lambda column: (self.hosts.get(ranks[column], ""), ranks[column]),
        }
        columns = [column for column, rank in enumerate(ranks) if self.includes(rank)]
        return np.array(sorted(columns, key=keys[self.order]), np.int64)


@dataclass(frozen=True)
class Selection:
    """Choices of the reader; None selects all, or the latest.

    Attributes:
        first: First step.
        last: Last step.
        rank: The rank of the phases, and the first row of the step.
        step: The step.
        bucket: The bucket that the step is about, as MODULE.BUCKET; empty for all.
        match: Ranks or hosts, see `RankFilter`.
        order: Order of the ranks.
        dark: Whether the page is dark.
        legend: Columns of a legend.
    """

    first: int | None = None
    last: int | None = None
    rank: int | None = None
    step: int | None = None
    bucket: str = ""
    match: str = ""
    order: Order = "cost"
    dark: bool = False
    legend: int = 9
