"""The collectives of each step in torch's profiler, compared with those of torch's DDP."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.distributed.compare import batch, net

STEPS = 4


def collectives(**options: Any) -> Any:
    def case(kind: Any, rank: int) -> Any:
        """Return the number of all-reduces in each step, and the number of collectives in all of them."""
        ddp, by_step = kind(net(), **options), []
        for step in range(STEPS):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                ddp(batch(rank, step)).sum().backward()
            by_step.append(Counter(event.name for event in profile.events() if event.name.startswith("gloo:")))
        return [[names["gloo:all_reduce"] for names in by_step], sum(names.total() for names in by_step)]

    return case


def searches(kind: Any, rank: int) -> Any:
    """Return how often each step searches for unused parameters, once the first step is over."""
    ddp, counts = kind(net(), find_unused_parameters=True), []
    for step in range(STEPS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ddp(batch(rank, step)).sum().backward()
        counts.append(sum(event.name.endswith("search_unused_parameters") for event in profile.events()))
    return counts[1:]


CASES = {
    "default": collectives(),
    "views": collectives(gradient_as_bucket_view=True),
    "find_unused_parameters": collectives(find_unused_parameters=True),
    "static_graph": collectives(static_graph=True),
    "searches": searches,
}


@pytest.mark.parametrize("case", CASES)
def test_the_profiler_counts_as_many_as_with_torch(verdicts_by_rank: list[dict[str, str]], case: str) -> None:
    assert {verdict[case] for verdict in verdicts_by_rank} == {"equal"}
