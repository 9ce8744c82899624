"""Random trainings, each on torch's DDP and on ours: the results are equal bit for bit."""

from __future__ import annotations

import pytest

from tests.support.distributed.compare import Case, verdicts
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.random_trainings import SEEDS, Training


def case(seed: int) -> Case:
    return lambda kind, rank: Training(seed, rank, kind).results()


def judge_seeds(rank: int, world_size: int) -> dict[str, str]:
    return verdicts({f"seed {seed}": case(seed) for seed in SEEDS}, rank)


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.wide), 3])
def test_a_random_training_has_the_results_of_torch(world_size: int) -> None:
    for by_seed in run_ranks(judge_seeds, world_size):
        assert {seed: verdict for seed, verdict in by_seed.items() if verdict != "equal"} == {}
