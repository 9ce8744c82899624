"""From the gradient hook to the named slow rank: real ranks and a real collector, joined by the wire alone."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import duckdb
import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.rig.training import ROOT, TORCHRUN, train
from ddpobs import Client, trackers, wire
from ddpobs.cli import main
from ddpobs.shared.words import LABELS
from tests.support.integration.slow_ranks import (
    SLOW_RANK,
    get,
    own_times,
    stragglers,
    stragglers_unless_preempted,
)

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        pytest.param(0, "backward", marks=pytest.mark.wide),
        (1, "data"),
        pytest.param(0, "forward", marks=pytest.mark.wide),
        pytest.param(1, "optimizer", marks=pytest.mark.wide),
    ],
)
def test_the_slow_rank_is_named_with_its_phase(url: str, rank: int, phase: str) -> None:
    run = f"slow-{rank}-{phase}"
    train(url, run, slow_rank=rank, phase=phase, steps=120)
    findings = stragglers(url, run)
    assert [(f["ranks"], f["phase"]) for f in findings] == [([rank], phase)], own_times(url, run)
    assert findings[0]["gain"]["step_ns"] > 0


def test_a_balanced_run_names_no_rank(url: str) -> None:
    train(url, "balanced", steps=100)
    assert get(url, "balanced", "/diagnostics")["steps_seen"] == 100
    assert stragglers_unless_preempted(url, "balanced") == []


def test_the_duration_of_the_backward_call_alone_names_no_rank(url: str, slow_run: str) -> None:
    """The backward call lasts equally long on every rank; only own time separates the ranks."""
    columns = get(url, slow_run, "/steps")["columns"]
    walls: dict[int, list[int]] = {0: [], 1: []}
    names = ("rank", "step", "backward_ns", "exposed_comm_ns")
    for rank, step, backward, exposed in zip(*(columns[name] for name in names), strict=True):
        if step >= 5:  # In the first step the ranks wait for each other to read the text.
            walls[rank].append(backward + exposed)
    means = [sum(values) / len(values) for values in walls.values()]
    assert max(means) < 1.25 * min(means)
    assert [f["ranks"] for f in stragglers(url, slow_run)] == [[SLOW_RANK]]


def test_the_training_prints_its_address_once_and_the_verdict_at_its_end(
    url: str, slow_run: str, slow_run_output: str
) -> None:
    address = f"{url}/runs/{slow_run}"
    lines = slow_run_output.splitlines()
    assert lines.count(f"ddpobs: {address}") == 1
    frame = [index for index, line in enumerate(lines) if line.startswith(("┌─ ddpobs", "└"))]
    assert frame[1] - frame[0] < 20
    inside = lines[frame[0] + 1 : frame[1]]
    assert f"Rank {SLOW_RANK} is slow in backward" in inside[0], own_times(url, slow_run)
    labels = " ".join(line[2:10] for line in inside).split()
    assert [label for label in labels if label in LABELS.values()] == [
        "measure",
        "when",
        "cause",
        "where",
        "do",
        "saves",
    ]
    assert address in inside[-1]


def test_exported_steps_answer_the_documented_query(
    url: str, slow_run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    done = CliRunner().invoke(main, ["export", slow_run, "-o", "runs/slow.parquet", "--collector", url])
    assert (done.exit_code, done.stderr) == (0, "runs/slow.parquet: 160 steps\n")
    (query,) = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "notebook.md").read_text(), re.DOTALL)
    answer = duckdb.sql(query)
    assert answer is not None
    rows = answer.fetchall()
    assert [(run, rank, steps) for run, rank, _, steps in rows] == [(slow_run, 1, 75), (slow_run, 0, 75)]


def test_the_client_reads_the_run(url: str, slow_run: str) -> None:
    run = Client(url).run(slow_run)
    assert run.name in [listed.name for listed in Client(url).runs()]
    assert run.steps(rank=SLOW_RANK)["step"].tolist() == list(range(80))
    assert set(run.spans(first=10, last=11)["step"].tolist()) == {10, 11}
    assert [finding["ranks"] for finding in run.findings() if finding["code"] == "straggler"] == [[SLOW_RANK]]
    assert sum(part["share"] for part in run.account()["parts"]) == pytest.approx(1)
    assert sorted(rank["rank"] for rank in run.ranks()) == [0, 1]
    numbers, _ = trackers.summary(run)
    assert numbers[f"ddpobs/host/{socket.gethostname()}/memory_resident_bytes"] > 0
    assert f"{url}/runs/{slow_run}" in run._repr_html_()


def test_phases_add_up_and_every_record_arrived(url: str, slow_run: str) -> None:
    run = get(url, slow_run)
    assert (run["state"], run["world_size"], run["ranks"], run["steps"], run["dropped"]) == ("finished", 2, 2, 80, 0)
    columns = get(url, slow_run, "/steps")["columns"]
    assert len(columns["step"]) == 160
    for row, (start, end) in enumerate(zip(columns["start_ns"], columns["end_ns"], strict=True)):
        assert sum(columns[f"{phase}_ns"][row] for phase in wire.PHASES) == end - start
    buckets = get(url, slow_run, "/layout")["layouts"][-1]["buckets"]
    spans = get(url, slow_run, "/spans", **{"from": 5})["columns"]
    assert len(spans["step"]) == 75 * 2 * len(buckets)
    assert sum(parameter["size"] for bucket in buckets for parameter in bucket["parameters"]) * 4 == sum(
        bucket["size_bytes"] for bucket in buckets
    )


def test_all_ranks_leave_a_collective_together_on_aligned_clocks(url: str, slow_run: str) -> None:
    stragglers_answer = get(url, slow_run, "/stragglers")
    assert stragglers_answer["last_rank"].count(SLOW_RANK) > 0.8 * len(stragglers_answer["steps"])
    median_delay = sorted(stragglers_answer["delay_ns"])[len(stragglers_answer["delay_ns"]) // 2]
    assert stragglers_answer["noise_ns"] < median_delay


def test_the_ranks_also_compute_straggler_statistics_among_themselves(url: str, slow_run: str) -> None:
    metrics = httpx.get(f"{url}/metrics").text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if not line.startswith("#")
    }

    def straggler_steps(rank: int) -> float:
        return values[f'ddpobs_straggler_steps_total{{phase="backward",rank="{rank}",run="{slow_run}"}}']

    assert straggler_steps(SLOW_RANK) > 10 * max(1.0, straggler_steps(1 - SLOW_RANK))


def test_the_trace_opens_as_chrome_json(url: str, slow_run: str) -> None:
    trace = get(url, slow_run, "/trace", **{"from": 10, "to": 12})
    phases = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] in wire.PHASES]
    assert {event["args"]["step"] for event in phases} == {10, 11, 12}
    assert {event["pid"] for event in phases} == {0, 1}


def test_ddpobs_run_records_an_unchanged_script_with_torchs_own_ddp(url: str, tmp_path: Path) -> None:
    script = tmp_path / "train_torch.py"
    text = (ROOT / "examples" / "train_gpt.py").read_text()
    script.write_text(text.replace("from ddpobs import", "from torch.nn.parallel import"))
    assert "import ddpobs" not in script.read_text()
    launcher = (str(_ddpobs()), "run", "--collector", url, "--run", "torch-ddp", "--", *TORCHRUN)
    train(url, "torch-ddp", slow_rank=0, phase="backward", steps=120, launcher=launcher, script=script)
    named = [(f["ranks"], f["phase"]) for f in stragglers(url, "torch-ddp")]
    assert named == [([0], "backward")], own_times(url, "torch-ddp")
    assert get(url, "torch-ddp")["hello"]["settings"]["reducer"] == "torch"
    assert len(get(url, "torch-ddp", "/layout")["layouts"][-1]["buckets"]) > 1


def _ddpobs() -> Path:
    import sys

    return Path(sys.executable).with_name("ddpobs")
