"""Reports over a real store: batches of ranks in, findings and tables out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.analysis.trace.events import ALL_RANKS
from ddpobs_server.reports.columns import RunColumns
from ddpobs_server.reports.diagnosis import Diagnosis
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.timeline import RunTimeline
from ddpobs_server.store import Store, UnavailableError

from ddpobs import wire
from tests.support.analysis.scenario import MS, Slow, columns, own_times, with_columns
from tests.support.server.report_batches import ATTEMPT, RANKS, RUN, batch, fill, ingest, select, spans_of

HOUR = 3_600_000 * MS
MB = 10**6


def fill_parted(store: Store, count: int, behind: int) -> None:
    """Two ranks; the second had fewer inputs before, so its step numbers are behind the collectives' numbers."""
    rank, steps = columns(own_times(count, 2, seed=1))
    first, second = select(steps, np.flatnonzero(rank == 0)), select(steps, np.flatnonzero(rank == 1)[behind:])
    second = with_columns(second, step=second.step - behind)
    for number, rank_steps in enumerate((first, second)):
        ingest(store, batch(number, 0, steps=rank_steps, spans=spans_of(rank_steps)))


def traced(store: Store, first: int, last: int) -> list[Any]:
    events: list[Any] = msgspec.to_builtins([*RunTimeline(store, RUN, ATTEMPT).trace(first, last)["traceEvents"]])
    return events


def test_the_slow_rank_is_named_from_stored_batches(store: Store) -> None:
    fill(store, 60, (Slow(2, "data", 60),))
    diagnosis = Reports(store).diagnostics(RUN, ATTEMPT)
    assert (diagnosis["run"], diagnosis["attempt"], diagnosis["steps_seen"]) == (RUN, ATTEMPT, 60)
    straggler = next(f for f in diagnosis["findings"] if f["code"] == "straggler")
    assert (straggler["ranks"], straggler["phase"], straggler["evidence"]["host"]) == ([2], "data", "node")
    fields = "code severity title verdict measure when cause where remedy gain "
    fields += "ranks buckets parameters phase steps evidence evidence_sentences intervals"
    assert set(straggler) == set(fields.split())
    assert set(straggler["gain"]) == {"step_ns", "ratio", "error_ratio", "whole", "run_ns", "text"}


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
    summaries = list(table["per_rank"])
    slowest = summaries[0]
    assert slowest["last_share"] > 0.9
    assert max(slowest["excess_ns"], key=slowest["excess_ns"].get) == "backward"
    assert sum(rank["last_share"] for rank in summaries) == pytest.approx(1, abs=1e-3)


def test_a_single_rank_has_no_excess(store: Store) -> None:
    rank_steps = columns(own_times(20, 1, seed=1))[1]
    ingest(store, batch(0, 0, steps=rank_steps))
    table = RunColumns(store, RUN, ATTEMPT).stragglers(None, None)
    assert np.array(table["own_ns"]).min() > 0
    assert table["excess_ns"].tolist() == [[0]] * len(table["steps"])


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


def test_marks_wait_for_the_diagnosis_that_is_computed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 10)
    reports, diagnose = Reports(store, now_ns=lambda: 2), Diagnosis.diagnose
    begun, may_continue = threading.Semaphore(0), threading.Event()

    def slowly(*arguments: Any, **named: Any) -> Any:
        begun.release()
        assert may_continue.wait(60)
        return diagnose(*arguments, **named)

    monkeypatch.setattr(Diagnosis, "diagnose", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reports.diagnostics, RUN, ATTEMPT)
        assert begun.acquire(timeout=60)
        ingest(store, batch(0, 2, events=[wire.Event(kind="anything", at_ns=0)]))
        marks = pool.submit(reports.diagnostics_for_marks, RUN, ATTEMPT)
        assert not begun.acquire(timeout=0.5)
        may_continue.set()
        assert marks.result(60) is first.result(60)


def test_the_model_of_a_live_run_is_kept_for_half_a_minute(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 60)
    now_ns = [2]
    reports = Reports(store, now_ns=lambda: now_ns[0])
    assert reports.whatif(RUN, ATTEMPT, [])["missing"] == ["no layout of buckets is recorded"]
    parameters = [wire.Parameter(name="weight", size=MB)]
    buckets = [wire.Bucket(size_bytes=size, dtype="float32", parameters=parameters) for size in (4 * MB, MB)]
    ingest(
        store, batch(0, 2, layouts=[wire.Layout(module=0, name="m", revision=0, comm="all_reduce", buckets=buckets)])
    )
    present = reports.whatif(RUN, ATTEMPT, [])["now"]
    assert present["bucket_bytes"] == [4 * MB, MB]

    def fail(*_: Any) -> Any:
        raise UnavailableError("the database is gone", full=False)

    monkeypatch.setattr(store, "steps", fail)
    ingest(store, batch(0, 3, events=[wire.Event(kind="anything", at_ns=0)]))
    assert reports.whatif(RUN, ATTEMPT, [])["now"] == present
    now_ns[0] = 35_000 * MS
    with pytest.raises(UnavailableError):
        reports.whatif(RUN, ATTEMPT, [])
