"""Every framework and door by every way to start it: trainings end as without ddpobs, and some are recorded in full."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpobs import wire
from scripts.combinations import ALWAYS, CELLS, FURTHER, RECORDED, TABLE, WAYS, Command
from tests.support.integration.matrix_launch import foreign_lines, output_of, start, start_without
from tests.support.integration.slow_ranks import get

pytestmark = pytest.mark.timeout(900)

Key = tuple[str, str]
EVALUATION_NS = 400_000_000
"""Least duration of each rank's share of an evaluation: its loader sleeps."""


@dataclass(frozen=True)
class Facts:
    """Facts that a run must have on each rank.

    Attributes:
        reductions: Reductions of the gradients, each a step, for one call of the optimizer.
    """

    model: str = "Sequential"
    prefix: str = ""
    parameters: int = 8
    steps: int = 9
    micro_steps: int = 2
    samples: int = 32
    evaluated_before: frozenset[int] = frozenset()
    evaluated_quickly_before: frozenset[int] = frozenset()
    reducer: str = "torch"
    element_bytes: int = 4
    reductions: int = 1
    sets_epoch: bool = True


SHARDED: dict[str, Any] = {"reducer": "fully_shard"}
BARE: dict[str, Any] = {"steps": 18, "micro_steps": 1, "samples": 16, "sets_epoch": False}
RUNS = {
    ("Transformers' Trainer", "torchrun"): Facts(
        model="GPT2LMHeadModel",
        prefix="transformer.",
        parameters=28,
        steps=12,
        samples=16,
        evaluated_before=frozenset({4, 8}),
    ),
    ("Accelerate", "accelerate launch"): Facts(evaluated_before=frozenset({3, 6})),
    ("Accelerate", "torchrun"): Facts(evaluated_before=frozenset({3, 6})),
    ("Lightning", "python"): Facts(model="Digits", prefix="network.", evaluated_before=frozenset({3, 6})),
    ("FSDP2 by Transformers' Trainer", "torchrun"): Facts(
        model="GPT2LMHeadModel",
        prefix="transformer.",
        parameters=28,
        steps=12,
        samples=16,
        evaluated_before=frozenset({4, 8}),
        element_bytes=2,
        **SHARDED,
    ),
    ("FSDP2 by Accelerate", "accelerate launch"): Facts(evaluated_before=frozenset({3, 6}), **SHARDED),
    ("FSDP2 by Lightning", "python"): Facts(
        steps=18, micro_steps=1, samples=16, evaluated_before=frozenset({6, 12}), reductions=2, **SHARDED
    ),
    ("torch's DDP", "torchrun"): Facts(**BARE),
    ("`ddpobs.DistributedDataParallel`", "DDPOBS_TELEMETRY"): Facts(**BARE, reducer="ddpobs"),
    ("Horovod", "ddpobs horovodrun"): Facts(
        model="SGD",
        parameters=6,
        steps=36,
        micro_steps=4,
        samples=64,
        evaluated_quickly_before=frozenset({12, 24}),
        reducer="ddpobs.horovod",
    ),
}


def name_of(key: Key) -> str:
    """The run's name at the collector, and the test's."""
    return "-".join(key).replace(" ", "-").replace("`", "").replace("'", "")


def cells(keys: Iterable[Key], always: Collection[Key] = ALWAYS) -> list[Any]:
    """Parameters of a test: those that `make test` does not run have the mark `wide`."""
    return [pytest.param(key, id=name_of(key), marks=[] if key in always else [pytest.mark.wide]) for key in keys]


class Launches:
    """All commands that the selected tests need, two at a time: most of the time is imports and sleep.

    Args:
        compared: Cells whose command also runs without ddpobs.
    """

    def __init__(self, url: str, folder: Path, keys: list[Key], compared: set[Key], pool: ThreadPoolExecutor) -> None:
        self._with: dict[Key, Future[Any]] = {}
        self._without: dict[Command, Future[Any]] = {}
        for number, key in enumerate(keys):
            cell, own = CELLS[key], folder / str(number)
            self._with[key] = pool.submit(start, cell.command, own, key[1], url, name_of(key))
            if key in compared and cell.without not in self._without:
                self._without[cell.without] = pool.submit(start_without, cell.without, folder / f"{number}-without")

    def ended(self, key: Key) -> Any:
        """The end of a cell's command."""
        return self._with[key].result()

    def without(self, key: Key) -> Any:
        """The end of a compared cell's command without ddpobs."""
        return self._without[CELLS[key].without].result()


@pytest.fixture(scope="module")
def launches(url: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Launches]:
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    compared, recorded = ({each.get(name) for each in parameters} & CELLS.keys() for name in ("cell", "run_key"))
    with ThreadPoolExecutor(2) as pool:
        folder = tmp_path_factory.mktemp("frameworks")
        yield Launches(url, folder, [key for key in CELLS if key in compared | recorded], compared, pool)


