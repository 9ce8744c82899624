"""Trainings that keep their replicas together by their own collectives, or do not: steps and fingerprints of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending
from tests.support.distributed.unreduced import Training, relevant

STEPS, EVERY = 12, 3


def local_sgd(training: Training, *, averages: bool) -> None:
    """Every third step all-reduces as much as the model has: its parameters, or something else."""
    for index in range(STEPS):
        with training.ddp.no_sync():
            training.loss(index).backward()
        training.step()
        if index % EVERY == EVERY - 1:
            for parameter in training.model.parameters():
                value = parameter.data if averages else parameter.data.clone()
                dist.all_reduce(value)
                value.div_(2)
    training.loss(0)


def trained(rank: int, world_size: int, kind: str) -> list[Any]:
    results = []
    for averages in (True, False):
        with sending() as sent:
            training = Training(rank, kind, replace(sent.config, fingerprint_every=1))
            dist.barrier()
            local_sgd(training, averages=averages)
            del training
        prints = [list(sample.parameters) for batch in sent.batches for sample in batch.fingerprints]
        ((_, _, _, _, facts),) = relevant(sent)[-1:]
        results.append((sent.steps("step"), sent.steps("collective"), facts, prints))
    return results


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_steps_are_counted_and_replicas_compared_after_each_exact_exchange(kind: str) -> None:
    first, second = run_ranks(trained, 2, kind)
    for (steps, collectives, facts, prints), (_, _, _, others), averages in zip(
        first, second, (True, False), strict=True
    ):
        assert steps == list(range(STEPS))
        assert [step for step, collective in enumerate(collectives) if collective >= 0] == [2, 5, 8, 11]
        assert (facts["exchanges"], facts["exact"], facts["every"]) == (4, 4, EVERY)
        assert len(prints) == len(others) == 4
        assert (prints == others) is averages
