"""The steps that a diagnosis reads, and its late bucket."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, by_severity
from ddpobs_server.analysis.findings.registry import FINDINGS
from ddpobs_server.analysis.steps.intervals import StepClock
from ddpobs_server.reports import reports as reports_module
from ddpobs_server.reports.diagnosis import Diagnosis
from ddpobs_server.reports.outline import DiagnosisOutline
from ddpobs_server.reports.reports import Reports
from ddpobs_server.store import Store

from benchmarks.rig import patience
from ddpobs import wire
from tests.support.analysis.scenario import MS, Slow, columns, evidence_of, own_times, with_columns
from tests.support.server.report_batches import ATTEMPT, HELLO, RANKS, RUN, batch, fill, ingest, select, spans_of


@pytest.mark.parametrize("slow", [(), (Slow(1, "backward", 60),), (Slow(0, "data", 90, share=0.5),)])
def test_a_diagnosis_equals_the_findings_of_all_columns_together(store: Store, slow: tuple[Slow, ...]) -> None:
    fill(store, 120, slow)
    rank, steps = store.steps(RUN, ATTEMPT)
    hosts, emitted = dict.fromkeys(range(RANKS), "node"), dict.fromkeys(range(RANKS), 100)
    rows = rank == 0
    clock = StepClock(steps.step[rows], steps.start_ns[rows], steps.end_ns[rows])  # The anchor is at 0.
    hellos = dict.fromkeys(range(RANKS), HELLO)
    evidence = evidence_of(rank, steps, hosts=hosts, hellos=hellos, emitted=emitted, clock=clock)
    results = [result for judge in FINDINGS for result in judge(evidence)]
    expected = by_severity([result for result in results if isinstance(result, Finding)])
    findings = Reports(store).diagnostics(RUN, ATTEMPT)["findings"]
    assert [finding["code"] for finding in findings] == [finding.code for finding in expected]
    for actual, finding in zip(findings, expected, strict=True):
        timed = clock.timed_finding(finding)
        assert actual == timed.as_json() | {"buckets": actual["buckets"], "parameters": actual["parameters"]}


def test_the_evidence_has_the_latest_pulses_and_the_collectors_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse = wire.Pulse(at_ns=5, phase="backward", step=7)
    ingest(store, batch(1, 0, pulse=pulse), batch(0, 0))
    inputs: list[Evidence] = []

    def judge(evidence: Evidence) -> Judgement:
        inputs.append(evidence)
        return []

    monkeypatch.setattr("ddpobs_server.reports.diagnosis.FINDINGS", (judge,))
    Diagnosis(store, now_ns=lambda: 42).diagnose(RUN, ATTEMPT)
    assert {rank: (latest.phase, latest.step) for rank, latest in inputs[0].pulses.items()} == {1: ("backward", 7)}
    assert inputs[0].now_ns == 42


def test_a_run_that_is_deleted_during_its_diagnosis_is_no_fault(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 40)
    sources = store.sources

    def read_then_delete(run: str, attempt: str) -> Any:
        rows = sources(run, attempt)
        store.delete(run)
        return rows

    monkeypatch.setattr(store, "sources", read_then_delete)
    assert Diagnosis(store).diagnose(RUN, ATTEMPT)["findings"] == []


def test_a_diagnosis_of_a_long_run_uses_its_latest_steps(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs_server.reports.judged_steps.WHOLE_ROWS", 0)
    monkeypatch.setattr("ddpobs_server.reports.recent_steps.STEPS", 40)
    monkeypatch.setattr("ddpobs_server.reports.recent_steps._MIN_STEPS", 40)
    fill(store, 120, (Slow(1, "data", 60),))
    diagnosis = Reports(store).diagnostics(RUN, ATTEMPT)
    assert diagnosis["steps_seen"] == 120
    assert diagnosis["findings"][0]["steps"] == [80, 119]


def test_a_diagnosis_uses_fewer_steps_if_these_have_too_many_rows(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpobs_server.reports.judged_steps.WHOLE_ROWS", 0)
    monkeypatch.setattr("ddpobs_server.reports.recent_steps._MAX_ROWS", 40 * RANKS)
    fill(store, 120, (Slow(1, "data", 60),))
    first, last = Reports(store).diagnostics(RUN, ATTEMPT)["findings"][0]["steps"]
    assert last == 119
    assert 35 <= last - first + 1 <= 40


def test_steps_with_too_many_rows_are_reported_in_missing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 60, (Slow(1, "data", 60),))
    copies = select(store.steps(RUN, ATTEMPT, 0, 59, 59)[1], np.zeros(500, np.int64))
    later = wire.Steps(**copies.by_name() | {"step": 60 + np.arange(500)})
    ingest(store, batch(0, 2, steps=later))
    monkeypatch.setattr("ddpobs_server.store.queries.column_queries._MAX_BYTES", 50_000)
    diagnosis = Reports(store).diagnostics(RUN, ATTEMPT)
    assert any(reason.startswith("steps: ") for reason in diagnosis["missing"])
    assert diagnosis["findings"] == []


def test_some_ranks_give_the_same_late_bucket_as_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 60, (Slow(2, "backward", 60),))
    buckets = [wire.Bucket(size_bytes=4, dtype="float32", parameters=[wire.Parameter(name=n, size=1)]) for n in "ab"]
    ingest(store, batch(0, 2, layouts=[wire.Layout(module=0, name="m", revision=0, comm="", buckets=buckets)]))
    findings = []
    for ranks in (2, 8):
        monkeypatch.setattr("ddpobs_server.analysis.slow_ranks.bucket.MAX_RANKS", ranks)
        findings.append(Reports(store).diagnostics(RUN, ATTEMPT)["findings"][0])
    named = [(f["ranks"], f["buckets"], f["parameters"], f["evidence"]["module"]) for f in findings]
    assert named == [([2], [0], ["a"], 0)] * 2


@pytest.mark.parametrize(("after_ms", "named"), [(5, []), (-5, ["a"]), (28, ["a"])])
def test_no_bucket_is_named_if_ranks_meet_between_two_buckets(store: Store, after_ms: int, named: list[str]) -> None:
    """The user's collective between two buckets matters; in forward or after the last readiness it does not."""
    fill(store, 60, (Slow(2, "backward", 60),))
    buckets = [wire.Bucket(size_bytes=4, dtype="float32", parameters=[wire.Parameter(name=n, size=1)]) for n in "ab"]
    ingest(store, batch(0, 2, layouts=[wire.Layout(module=0, name="m", revision=0, comm="", buckets=buckets)]))
    for rank in range(RANKS):
        steps = store.steps(RUN, ATTEMPT, rank)[1]
        launched = steps.end_ns - 30 * MS + after_ms * MS
        zeros = np.zeros(len(launched), np.int64)
        kind = zeros + wire.COMM_KINDS.index("user")
        comms = wire.Comms(step=steps.step, module=zeros, kind=kind, launched_ns=launched, done_ns=launched + MS)
        ingest(store, batch(rank, 3, comms=comms))
    finding = Reports(store).diagnostics(RUN, ATTEMPT)["findings"][0]
    assert (finding["code"], finding["ranks"], finding["parameters"]) == ("straggler", [2], named)


