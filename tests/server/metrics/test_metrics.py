"""Values of the runs' metrics, and their entry in the guide."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
from ddpobs_server.metrics.run_metrics import render_present
from ddpobs_server.reports.outline import DiagnosisOutline

from benchmarks.rig.collector import Collector, collector
from ddpobs import wire
from scripts.docs_site import metric_reference
from tests.support.server.batches import batch, hello, pulse, put, steps
from tests.support.server.peers import peers


def test_delay_and_waiting_have_the_number_of_steps_they_cover(shared: Collector) -> None:
    put(shared.url, batch("fast", seq=0, steps=steps(0, 40), peers=[peers(30, 39)]))
    put(shared.url, batch("fast", seq=1, steps=steps(40, 40), peers=[peers(60, 79)]))
    text = httpx.get(f"{shared.url}/metrics", params={"only": "runs"}).text
    for rank in (0, 1):
        assert f'ddpobs_compared_steps_total{{rank="{rank}",run="fast"}} 30\n' in text
    assert 'ddpobs_steps_total{rank="0",run="fast"} 80\n' in text
    assert 'ddpobs_rank_delay_seconds_total{rank="1",run="fast"} 9e-08\n' in text
    assert 'ddpobs_comm_wait_seconds_total{rank="0",run="fast"} 9e-08\n' in text
    for rank in (0, 1):
        assert f'ddpobs_comm_moving_seconds_total{{rank="{rank}",run="fast"}} 3e-08\n' in text


def test_a_hang_has_the_ranks_and_their_place_as_labels_until_it_ends(shared: Collector, run: str) -> None:
    def lines(family: str) -> list[str]:
        text = httpx.get(f"{shared.url}/metrics", params={"only": "runs"}).text
        return [line for line in text.splitlines() if line.startswith(f"ddpobs_{family}{{") and f'run="{run}"' in line]

    place = 'dataset.py:31 "x"'
    put(shared.url, batch(run, 0, 0, pulse=pulse("bucket", 12)))
    put(shared.url, batch(run, 0, 1, hello=hello(), pulse=pulse("data", 12, place=place)))
    (hang, *_) = httpx.get(f"{shared.url}/api/v1/runs/{run}/diagnostics").json()["findings"]
    explained = f'remedy="{hang["remedy"]}",run="{run}",where="{hang["where"]}"'
    assert hang["where"].startswith("host ")
    assert lines("run_state") == [f'ddpobs_run_state{{run="{run}",state="hung"}} 1']
    assert lines("hang_info") == [f'ddpobs_hang_info{{place="dataset.py:31 \\"x\\"",ranks="1",{explained}}} 1']
    later = wire.Anchor(wall_ns=10**18, monotonic_ns=1)
    put(shared.url, batch(run, 1, 1, anchor=later, pulse=pulse("code")))
    httpx.get(f"{shared.url}/api/v1/runs/{run}/diagnostics")
    assert lines("hang_info") == []
    assert lines("run_state") == [f'ddpobs_run_state{{run="{run}",state="running"}} 1']


def test_a_hang_of_many_ranks_has_a_short_label(shared: Collector, run: str) -> None:
    for rank in range(12):
        put(shared.url, batch(run, 0, rank, world_size=12, pulse=pulse("data", 12, place="x" * 1000)))
    httpx.get(f"{shared.url}/api/v1/runs/{run}/diagnostics")
    text = httpx.get(f"{shared.url}/metrics", params={"only": "runs"}).text
    labels = f'place="{"x" * 160}",ranks="0, 1, 2, 3, 4, 5, 6, 7 and 4 more"'
    assert re.search(rf'^ddpobs_hang_info\{{{labels},remedy="[^"]+",run="{run}",where=""\}} 1$', text, re.MULTILINE)


def finding(code: str, ranks: list[int], gain: float | None) -> dict[str, Any]:
    return {
        "code": code,
        "verdict": f"{code}: 50 %",
        "severity": "warning",
        "ranks": ranks,
        "phase": "backward" if ranks else None,
        "cause": "",
        "where": "",
        "when": "",
        "remedy": "",
        "evidence": {},
        "gain": gain and {"ratio": gain},
    }


def test_the_most_severe_findings_have_a_series_each_with_rank_phase_and_gain() -> None:
    findings = [finding("straggler", [1], 0.2), finding("straggler", [1], 0.3), finding("unused", [], None)]
    findings += [finding("straggler", list(range(rank, 20)), 0.1) for rank in range(9)]
    run = Mock()
    run.name = "r"
    unknown: dict[str, Any] = {"missing": [], "verdict": "", "summary": "", "goodput": None, "time_shares": {}}
    diagnosis = DiagnosisOutline.of({"findings": findings} | unknown)
    lines = render_present(run, "running", diagnosis)["finding_gain_ratio"].decode().splitlines()
    start, of_r = "ddpobs_finding_gain_ratio", 'run="r",severity="warning"'
    assert lines[0] == f'{start}{{code="straggler",phase="backward",ranks="1",{of_r},title="straggler: 50 %"}} 0.3'
    assert lines[1] == f'{start}{{code="unused",phase="",ranks="",{of_r},title="unused: 50 %"}} 0.0'
    assert 'ranks="0, 1, 2, 3, 4, 5, 6, 7 and 12 more"' in lines[2]
    assert len(lines) == 9  # Of the ten that are considered, two have the same labels.


def test_a_crash_and_a_straggler_have_their_cause_place_and_remedy_as_labels() -> None:
    parts: dict[str, Any] = {"cause": 'ValueError: "x"', "where": "host n1", "remedy": "Correct the error."}
    findings = [finding("crash", [1], None) | parts | {"when": "2026-11-28 23:10:53 UTC"}]
    parts = {
        "cause": "paging (96 % of the delay)",
        "where": "host n2",
        "remedy": "More memory.",
        "when": "steps 1 to 9",
    }
    findings.append(finding("straggler", [2], 0.2) | parts | {"evidence": {"reason": "paging"}})
    run = Mock()
    run.name = "r"
    unknown: dict[str, Any] = {"missing": [], "verdict": "", "summary": "", "goodput": None, "time_shares": {}}
    diagnosis = DiagnosisOutline.of({"findings": findings} | unknown)
    labels = 'cause="ValueError: \\"x\\"",code="crash",ranks="1",remedy="Correct the error.",run="r"'
    labels += ',severity="warning",title="crash: 50 %",when="2026-11-28 23:10:53 UTC",where="host n1"'
    rendered = render_present(run, "failed", diagnosis)
    assert rendered["failure_info"].decode() == f"ddpobs_failure_info{{{labels}}} 1\n"
    labels = (
        'cause="paging",phase="backward",ranks="2",remedy="More memory.",run="r",severity="warning",where="host n2"'
    )
    assert rendered["straggler_info"].decode() == f"ddpobs_straggler_info{{{labels}}} 1\n"


def test_the_addresses_of_page_and_grafana_are_labels(tmp_path: Path) -> None:
    with collector(tmp_path, public_url="https://ddpobs.example/", grafana_url="https://grafana.example") as running:
        text = httpx.get(f"{running.url}/metrics", params={"only": "collector"}).text
    assert 'grafana_url="https://grafana.example",public_url="https://ddpobs.example",' in text


def test_every_metric_of_runs_is_in_the_reference(shared: Collector) -> None:
    text = httpx.get(f"{shared.url}/metrics", params={"only": "runs"}).text
    families = re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \|", metric_reference(), re.MULTILINE) == families
    assert "ddpobs_compared_steps_total" in families
