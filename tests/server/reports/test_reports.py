"""Reports over a real store: batches of ranks in, findings and tables out."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, by_severity
from ddpobs_server.analysis.findings.registry import FINDINGS
from ddpobs_server.analysis.steps.intervals import StepClock
from ddpobs_server.analysis.trace.events import ALL_RANKS
from ddpobs_server.reports.columns import RunColumns
from ddpobs_server.reports.diagnosis import Diagnosis
from ddpobs_server.reports.recent_steps import read_recent_steps
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.timeline import RunTimeline
from ddpobs_server.store import Store

from benchmarks.rig import patience
from ddpobs import wire
from tests.support.analysis.scenario import MS, Slow, columns, evidence_of, own_times, with_columns
from tests.support.columns import make_spans
from tests.support.server.report_batches import ATTEMPT, RANKS, RUN, batch, ingest

HOUR = 3_600_000 * MS


def select(rows: wire.Steps, keep: wire.Ints) -> wire.Steps:
    return wire.Steps(**{name: getattr(rows, name)[keep] for name in rows.names})


def spans_of(steps: wire.Steps) -> wire.Spans:
    """Two buckets a step: the first half-way through backward, the last ends with the step."""
    ready = np.stack([steps.end_ns - 30 * MS, steps.end_ns - 3 * MS], axis=1).reshape(-1)
    done = np.stack([steps.end_ns - 20 * MS, steps.end_ns], axis=1).reshape(-1)
    return make_spans(
        step=np.repeat(steps.step, 2),
        bucket=np.tile([0, 1], len(steps.step)),
        ready_ns=ready,
        launched_ns=ready,
        started_ns=wire.UNKNOWN,
        done_ns=done,
    )


def fill(store: Store, count: int, slow: tuple[Slow, ...] = ()) -> None:
    """Every rank sends its steps in two batches, the later ranks' first."""
    rank, steps = columns(own_times(count, RANKS, seed=1, slow=slow))
    hello = wire.Hello(host="node", pid=1, device="cpu", backend="gloo", versions={}, settings={})
    for number in reversed(range(RANKS)):
        rows = np.flatnonzero(rank == number)
        first, second = (select(steps, part) for part in np.array_split(rows, 2))
        ingest(store, batch(number, 0, hello=hello, steps=first, spans=spans_of(first)))
        ingest(store, batch(number, 1, steps=second, spans=spans_of(second)))


def fill_parted(store: Store, count: int, behind: int) -> None:
    """Two ranks; the second had fewer inputs before, so its step numbers are behind the collectives' numbers."""
    rank, steps = columns(own_times(count, 2, seed=1))
    first, second = select(steps, np.flatnonzero(rank == 0)), select(steps, np.flatnonzero(rank == 1)[behind:])
    second = with_columns(second, step=second.step - behind)
    for number, rank_steps in enumerate((first, second)):
        ingest(store, batch(number, 0, steps=rank_steps, spans=spans_of(rank_steps)))


def traced(store: Store, first: int, last: int) -> list[Any]:
    events: list[Any] = msgspec.to_builtins(RunTimeline(store, RUN, ATTEMPT).trace(first, last)["traceEvents"])
    return events


def test_the_slow_rank_is_named_from_stored_batches(store: Store) -> None:
    fill(store, 60, (Slow(2, "data", 60),))
    diagnosis = Reports(store).diagnostics(RUN, ATTEMPT)
    assert (diagnosis["run"], diagnosis["attempt"], diagnosis["steps_seen"]) == (RUN, ATTEMPT, 60)
    straggler = next(f for f in diagnosis["findings"] if f["code"] == "straggler")
    assert (straggler["ranks"], straggler["phase"], straggler["evidence"]["host"]) == ([2], "data", "node")
    fields = "code severity title verdict measure when cause where remedy gain "
    fields += "ranks buckets parameters phase steps evidence intervals"
    assert set(straggler) == set(fields.split())
    assert set(straggler["gain"]) == {"step_ns", "ratio", "error_ratio", "whole", "text"}


def test_a_balanced_run_has_no_findings_and_nothing_missing(store: Store) -> None:
    fill(store, 60)
    diagnosis = Reports(store).diagnostics(RUN, ATTEMPT)
    assert (diagnosis["findings"], diagnosis["missing"]) == ([], [])