def test_the_last_diagnosis_is_returned_while_a_new_one_is_computed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 60, (Slow(2, "data", 60),))
    reports = Reports(store)
    (run,) = store.runs(1)
    assert reports.last_diagnosis(run) == (None, False)
    first = reports.diagnostics(RUN, ATTEMPT)
    ingest(store, batch(0, 2))
    (run,) = store.runs(1)
    read_steps, has_begun, may_continue = store.steps, threading.Event(), threading.Event()

    def read_slowly(*arguments: Any) -> Any:
        has_begun.set()
        assert may_continue.wait(60)
        return read_steps(*arguments)

    monkeypatch.setattr(store, "steps", read_slowly)
    assert reports.recent_diagnostics([run]) == [DiagnosisOutline.of(first)]
    assert has_begun.wait(60)
    assert reports.last_diagnosis(run) == (DiagnosisOutline.of(first), False)
    may_continue.set()
    deadline = time.monotonic() + patience.HANG_S
    while not reports.last_diagnosis(run)[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    reports.close()
    assert reports.last_diagnosis(run)[1]


def test_runs_beyond_the_kept_diagnoses_are_not_diagnosed_at_each_scrape(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports_module, "_CACHED", 2)
    names = [f"run-{number}" for number in range(5)]
    goodbye = batch(0, 0, events=[wire.Event(kind="goodbye", at_ns=0)])
    ingest(store, *(msgspec.structs.replace(goodbye, run=name, world_size=1) for name in names))
    reports = Reports(store)
    diagnose = Mock(side_effect=reports._diagnosis.diagnose)
    monkeypatch.setattr(reports._diagnosis, "diagnose", diagnose)
    runs = store.runs(10)
    for _ in range(3):
        patience.until(lambda: None not in reports.recent_diagnostics(runs))
    reports.close()
    assert sorted(call.args[0] for call in diagnose.mock_calls) == names


@pytest.mark.parametrize(("turns", "every", "ms"), [(True, 2, 60), (False, 3, 60), (False, 10, 300)])
def test_the_late_bucket_is_in_the_module_that_is_slow_in_the_late_steps(
    store: Store, turns: bool, every: int, ms: int
) -> None:
    """Two modules take turns and only the first is slow; or one module is slow in a part of the steps."""
    own = own_times(240, RANKS, seed=1)
    own[::every, 1, wire.OWN_PHASES.index("backward")] += ms * MS
    rank, steps = columns(own)
    ready = steps.end_ns - steps.exposed_comm_ns
    ready = np.stack([ready - 10 * MS, ready], axis=1).reshape(-1)
    spans = with_columns(spans_of(steps), ready_ns=ready, launched_ns=ready, done_ns=np.repeat(steps.end_ns, 2))
    spans = with_columns(spans, module=spans.step % 2 if turns else spans.module)
    layouts = []
    for module in range(2):
        parameter_lists = [[wire.Parameter(name=f"{module}.{bucket}", size=1)] for bucket in range(2)]
        buckets = [wire.Bucket(size_bytes=4, dtype="float32", parameters=parameters) for parameters in parameter_lists]
        layouts.append(wire.Layout(module=module, name="m", revision=0, comm="", buckets=buckets))
    for number in range(RANKS):
        rank_spans = with_columns(
            spans, **{name: getattr(spans, name)[np.repeat(rank, 2) == number] for name in spans.names}
        )
        rank_steps = select(steps, np.flatnonzero(rank == number))
        ingest(store, batch(number, 0, steps=rank_steps, spans=rank_spans, layouts=layouts))
    (finding,) = (f for f in Reports(store).diagnostics(RUN, ATTEMPT)["findings"] if f["code"] == "straggler")
    assert (finding["ranks"], finding["buckets"], finding["parameters"]) == ([1], [0], ["0.0"])
    assert finding["evidence"]["module"] == 0
