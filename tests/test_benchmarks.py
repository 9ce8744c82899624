"""Each benchmark runs in its smallest form, and intervals cover the truth as often as they claim."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.broken import FAULTS
from benchmarks.pairs import ratio
from benchmarks.source import digest, keep, resumed
from benchmarks.tables import tables
from ddpobs import TelemetryConfig
from tests.integration.tools import need

ROOT = Path(__file__).resolve().parents[1]


def run(name: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--smoke", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_whole_run_benchmark_names_the_rank_that_was_slow_in_its_middle(tmp_path: Path) -> None:
    output = run("whole_run", "--json", str(tmp_path / "results.json"))
    assert "Rank 5 was slow in backward" in output
    assert json.loads((tmp_path / "results.json").read_text())["median_ms"].keys() > {"diagnostics"}


@pytest.mark.parametrize("name", ["hook", "accuracy"])
def test_a_benchmark_prints_and_saves_a_row_for_each_variant(name: str, tmp_path: Path) -> None:
    output = run(name, "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    for variant in results.get("found", results):
        assert f"\n| {variant} | " in output


def test_crashes_are_named_with_their_place(tmp_path: Path) -> None:
    output = run("crashes", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert [crash["is_right"] for crash in results] == [True, True], output
    assert "\n| kill | 1 | 100% |" in output


def test_causes_are_stated(tmp_path: Path) -> None:
    output = run("causes", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["garbage"]) == 1
    assert "\n| garbage | " in output


def test_reads_measures_each_request_on_both_databases(tmp_path: Path) -> None:
    for database in ([], ["--postgres"]):
        output = run("reads", "--json", str(tmp_path / "results.json"), *database)
        results = json.loads((tmp_path / "results.json").read_text())
        assert {row["bound_ms"] for row in results.values()} == {None, 50, 100, 300}
        assert all(f"\n| {name} | " in output and row["median_ms"] > 0 for name, row in results.items())


def test_overhead_compares_every_variant_with_torch(tmp_path: Path) -> None:
    output = run("overhead", "--json", str(tmp_path / "results.json"))
    for title in ("torch once more (the noise)", "ours, telemetry on", "telemetry on / torch, at most 1.00"):
        assert title in output
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert {setting["set"] for setting in settings.values()} == {"claims", "scale"}


def test_the_cost_of_the_flag_is_a_ratio_within_each_reducer() -> None:
    seconds = {
        "torch": [0.1] * 4,
        "again": [0.1] * 4,
        "torch_finds": [0.12] * 4,
        "off": [0.08] * 4,
        "finds": [0.09] * 4,
    }
    launch = {"seconds": seconds, "steps_a_turn": 1, "others_cores": 0.0, "stolen_cores": 0.0}
    output = tables({"one": {"model": "tiny", "ranks": 2, "set": "unused", "launches": [launch] * 2}})
    row = next(line for line in output.splitlines() if "400 tiny" in line)
    assert re.findall(r"(\d\.\d{3}) \[", row) == ["1.000", "1.200", "1.125", "0.750"]


def test_telemetry_is_switched_on_and_off_in_the_same_processes(tmp_path: Path) -> None:
    output = run("switched", "--json", str(tmp_path / "results.json"))
    ((model, launches),) = json.loads((tmp_path / "results.json").read_text())["found"].items()
    assert f"\n| {model} | " in output
    assert {len(turns) for turns in launches[0]["seconds"].values()} == {4}


def test_ingest_loses_nothing_and_is_compared_with_rows(tmp_path: Path) -> None:
    output = run("ingest", "--json", str(tmp_path / "results.json"))
    assert json.loads((tmp_path / "results.json").read_text())["lost"] == 0
    assert "a row a span, SQLite alone" in output


def test_a_job_by_the_real_exporter_loses_nothing(tmp_path: Path) -> None:
    output = run("job", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["spans"], results["lost"]) == (4 * 16 * 40, 0)
    assert " 0 lost" in output


def test_harm_measures_step_time_memory_and_exit_under_each_fault(tmp_path: Path) -> None:
    output = run("harm", "--json", str(tmp_path / "results.json"))
    launches = json.loads((tmp_path / "results.json").read_text())["models"]["tiny"]
    for title in ("all broken ones together", "a healthy collector", FAULTS["silent"][0]):
        assert f"\n| {title} | " in output
    (silent,) = launches["silent"]
    assert silent["waiting_bytes"] > 0
    assert silent["exit_s"] > 0.7 * TelemetryConfig().exit_s


def test_a_hang_is_named_by_the_collector_and_in_the_log(tmp_path: Path) -> None:
    output = run("hangs", "--json", str(tmp_path / "results.json"))
    (result,) = json.loads((tmp_path / "results.json").read_text())["lock"]
    assert result["collector_right"], output
    assert result["log_right"], output


def test_communication_runs_on_links_of_its_own(tmp_path: Path) -> None:
    need("tc", "iproute2")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("links of a chosen speed need root's network rights")
    output = run("communication", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(f"| {variant} | " in output for variant in results["seconds"])
    # A cast to 16 bits halves the bytes, apart from the fixed cost of a small model's packets.
    assert results["busiest_link"]["fp16"] < 0.8 * results["busiest_link"]["plain all-reduce"]


@pytest.mark.parametrize("medians", [False, True])
@pytest.mark.parametrize("launches", [2, 4, 12])
def test_the_interval_of_a_ratio_covers_the_truth_in_95_percent(launches: int, medians: bool) -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        truths = [random.normal(1.0, 0.02, 2) for _ in range(launches)]
        above, below = ([random.normal(truth[side], 0.05, 12) for truth in truths] for side in (0, 1))
        interval = ratio([list(row) for row in above], [list(row) for row in below], medians=medians)
        covered += interval.low <= 1.0 <= interval.high
    assert 0.92 <= covered / 400 <= 0.98


def test_figures_of_other_code_or_another_machine_are_refused(tmp_path: Path) -> None:
    file, facts = tmp_path / "results.json", {"machine": {"cores": 2}, "code": "a"}
    assert resumed(file, facts | {"settings": {}}) == facts | {"settings": {}}
    keep(facts | {"settings": {"kept": 1}}, file)
    assert resumed(file, facts | {"settings": {}})["settings"] == {"kept": 1}
    assert resumed(file, facts | {"settings": {}}, anew=True)["settings"] == {}
    for changed in ({"code": "b"}, {"machine": {"cores": 4}}):
        with pytest.raises(SystemExit, match=f"of another {next(iter(changed))}.* --anew"):
            resumed(file, facts | changed)


def test_the_digest_changes_with_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.source.ROOT", tmp_path)
    (tmp_path / "part").mkdir()
    digests = set()
    for text in ("a", "b", "a"):
        (tmp_path / "part" / "x.py").write_text(text)
        digests.add(digest("part"))
    assert len(digests) == 2


def test_a_ratio_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        ratio([[]], [[]])


def test_a_rare_burst_counts_in_totals_and_not_in_medians() -> None:
    bursty, steady = [[1.0] * 9 + [11.0]] * 3, [[1.0] * 10] * 3
    assert (ratio(bursty, steady).middle, ratio(bursty, steady, medians=True).middle) == (pytest.approx(2.0), 1.0)


def test_a_verdict_is_open_where_the_interval_holds_the_limit() -> None:
    slower = ratio([[1.1, 1.12, 1.11] * 5], [[1.0, 1.01, 1.0] * 5])
    assert (slower.verdict(1.0), slower.verdict(1.2), slower.verdict(slower.middle)) == ("fails", "holds", "open")


def test_scrapes_measures_runs_of_many_ranks_and_many_runs(tmp_path: Path) -> None:
    output = run("scrapes", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(f"\n| {title} | " in output and row["bytes"] > 0 for title, row in results.items())
    assert results["many: every run sent, gzip"]["bytes"] < results["many: every run sent"]["bytes"]


def test_fairness_compares_a_workspace_alone_and_beside_another(tmp_path: Path) -> None:
    output = run("fairness", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert "\n| batch | " in output
    assert results["batch_ratio"] == results["batch_beside_ms"] / results["batch_alone_ms"]


def test_a_short_soak_loses_no_acknowledged_span(tmp_path: Path) -> None:
    run("soak", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["acknowledged_spans"] > 0
    assert (results["lost_spans"], results["doubled_spans"]) == (0, 0)