@pytest.mark.parametrize("cell", cells(CELLS, ALWAYS - RECORDED))
def test_a_training_with_ddpobs_ends_as_without(url: str, launches: Launches, cell: Key) -> None:
    """Same exit status, same parameters bit for bit, and nothing on stderr but our lines."""
    ended, without = launches.ended(cell), launches.without(cell)
    assert without.returncode == 0, without.stdout + without.stderr
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert output_of(ended) == output_of(without)
    assert set(foreign_lines(ended)) <= set(foreign_lines(without))
    if CELLS[cell].observed:
        summary = get(url, name_of(cell))
        assert (summary["state"], summary["ranks"], summary["dropped"]) == ("finished", 2, 0)


def test_each_row_but_further_ones_and_each_way_is_always_tested() -> None:
    assert sorted(row for row, _ in ALWAYS) == sorted(TABLE.keys() - FURTHER)
    assert {way for _, way in ALWAYS} == set(WAYS)


@pytest.fixture(params=cells(RUNS))
def run_key(request: pytest.FixtureRequest) -> Key:
    key: Key = request.param
    return key


@pytest.fixture
def facts(run_key: Key) -> Facts:
    return RUNS[run_key]


@pytest.fixture
def run(run_key: Key, launches: Launches) -> str:
    ended = launches.ended(run_key)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return name_of(run_key)


def columns(url: str, run: str, rank: int) -> dict[str, Any]:
    lists = get(url, run, "/steps", rank=rank)["columns"]
    return {name: np.array(values) for name, values in lists.items()}


def test_the_run_is_finished_with_both_ranks_and_all_steps(url: str, run: str, facts: Facts) -> None:
    summary = get(url, run)
    assert (summary["state"], summary["ranks"], summary["dropped"]) == ("finished", 2, 0)
    assert summary["hello"]["settings"]["reducer"] == facts.reducer
    assert [module["name"] for module in summary["modules"]] == [facts.model]
    for rank in range(2):
        steps = columns(url, run, rank)
        assert steps["step"].tolist() == list(range(facts.steps))
        assert set(steps["micro_steps"].tolist()) == {facts.micro_steps}
        assert set(steps["samples"].tolist()) == {facts.samples}


def test_every_step_has_its_phases_and_they_add_up(url: str, run: str, facts: Facts) -> None:
    """A sharded model is attached at its first forward, after the first fetch."""
    for rank in range(2):
        steps = columns(url, run, rank)
        phases = {phase: steps[f"{phase}_ns"] for phase in wire.PHASES}
        assert (sum(phases.values()) == steps["end_ns"] - steps["start_ns"]).all()
        assert (phases["data"][1 if facts.reducer == "fully_shard" else 0 :] > 0).all()
        assert (phases["optimizer"][facts.reductions - 1 :: facts.reductions] > 0).all()
        for phase in ("forward", "backward"):
            assert (phases[phase] > 0).all(), phase


def test_evaluations_and_checkpoints_are_in_no_step_and_the_next_step_has_no_origin(
    url: str, run: str, facts: Facts
) -> None:
    for rank in range(2):
        steps = columns(url, run, rank)
        evaluated_before = sorted(facts.evaluated_before)
        # On a busy machine a loader may take as long to start, but hardly after each evaluation.
        assert not evaluated_before or steps["data_ns"][evaluated_before].min() < EVALUATION_NS
        gaps = steps["start_ns"][1:] - steps["end_ns"][:-1]
        assert facts.evaluated_before <= set(np.flatnonzero(gaps >= EVALUATION_NS / 2) + 1)
        unclean = set(np.flatnonzero(steps["flags"] & wire.NO_ORIGIN))
        assert unclean == facts.evaluated_before | facts.evaluated_quickly_before | {0}


def test_the_buckets_hold_every_parameter_by_name(url: str, run: str, facts: Facts) -> None:
    """So do the reduce-scatters of a sharded model's units."""
    layout = get(url, run, "/layout")["layouts"][-1]
    reduced = {row: b for row, b in enumerate(layout["buckets"]) if b["kind"] in ("bucket", "reduce_scatter")}
    parameters = [parameter for bucket in reduced.values() for parameter in bucket["parameters"]]
    assert len(parameters) == facts.parameters
    assert all(parameter["name"].startswith(facts.prefix) for parameter in parameters)
    size_bytes = facts.element_bytes * sum(parameter["size"] for parameter in parameters)
    assert size_bytes == sum(bucket["size_bytes"] for bucket in reduced.values())
    spans = get(url, run, "/spans")["columns"]
    rows = zip(spans["step"], spans["revision"], spans["bucket"], strict=True)
    last = [bucket for step, revision, bucket in rows if (step, revision) == (facts.steps - 1, layout["revision"])]
    assert sorted(bucket for bucket in last if bucket in reduced) == sorted([*reduced, *reduced])


def test_only_the_script_without_set_epoch_has_that_finding(url: str, run: str, facts: Facts) -> None:
    findings = {finding["code"]: finding for finding in get(url, run, "/diagnostics")["findings"]}
    assert ("epoch-not-set" in findings) == (not facts.sets_epoch)
    if not facts.sets_epoch:
        assert (findings["epoch-not-set"]["ranks"], findings["epoch-not-set"]["steps"]) == ([0, 1], [6, 17])
        assert findings["epoch-not-set"]["evidence"]["dataset"] == "TensorDataset"
