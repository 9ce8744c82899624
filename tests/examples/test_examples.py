"""The examples as `docs/examples.md` starts them, in their smallest size, and the runs that a collector has then."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch.nn.functional import mse_loss

from benchmarks.rig.collector import running_collector
from scripts.example_pictures import ROOT, examples

SMALLEST = {
    "toy": ("--steps=40",),
    "checkpoint": ("--steps=8", "--every=4", "--width=32"),
    "model_parallel": ("--steps=40",),
    "imagenet": ("--epochs=1", "--images=96", "--batch=8", "--size=48", "--width=8"),
    "horovod": ("--epochs=2",),
    "pipeline": ("--steps=20",),
}
STEPS = {"toy": 40, "checkpoint": 8, "model_parallel": 40, "imagenet": 6, "horovod": 24, "pipeline": 20}
FURTHER = {"toy", "imagenet", "horovod"}
"""Examples of `make wide` alone: `test_frameworks.py` has DDP in plain loops with loaders, and Horovod's script."""


class Trained:
    """Examples that end when they are asked for: what they printed, and the collector's answers."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self.folder = url, folder
        self._outputs: dict[str, str] = {}

    def train(self, name: str) -> str:
        return examples()[name].train(self._url, self.folder, *SMALLEST[name])

    def output(self, name: str) -> str:
        """What the first training printed."""
        if name not in self._outputs:
            self._outputs[name] = self.train(name)
        return self._outputs[name]

    def get(self, name: str, path: str = "") -> Any:
        self.output(name)
        return httpx.get(f"{self._url}/api/v1/runs/{name}{path}").raise_for_status().json()


def param(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.wide] if name in FURTHER else [])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("examples")
    with running_collector(folder) as url:
        yield Trained(url, folder)


def test_the_page_has_each_example_with_its_picture() -> None:
    assert list(examples()) == list(SMALLEST)
    assert [name for name, example in examples().items() if not example.picture.exists()] == []
    scripts = {path.stem.removeprefix("train_") for path in (ROOT / "examples").glob("train_*.py")}
    assert scripts - {"gpt"} == set(SMALLEST)  # The demo trains the GPT.


@pytest.mark.parametrize("name", [param(name) for name in SMALLEST])
def test_an_example_is_recorded_whole_from_both_ranks(name: str, trained: Trained) -> None:
    run = trained.get(name)
    assert (run["state"], run["ranks"], run["steps"], run["dropped"]) == ("finished", 2, STEPS[name], 0)
    diagnosis = trained.get(name, "/diagnostics")
    assert diagnosis["steps_seen"] == STEPS[name]
    assert {each["code"] for each in diagnosis["findings"]}.isdisjoint({"crash", "hang", "not-reduced"})
    assert {each["steps"] > 0 for each in trained.get(name, "/buckets")["buckets"]} == {True}


def test_a_checkpoint_continues_the_training_of_both_ranks(trained: Trained) -> None:
    trained.output("checkpoint")
    output = trained.train("checkpoint")
    assert sorted(re.findall(r"rank \d: goes on after step \d+", output)) == [
        f"rank {rank}: goes on after step 8" for rank in range(2)
    ]
    saved = torch.load(trained.folder / "model.pt", weights_only=True)
    assert saved["step"] == 16
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, 17):
        generators = (torch.Generator().manual_seed(2 * step + rank) for rank in range(2))
        inputs = torch.cat([torch.randn(64, 32, generator=generator) for generator in generators])
        optimizer.zero_grad()
        mse_loss(model(inputs), inputs.sin()).backward()
        optimizer.step()
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(saved["model"][f"module.{name}"], parameter)


def test_the_layers_of_both_devices_are_reduced(trained: Trained) -> None:
    assert "layers on cpu and cpu" in trained.output("model_parallel")
    layout = str(trained.get("model_parallel", "/layout"))
    assert "net1.0.weight" in layout
    assert "net2.2.weight" in layout


@pytest.mark.wide
def test_a_run_of_horovods_script_counts_four_passes_a_step(trained: Trained) -> None:
    assert trained.get("horovod")["hello"]["settings"]["backward_passes_per_step"] == 4
    assert len(re.findall(r"of the test digits correct, 2 ranks", trained.output("horovod"))) == 2


def test_both_stages_of_the_pipeline_learn_and_are_recorded(trained: Trained) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", trained.output("pipeline"))]
    assert losses[-1] < losses[0]
    assert {each["module"] for each in trained.get("pipeline")["modules"]} == {0, 1}
