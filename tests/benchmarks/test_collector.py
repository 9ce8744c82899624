"""The benchmarks of the collector in their smallest form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.smoke import LIMIT_S, run

pytestmark = [pytest.mark.timeout(LIMIT_S + 60), pytest.mark.wide]


def test_the_whole_run_benchmark_names_the_rank_that_was_slow_in_its_middle(tmp_path: Path) -> None:
    output = run("whole_run", "--json", str(tmp_path / "results.json"))
    assert "Rank 5 was slow in backward" in output
    assert json.loads((tmp_path / "results.json").read_text())["median_ms"].keys() > {"diagnostics"}


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_page_benchmark_measures_requests_and_drawing() -> None:
    output = run("run_page")
    for title in ("diagnostics", "figures/step", "drawing of figures/step", "until all figures"):
        assert f"\n| {title} | " in output


def test_reads_measures_each_request_on_both_databases(tmp_path: Path) -> None:
    for database in ([], ["--postgres"]):
        output = run("reads", "--json", str(tmp_path / "results.json"), *database)
        results = json.loads((tmp_path / "results.json").read_text())
        assert {row["bound_ms"] for row in results.values()} == {None, 50, 100, 300}
        assert all(f"\n| {name} | " in output and row["median_ms"] > 0 for name, row in results.items())


def test_the_peak_of_each_read_is_measured(tmp_path: Path) -> None:
    run("read_peaks", "--json", str(tmp_path / "results.json"), "--match", "buckets/s")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["buckets"].keys() > {"/stragglers", "/spans", "/steps?mean=true"}
    assert {row["status"] for row in results["buckets"].values()} == {200}
    assert all(0 < row["growth_mb"] < row["peak_mb"] for row in results["buckets"].values())


def test_ingest_loses_nothing_and_is_compared_with_rows(tmp_path: Path) -> None:
    output = run("ingest", "--json", str(tmp_path / "results.json"))
    assert json.loads((tmp_path / "results.json").read_text())["lost"] == 0
    assert "a row a span, SQLite alone" in output


def test_the_parts_of_ingest_add_up_to_its_processor_time(tmp_path: Path) -> None:
    output = run("ingest_parts", "--json", str(tmp_path / "results.json"))
    ns_per_span = json.loads((tmp_path / "results.json").read_text())
    assert all(ns > 0 for ns in ns_per_span.values())
    assert f"{sum(ns_per_span.values()):.0f} ns a span" in output


def test_scrapes_measures_runs_of_many_ranks_and_many_runs(tmp_path: Path) -> None:
    output = run("scrapes", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(f"\n| {title} | " in output and row["bytes"] > 0 for title, row in results.items())
    assert results["many: every run sent, gzip"]["bytes"] < results["many: every run sent"]["bytes"]


def test_fairness_compares_a_workspace_alone_and_beside_another(tmp_path: Path) -> None:
    output = run("fairness", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert "\n| batch, many | " in output
    assert results["read, many"].keys() == {"ms", "over_alone", "percentiles_90_over_alone", "over_elsewhere"}


def test_a_short_soak_loses_no_acknowledged_span(tmp_path: Path) -> None:
    run("soak", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["acknowledged_spans"] > 0
    assert (results["lost_spans"], results["doubled_spans"], results["acknowledged_without_file"]) == (0, 0, 0)
    assert not results["strange"]


def test_many_runs_measures_list_scrapes_and_retention(tmp_path: Path) -> None:
    run("many_runs", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["runs"] == 40
    assert results["the whole list, ms"] > 0


def test_extremes_measures_each_read_of_both_runs(tmp_path: Path) -> None:
    run("extremes", "--json", str(tmp_path / "results.json"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert {row["status"] for part in ("by_ranks", "by_buckets") for row in results[part].values()} == {200}
