"""The benchmarks of training in their smallest form.

Those of hangs, crashes and causes use the trainings of `benchmarks/faults/`, as the tests in `tests/integration/` do.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.broken import FAULTS
from benchmarks.whatif.__main__ import CAPS_MB, OF_OTHERS
from ddpobs import TelemetryConfig
from tests.support.integration.tools import need
from tests.support.smoke import LIMIT_S, run

pytestmark = [pytest.mark.timeout(LIMIT_S + 60), pytest.mark.wide]


@pytest.mark.parametrize("name", ["hook", "accuracy", "agreement"])
def test_a_benchmark_prints_and_saves_a_row_for_each_variant(name: str, tmp_path: Path) -> None:
    output = run(name, "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    for variant in results.get("found", results):
        assert f"\n| {variant} | " in output


def test_overhead_compares_every_variant_with_torch(tmp_path: Path) -> None:
    output = run("overhead", "--json", str(tmp_path / "results.json"))
    for title in ("torch once more (the noise)", "ours, telemetry on", "telemetry on / torch, at most 1.00"):
        assert title in output
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert {setting["set"] for setting in settings.values()} == {"claims", "scale"}


def test_telemetry_is_switched_on_and_off_in_the_same_processes(tmp_path: Path) -> None:
    output = run("switched", "--json", str(tmp_path / "results.json"))
    found = json.loads((tmp_path / "results.json").read_text())["found"]
    assert [model.split(",")[0] for model in found] == ["400 tiny parameters", "FSDP2"]
    for model, launches in found.items():
        assert f"\n| {model} | " in output
        assert {len(turns) for turns in launches[0]["seconds"].values()} == {4}


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


def test_communication_runs_on_links_of_its_own(tmp_path: Path) -> None:
    need("tc", "iproute2")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("links of a chosen speed need root's network rights")
    output = run("communication", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(f"| {variant} | " in output for variant in results["seconds"])
    # A cast to 16 bits halves the bytes, apart from the fixed cost of a small model's packets.
    assert results["busiest_link"]["fp16"] < 0.8 * results["busiest_link"]["plain all-reduce"]


def test_whatif_predicts_each_setting_from_one_and_measures_it(tmp_path: Path) -> None:
    need("tc", "iproute2")
    output = run("whatif/__main__", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    kinds = [row["kind"] for row in results["rows"]]
    assert kinds.count(OF_OTHERS) == len(CAPS_MB) * (len(CAPS_MB) - 1)
    assert len(kinds) - kinds.count(OF_OTHERS) == 8
    assert all(row["measured_ns"] > 0 for row in results["rows"])
    assert "\n| all | " in output


def test_advice_about_units_is_followed(tmp_path: Path) -> None:
    need("tc", "iproute2")
    output = run("unit_advice", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert [len(rows) for rows in results.values()] == [1, 1]
    assert "\n| units merged, link of 2 ms | " in output


def test_dropped_layers_are_compared_with_a_search_for_unused_parameters() -> None:
    output = run("dropping")
    assert (
        "| ours, drops / torch, finds unused | ours, drops / ours, finds unused | ours, drops / ours, drops nothing |"
        in output
    )
    assert "\n| 400 tiny parameters | loopback | " in output