def test_too_few_steps_are_reported_in_missing(store: Store) -> None:
    fill(store, 10)
    diagnosis = Reports(store).diagnostics(RUN, ATTEMPT)
    assert diagnosis["findings"] == []
    not_judged = {"straggler", "comm-bound", "input-bound", "other-bound", "processor-bound"}
    not_judged |= {"scaling-loss", "utilisation-swings"}
    assert {reason.split(":")[0] for reason in diagnosis["missing"]} == not_judged


def test_a_run_without_steps_is_not_judged(store: Store) -> None:
    ingest(store, batch(0, 0))
    diagnosis = Reports(store).diagnostics(RUN, ATTEMPT)
    assert (diagnosis["findings"], diagnosis["steps_seen"]) == ([], 0)
    assert any(reason.startswith("straggler") for reason in diagnosis["missing"])
    assert RunColumns(store, RUN, ATTEMPT).stragglers(None, None)["steps"] == []


def test_the_straggler_table_has_a_row_per_step_and_a_column_per_rank(store: Store) -> None:
    fill(store, 60, (Slow(0, "backward", 60),))
    table = RunColumns(store, RUN, ATTEMPT).stragglers(10, 29)
    assert table["steps"] == list(range(10, 30))
    assert table["ranks"] == [0, 1, 2]
    assert np.array(table["own_ns"]).shape == (20, RANKS)
    own, excess = np.array(table["own_ns"]), np.array(table["excess_ns"])
    assert (np.abs(excess[:, 0] - own[:, 0] + np.median(own[:, 1:], axis=1)) < 2).all()
    assert len(table["delay_ns"]) == len(table["last_rank"]) == 20
    slowest = table["per_rank"][0]
    assert slowest["last_share"] > 0.9
    assert max(slowest["excess_ns"], key=slowest["excess_ns"].get) == "backward"
    assert sum(rank["last_share"] for rank in table["per_rank"]) == pytest.approx(1, abs=1e-3)


def test_a_single_rank_has_no_excess(store: Store) -> None:
    rank_steps = columns(own_times(20, 1, seed=1))[1]
    ingest(store, batch(0, 0, steps=rank_steps))
    table = RunColumns(store, RUN, ATTEMPT).stragglers(None, None)
    assert np.array(table["own_ns"]).min() > 0
    assert table["excess_ns"] == [[0]] * len(table["steps"])


def test_spans_of_one_rank_come_aligned_with_all_ranks(store: Store) -> None:
    fill(store, 40)
    rank_spans = RunTimeline(store, RUN, ATTEMPT).aligned_spans(2, 5, 6)
    assert set(rank_spans["rank"].tolist()) == {2}
    assert rank_spans["step"].tolist() == [5, 5, 6, 6]
    assert np.abs(rank_spans["done_ns"] - rank_spans["aligned_done_ns"] - 2 * HOUR).max() == 0
    assert len(RunTimeline(store, RUN, ATTEMPT).aligned_spans(None, 5, 6, module=1)["step"]) == 0


def test_the_trace_holds_the_requested_steps_of_every_rank(store: Store) -> None:
    fill(store, 40)
    events = traced(store, 3, 4)
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {3, 4}
    assert {e["pid"] for e in events if e["ph"] != "C"} == {0, 1, 2, ALL_RANKS}


@pytest.mark.parametrize("behind", [1, 6])
def test_a_step_is_aligned_like_all_steps_if_the_ranks_numbers_have_parted(store: Store, behind: int) -> None:
    fill_parted(store, 40, behind)
    for first, last in ((None, None), (20, 20), (behind, behind)):
        spans = RunTimeline(store, RUN, ATTEMPT).aligned_spans(None, first, last)
        assert set((spans["done_ns"] - spans["aligned_done_ns"])[spans["rank"] == 1].tolist()) == {HOUR}
        if first is not None:
            assert set(spans["step"].tolist()) == {first}


def test_a_trace_of_a_step_is_on_one_clock_if_the_ranks_numbers_have_parted(store: Store) -> None:
    fill_parted(store, 40, 1)
    ends = {
        step: [e["ts"] + e["dur"] for e in traced(store, step, step) if e["name"] == "bucket 1"] for step in (20, 21)
    }
    steps = store.steps(RUN, ATTEMPT, 0, 21, 21)[1]
    for times in ends.values():
        assert len(times) == 2
    # Rank 1's step 20 is rank 0's step 21, and ends with it.
    assert ends[20][1] - ends[20][0] == pytest.approx(float(steps.end_ns[0] - steps.start_ns[0]) / 1e3)


def test_a_step_is_returned_if_ranks_have_parted_too_far_to_align(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_parted(store, 40, 6)
    monkeypatch.setattr("ddpobs_server.reports.timeline._CLOCK_ROWS", 10)
    assert RunTimeline(store, RUN, ATTEMPT).aligned_spans(None, 20, 20)["step"].tolist() == [20] * 4


def test_an_answer_is_cached_until_the_next_commit(store: Store) -> None:
    fill(store, 10)
    reports = Reports(store)
    first = reports.diagnostics(RUN, ATTEMPT)
    assert reports.diagnostics(RUN, ATTEMPT) is first
    event = wire.Event(kind="anything", at_ns=0)
    ingest(store, batch(0, 2, events=[event]))
    assert reports.diagnostics(RUN, ATTEMPT) is not first


def test_marks_use_the_diagnosis_of_the_last_half_minute_while_a_run_is_live(store: Store) -> None:
    fill(store, 10)
    now_ns = [2]
    reports = Reports(store, now_ns=lambda: now_ns[0])
    first = reports.diagnostics_for_marks(RUN, ATTEMPT)
    event = wire.Event(kind="anything", at_ns=0)
    ingest(store, batch(0, 2, events=[event]))
    now_ns[0] = 20_000 * MS
    assert reports.diagnostics_for_marks(RUN, ATTEMPT) is first
    now_ns[0] = 35_000 * MS
    assert reports.diagnostics_for_marks(RUN, ATTEMPT) is not first
    is_over = [wire.Event(kind="goodbye", at_ns=0)]
    ingest(store, *(batch(rank, 3, events=is_over) for rank in range(RANKS)))
    assert reports.diagnostics_for_marks(RUN, ATTEMPT) is reports.diagnostics(RUN, ATTEMPT)


def test_ranks_that_have_not_reported_are_missing(store: Store) -> None:
    rank, steps = columns(own_times(60, 2, seed=1))
    for number in range(2):
        ingest(store, batch(number, 0, steps=select(steps, np.flatnonzero(rank == number))))
    assert any("rank 2" in reason for reason in Reports(store).diagnostics(RUN, ATTEMPT)["missing"])


def slow_third(store: Store, count: int, *, ends: int | None = None, fewer: float = 0.0, **settings: int) -> None:
    """Three ranks, the last 60 ms slow; its telemetry ends early, or it has fewer inputs in each 100 steps."""
    rank, steps = columns(own_times(count, RANKS, seed=1, slow=(Slow(2, "backward", 60),)))
    inputs, ends = round(100 * (1 - fewer)), count if ends is None else ends
    recorded = (rank != 2) | ((steps.step % 100 < inputs) & (steps.step < ends))
    own = np.where(rank == 2, steps.step // 100 * inputs + steps.step % 100, steps.step)
    steps = with_columns(steps, step=own)
    hello = wire.Hello(host="node", pid=1, device="cpu", backend="gloo", versions={}, settings=dict(settings))
    for number in range(RANKS):
        for seq, rows in enumerate(np.array_split(np.flatnonzero(recorded & (rank == number)), 10)):
            if len(rows):
                rank_steps = select(steps, rows)
                received_ns = int(rank_steps.collective[-1]) * 10**8
                sent_batch = batch(number, seq, steps=rank_steps, hello=hello if seq == 0 else None)
                ingest(store, sent_batch, received_ns=received_ns)


def judged(store: Store) -> tuple[dict[str, Any], dict[str, str]]:
    """Return findings by code, and the joined reasons of missing answers by code."""
    diagnosis = Reports(store).diagnostics(RUN, ATTEMPT)
    missing: dict[str, str] = {}
    for text in diagnosis["missing"]:
        code, _, reason = text.partition(": ")
        missing[code] = missing.get(code, "") + reason
    return {finding["code"]: finding for finding in diagnosis["findings"]}, missing


@pytest.mark.parametrize(
    ("ends", "reason"), [(0, "no batch has arrived from rank 2"), (100, "no recent step has arrived from rank 2")]
)
def test_waiting_for_a_silent_rank_is_not_reported_as_moving_bytes(store: Store, ends: int, reason: str) -> None:
    slow_third(store, 300, ends=ends)
    findings, missing = judged(store)
    assert set(findings) == {"comm-bound"}
    assert findings["comm-bound"]["severity"] == "info"
    assert "rank 2" in findings["comm-bound"]["remedy"]
    assert reason in missing["straggler"]
    assert "rank 2" in missing["comm-bound"]
    assert RunColumns(store, RUN, ATTEMPT).stragglers(None, None)["ranks"] == [0, 1]


def test_a_rank_whose_batch_is_still_to_come_is_compared(store: Store) -> None:
    """Ranks send batches at different times, and a batch holds many fast steps."""
    rank, steps = columns(own_times(300, RANKS, seed=1, slow=(Slow(2, "backward", 60),)))
    for number in range(RANKS):
        rows = np.flatnonzero((rank == number) & (steps.step < (100 if number == 2 else 300)))
        ingest(store, batch(number, 0, steps=select(steps, rows)), received_ns=(5 if number == 2 else 10) * 10**9)
    findings, missing = judged(store)
    assert findings["straggler"]["ranks"] == [2]
    assert missing == {}


def test_a_rank_that_has_only_sent_a_hello_has_no_step_yet(store: Store) -> None:
    slow_third(store, 60, ends=0)
    hello = wire.Hello(host="node", pid=1, device="cpu", backend="gloo", versions={}, settings={})
    ingest(store, batch(2, 0, hello=hello))
    assert judged(store)[1]["straggler"] == "no step has ended on rank 2"


def test_ranks_are_compared_if_uneven_inputs_part_their_numbers_beyond_the_window(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpobs_server.reports.judged_steps.WHOLE_ROWS", 0)
    monkeypatch.setattr("ddpobs_server.reports.recent_steps.STEPS", 200)
    monkeypatch.setattr("ddpobs_server.reports.recent_steps._MIN_STEPS", 200)
    slow_third(store, 1500, fewer=0.2)
    findings, missing = judged(store)
    assert (findings["straggler"]["ranks"], findings["straggler"]["severity"]) == ([2], "critical")
    assert "comm-bound" not in findings, "waiting is the straggler's"
    assert missing == {}
    rank, steps = read_recent_steps(store, RUN, ATTEMPT, store.sources(RUN, ATTEMPT))
    assert np.bincount(rank).tolist() == [200] * RANKS
    assert (np.lexsort((rank, steps.step)) == np.arange(len(rank))).all()


def test_ranks_of_different_process_groups_are_not_compared(store: Store) -> None:
    slow_third(store, 60, group_ranks=2)
    findings, missing = judged(store)
    assert "straggler" not in findings
    assert "2 of 3 ranks" in missing["straggler"]
    assert findings["comm-bound"]["evidence"]["waiting_ns"] is None


def test_ranks_of_the_one_process_group_are_compared(store: Store) -> None:
    slow_third(store, 60, group_ranks=3)
    assert judged(store)[0]["straggler"]["ranks"] == [2]


@pytest.mark.parametrize("slow", [(), (Slow(1, "backward", 60),), (Slow(0, "data", 90, share=0.5),)])
def test_a_diagnosis_equals_the_findings_of_all_columns_together(store: Store, slow: tuple[Slow, ...]) -> None:
    fill(store, 120, slow)
    rank, steps = store.steps(RUN, ATTEMPT)
    hosts, emitted = dict.fromkeys(range(RANKS), "node"), dict.fromkeys(range(RANKS), 100)
    rows = rank == 0
    clock = StepClock(steps.step[rows], steps.start_ns[rows], steps.end_ns[rows])  # The anchor is at 0.
    evidence = evidence_of(rank, steps, hosts=hosts, emitted=emitted, clock=clock)
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
    ingest(store, batch(0, 2, steps=copies))
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
    assert reports.recent_diagnostics([run])[0] is first
    assert has_begun.wait(60)
    assert reports.last_diagnosis(run) == (first, False)
    may_continue.set()
    deadline = time.monotonic() + patience.HANG_S
    while not reports.last_diagnosis(run)[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    reports.close()
    assert reports.last_diagnosis(run)[1]


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
