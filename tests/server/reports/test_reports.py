"""Reports over a real store: batches as ranks send them in, findings and tables out."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import NotJudged, by_severity
from ddpobs_server.analysis.findings.registry import CATALOGUE
from ddpobs_server.analysis.findings.straggler import straggler_findings
from ddpobs_server.analysis.joined_steps import join
from ddpobs_server.reports.diagnosis import Diagnosis
from ddpobs_server.reports.reports import Reports
from ddpobs_server.store import Arrival, Store

from ddpobs import wire
from tests.columns import make_spans
from tests.server.analysis.scenario import MS, Slow, changed, columns, own_times

RUN, ATTEMPT = "a-run", "0123456789abcdef"
RANKS = 3
HOUR = 3_600_000 * MS


def batch(rank: int, seq: int, **records: object) -> wire.Batch:
    return wire.Batch(
        version=wire.VERSION,
        run=RUN,
        attempt=ATTEMPT,
        source=f"{rank:016x}",
        seq=seq,
        rank=rank,
        world_size=RANKS,
        emitted=100,
        dropped=0,
        anchor=wire.Anchor(wall_ns=0, monotonic_ns=0),
        **records,  # type: ignore[arg-type]
    )


def ingest(store: Store, *batches: wire.Batch, received_ns: int = 1) -> None:
    arrivals = []
    for one in batches:
        body = wire.encode(one)
        arrivals.append(Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), received_ns))
    store.ingest(arrivals)


def half(rows: wire.Steps, keep: wire.Ints) -> wire.Steps:
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
    for one in reversed(range(RANKS)):
        rows = np.flatnonzero(rank == one)
        first, second = (half(steps, part) for part in np.array_split(rows, 2))
        ingest(store, batch(one, 0, hello=hello, steps=first, spans=spans_of(first)))
        ingest(store, batch(one, 1, steps=second, spans=spans_of(second)))


def fill_parted(store: Store, count: int, behind: int) -> None:
    """Two ranks, of which the second had so many inputs fewer before: its own numbers are behind the collectives'."""
    rank, steps = columns(own_times(count, 2, seed=1))
    first, second = half(steps, np.flatnonzero(rank == 0)), half(steps, np.flatnonzero(rank == 1)[behind:])
    second = changed(second, step=second.step - behind)
    for one, sent in enumerate((first, second)):
        ingest(store, batch(one, 0, steps=sent, spans=spans_of(sent)))


def traced(store: Store, first: int, last: int) -> list[Any]:
    events: list[Any] = msgspec.to_builtins(Reports(store).trace(RUN, ATTEMPT, first, last)["traceEvents"])
    return events


def test_the_slow_rank_is_named_from_what_the_store_holds(store: Store) -> None:
    fill(store, 60, (Slow(2, "data", 60),))
    told = Reports(store).diagnostics(RUN, ATTEMPT)
    assert (told["run"], told["attempt"], told["steps_seen"]) == (RUN, ATTEMPT, 60)
    straggler = next(f for f in told["findings"] if f["code"] == "straggler")
    assert (straggler["ranks"], straggler["phase"], straggler["evidence"]["host"]) == ([2], "data", "node")
    fields = "code severity title ranks buckets parameters phase steps evidence remedy gain"
    assert set(straggler) == set(fields.split())
    assert set(straggler["gain"]) == {"step_ns", "ratio", "error_ratio"}


def test_a_balanced_run_has_no_findings_and_misses_nothing(store: Store) -> None:
    fill(store, 60)
    told = Reports(store).diagnostics(RUN, ATTEMPT)
    assert (told["findings"], told["missing"]) == ([], [])


def test_too_few_steps_are_said_in_missing(store: Store) -> None:
    fill(store, 10)
    told = Reports(store).diagnostics(RUN, ATTEMPT)
    assert told["findings"] == []
    assert {what.split(":")[0] for what in told["missing"]} == {"straggler", "comm-bound", "input-bound"}


def test_a_run_without_steps_is_judged_on_nothing(store: Store) -> None:
    ingest(store, batch(0, 0))
    told = Reports(store).diagnostics(RUN, ATTEMPT)
    assert (told["findings"], told["steps_seen"]) == ([], 0)
    assert any(what.startswith("straggler") for what in told["missing"])
    assert Reports(store).stragglers(RUN, ATTEMPT, None, None)["steps"] == []


def test_the_straggler_table_has_a_row_a_step_and_a_column_a_rank(store: Store) -> None:
    fill(store, 60, (Slow(0, "backward", 60),))
    told = Reports(store).stragglers(RUN, ATTEMPT, 10, 29)
    assert told["steps"] == list(range(10, 30))
    assert told["ranks"] == [0, 1, 2]
    assert np.array(told["own_ns"]).shape == (20, RANKS)
    own, excess = np.array(told["own_ns"]), np.array(told["excess_ns"])
    assert (np.abs(excess[:, 0] - own[:, 0] + np.median(own[:, 1:], axis=1)) < 2).all()
    assert len(told["delay_ns"]) == len(told["last_rank"]) == 20
    slowest = told["per_rank"][0]
    assert slowest["last_share"] > 0.9
    assert max(slowest["excess_ns"], key=slowest["excess_ns"].get) == "backward"
    assert sum(rank["last_share"] for rank in told["per_rank"]) == pytest.approx(1, abs=1e-3)


def test_a_rank_alone_exceeds_nobody(store: Store) -> None:
    sent = columns(own_times(20, 1, seed=1))[1]
    ingest(store, batch(0, 0, steps=sent))
    told = Reports(store).stragglers(RUN, ATTEMPT, None, None)
    assert np.array(told["own_ns"]).min() > 0
    assert told["excess_ns"] == [[0]] * len(told["steps"])


def test_spans_of_one_rank_come_aligned_with_all_ranks(store: Store) -> None:
    fill(store, 40)
    one = Reports(store).aligned_spans(RUN, ATTEMPT, 2, 5, 6)
    assert set(one["rank"].tolist()) == {2}
    assert one["step"].tolist() == [5, 5, 6, 6]
    assert np.abs(one["done_ns"] - one["aligned_done_ns"] - 2 * HOUR).max() == 0
    assert len(Reports(store).aligned_spans(RUN, ATTEMPT, None, 5, 6, module=1)["step"]) == 0


def test_the_trace_holds_the_steps_asked_for_of_every_rank(store: Store) -> None:
    fill(store, 40)
    events = traced(store, 3, 4)
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {3, 4}
    assert {e["pid"] for e in events} == {0, 1, 2}


@pytest.mark.parametrize("behind", [1, 6])
def test_a_step_is_aligned_as_all_steps_are_where_the_ranks_numbers_have_parted(store: Store, behind: int) -> None:
    fill_parted(store, 40, behind)
    reports = Reports(store)
    for first, last in ((None, None), (20, 20), (behind, behind)):
        told = reports.aligned_spans(RUN, ATTEMPT, None, first, last)
        assert set((told["done_ns"] - told["aligned_done_ns"])[told["rank"] == 1].tolist()) == {HOUR}
        if first is not None:
            assert set(told["step"].tolist()) == {first}


def test_a_trace_of_a_step_is_on_one_clock_where_the_ranks_numbers_have_parted(store: Store) -> None:
    fill_parted(store, 40, 1)
    ends = {
        step: [e["ts"] + e["dur"] for e in traced(store, step, step) if e["name"] == "bucket 1"] for step in (20, 21)
    }
    steps = store.steps(RUN, ATTEMPT, 0, 21, 21)[1]
    for told in ends.values():
        assert len(told) == 2
    # Rank 1's step 20 is rank 0's step 21, and ends with it.
    assert ends[20][1] - ends[20][0] == pytest.approx(float(steps.end_ns[0] - steps.start_ns[0]) / 1e3)


def test_a_step_is_given_where_ranks_have_parted_further_than_is_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_parted(store, 40, 6)
    monkeypatch.setattr("ddpobs_server.reports.reports._CLOCK_ROWS", 10)
    assert Reports(store).aligned_spans(RUN, ATTEMPT, None, 20, 20)["step"].tolist() == [20] * 4


def test_an_answer_is_kept_until_the_run_is_written_to(store: Store) -> None:
    fill(store, 10)
    reports = Reports(store)
    before = reports.diagnostics(RUN, ATTEMPT)
    assert reports.diagnostics(RUN, ATTEMPT) is before
    event = wire.Event(kind="anything", at_ns=0)
    ingest(store, batch(0, 2, events=[event]))
    assert reports.diagnostics(RUN, ATTEMPT) is not before


def test_ranks_that_have_not_reported_are_said(store: Store) -> None:
    rank, steps = columns(own_times(60, 2, seed=1))
    for one in range(2):
        ingest(store, batch(one, 0, steps=half(steps, np.flatnonzero(rank == one))))
    assert any("2" in what for what in Reports(store).diagnostics(RUN, ATTEMPT)["missing"])


def slow_third(store: Store, count: int, *, ends: int | None = None, fewer: float = 0.0, **settings: int) -> None:
    """Three ranks, the last 60 ms slow; its telemetry ends early, or it has a share fewer inputs in each 100 steps."""
    rank, steps = columns(own_times(count, RANKS, seed=1, slow=(Slow(2, "backward", 60),)))
    inputs, ends = round(100 * (1 - fewer)), count if ends is None else ends
    told = (rank != 2) | ((steps.step % 100 < inputs) & (steps.step < ends))
    own = np.where(rank == 2, steps.step // 100 * inputs + steps.step % 100, steps.step)
    steps = changed(steps, step=own)
    hello = wire.Hello(host="node", pid=1, device="cpu", backend="gloo", versions={}, settings=dict(settings))
    for one in range(RANKS):
        for seq, rows in enumerate(np.array_split(np.flatnonzero(told & (rank == one)), 10)):
            if len(rows):
                sent = half(steps, rows)
                told_at_ns = int(sent.collective[-1]) * 10**8
                ingest(store, batch(one, seq, steps=sent, hello=hello if seq == 0 else None), received_ns=told_at_ns)


def judged(store: Store) -> tuple[dict[str, Any], dict[str, str]]:
    """Findings by code, and what is missing by code, joined."""
    told = Reports(store).diagnostics(RUN, ATTEMPT)
    missing: dict[str, str] = {}
    for what in told["missing"]:
        code, _, reason = what.partition(": ")
        missing[code] = missing.get(code, "") + reason
    return {finding["code"]: finding for finding in told["findings"]}, missing


@pytest.mark.parametrize(("ends", "said"), [(0, "nothing was heard of rank 2"), (100, "heard lately of rank 2")])
def test_waiting_for_a_rank_that_is_silent_is_not_told_as_moving_bytes(store: Store, ends: int, said: str) -> None:
    slow_third(store, 300, ends=ends)
    found, missing = judged(store)
    assert set(found) == {"comm-bound"}
    assert found["comm-bound"]["severity"] == "info"
    assert "rank 2" in found["comm-bound"]["remedy"]
    assert said in missing["straggler"]
    assert "rank 2" in missing["comm-bound"]
    assert Reports(store).stragglers(RUN, ATTEMPT, None, None)["ranks"] == [0, 1]


def test_a_rank_whose_batch_is_still_to_come_is_compared(store: Store) -> None:
    """Ranks send theirs at different times, and of fast steps one holds many."""
    rank, steps = columns(own_times(300, RANKS, seed=1, slow=(Slow(2, "backward", 60),)))
    for one in range(RANKS):
        rows = np.flatnonzero((rank == one) & (steps.step < (100 if one == 2 else 300)))
        ingest(store, batch(one, 0, steps=half(steps, rows)), received_ns=(5 if one == 2 else 10) * 10**9)
    found, missing = judged(store)
    assert found["straggler"]["ranks"] == [2]
    assert missing == {}


def test_a_rank_that_has_only_said_hello_has_no_step_yet(store: Store) -> None:
    slow_third(store, 60, ends=0)
    hello = wire.Hello(host="node", pid=1, device="cpu", backend="gloo", versions={}, settings={})
    ingest(store, batch(2, 0, hello=hello))
    assert judged(store)[1]["straggler"] == "no step has ended on rank 2"


def test_ranks_are_compared_where_uneven_inputs_part_their_numbers_beyond_the_window(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpobs_server.reports.diagnosis._STEPS", 200)
    monkeypatch.setattr("ddpobs_server.reports.diagnosis._FEWEST_STEPS", 200)
    slow_third(store, 1500, fewer=0.2)
    found, missing = judged(store)
    assert (found["straggler"]["ranks"], found["straggler"]["severity"]) == ([2], "critical")
    assert "waiting" in found["comm-bound"]["title"]
    assert missing == {}
    rank, steps = Diagnosis(store).recent_steps(RUN, ATTEMPT, store.sources(RUN, ATTEMPT))
    assert np.bincount(rank).tolist() == [200] * RANKS
    assert (np.lexsort((rank, steps.step)) == np.arange(len(rank))).all()


def test_ranks_of_different_process_groups_are_not_compared(store: Store) -> None:
    slow_third(store, 60, group_ranks=2)
    found, missing = judged(store)
    assert "straggler" not in found
    assert "2 of 3 ranks" in missing["straggler"]
    assert "waiting_ns" not in found["comm-bound"]["evidence"]


def test_ranks_of_the_one_process_group_are_compared(store: Store) -> None:
    slow_third(store, 60, group_ranks=3)
    assert judged(store)[0]["straggler"]["ranks"] == [2]


@pytest.mark.parametrize("slow", [(), (Slow(1, "backward", 60),), (Slow(0, "data", 90, share=0.5),)])
def test_a_diagnosis_says_what_all_columns_together_say(store: Store, slow: tuple[Slow, ...]) -> None:
    fill(store, 120, slow)
    rank, steps = store.steps(RUN, ATTEMPT)
    evidence = Evidence(rank, steps, join(rank, steps), [], {}, dict.fromkeys(range(RANKS), 100), {}, {}, 0)
    judged = [straggler_findings(evidence.joined, dict.fromkeys(range(RANKS), "node"))]
    judged += [find(evidence) for find in CATALOGUE]
    plainly = by_severity([finding for found in judged if not isinstance(found, NotJudged) for finding in found])
    told = Reports(store).diagnostics(RUN, ATTEMPT)["findings"]
    assert [finding["code"] for finding in told] == [finding.code for finding in plainly]
    for came, finding in zip(told, plainly, strict=True):
        assert came == finding.as_json() | {"buckets": came["buckets"], "parameters": came["parameters"]}


def test_a_diagnosis_of_a_long_run_looks_at_its_latest_steps(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs_server.reports.diagnosis._STEPS", 40)
    monkeypatch.setattr("ddpobs_server.reports.diagnosis._FEWEST_STEPS", 40)
    fill(store, 120, (Slow(1, "data", 60),))
    told = Reports(store).diagnostics(RUN, ATTEMPT)
    assert told["steps_seen"] == 120
    assert told["findings"][0]["steps"] == [80, 119]


def test_a_diagnosis_looks_at_fewer_steps_where_these_have_too_many_rows(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpobs_server.reports.diagnosis._MOST_ROWS", 40 * RANKS)
    fill(store, 120, (Slow(1, "data", 60),))
    first, last = Reports(store).diagnostics(RUN, ATTEMPT)["findings"][0]["steps"]
    assert last == 119
    assert 35 <= last - first + 1 <= 40


def test_steps_of_more_rows_than_are_read_are_said_in_missing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 60, (Slow(1, "data", 60),))
    again = half(store.steps(RUN, ATTEMPT, 0, 59, 59)[1], np.zeros(500, np.int64))
    ingest(store, batch(0, 2, steps=again))
    monkeypatch.setattr("ddpobs_server.store.column_queries._MOST_BYTES", 50_000)
    told = Reports(store).diagnostics(RUN, ATTEMPT)
    assert any(what.startswith("steps: ") for what in told["missing"])
    assert told["findings"] == []


def test_the_late_bucket_is_found_by_some_ranks_as_by_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 60, (Slow(2, "backward", 60),))
    buckets = [wire.Bucket(size_bytes=4, dtype="float32", parameters=[wire.Parameter(name=n, size=1)]) for n in "ab"]
    ingest(store, batch(0, 2, layouts=[wire.Layout(module=0, name="m", revision=0, comm="", buckets=buckets)]))
    found = []
    for ranks in (2, 8):
        monkeypatch.setattr("ddpobs_server.reports.diagnosis._BUCKET_RANKS", ranks)
        found.append(Reports(store).diagnostics(RUN, ATTEMPT)["findings"][0])
    assert found[0] == found[1]
    assert found[0]["parameters"] == ["a"]


@pytest.mark.parametrize(("after_ms", "named"), [(5, []), (-5, ["a"]), (28, ["a"])])
def test_no_bucket_is_named_where_ranks_meet_between_two(store: Store, after_ms: int, named: list[str]) -> None:
    """By a collective of the user's; one in forward, or after the last readiness, is no matter."""
    fill(store, 60, (Slow(2, "backward", 60),))
    buckets = [wire.Bucket(size_bytes=4, dtype="float32", parameters=[wire.Parameter(name=n, size=1)]) for n in "ab"]
    ingest(store, batch(0, 2, layouts=[wire.Layout(module=0, name="m", revision=0, comm="", buckets=buckets)]))
    for rank in range(RANKS):
        steps = store.steps(RUN, ATTEMPT, rank)[1]
        at = steps.end_ns - 30 * MS + after_ms * MS
        zeros = np.zeros(len(at), np.int64)
        kind = zeros + wire.COMM_KINDS.index("user")
        comms = wire.Comms(step=steps.step, module=zeros, kind=kind, launched_ns=at, done_ns=at + MS)
        ingest(store, batch(rank, 3, comms=comms))
    finding = Reports(store).diagnostics(RUN, ATTEMPT)["findings"][0]
    assert (finding["code"], finding["ranks"], finding["parameters"]) == ("straggler", [2], named)


def test_the_last_diagnosis_is_told_while_a_new_one_is_made(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 60, (Slow(2, "data", 60),))
    reports = Reports(store)
    (run,) = store.runs(1)
    assert reports.last_diagnosis(run) == (None, False)
    first = reports.diagnostics(RUN, ATTEMPT)
    ingest(store, batch(0, 2))
    (run,) = store.runs(1)
    read, begun, go_on = store.steps, threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return read(*given)

    monkeypatch.setattr(store, "steps", slow)
    assert reports.recent_diagnostics([run])[0] is first
    assert begun.wait(60)
    assert reports.last_diagnosis(run) == (first, False)
    go_on.set()
    until = time.monotonic() + 60
    while not reports.last_diagnosis(run)[1] and time.monotonic() < until:
        time.sleep(0.01)
    reports.close()
    assert reports.last_diagnosis(run)[1]


@pytest.mark.parametrize(("turns", "every", "ms"), [(True, 2, 60), (False, 3, 60), (False, 10, 300)])
def test_the_late_bucket_is_that_of_the_module_that_is_slow_in_the_steps_that_are_late(
    store: Store, turns: bool, every: int, ms: int
) -> None:
    """Two modules take turns and only the first is slow; or one is slow in a part of the steps."""
    own = own_times(240, RANKS, seed=1)
    own[::every, 1, wire.OWN_PHASES.index("backward")] += ms * MS
    rank, steps = columns(own)
    ready = steps.end_ns - steps.exposed_comm_ns
    ready = np.stack([ready - 10 * MS, ready], axis=1).reshape(-1)
    spans = changed(spans_of(steps), ready_ns=ready, launched_ns=ready, done_ns=np.repeat(steps.end_ns, 2))
    spans = changed(spans, module=spans.step % 2 if turns else spans.module)
    layouts = []
    for module in range(2):
        held = [[wire.Parameter(name=f"{module}.{bucket}", size=1)] for bucket in range(2)]
        buckets = [wire.Bucket(size_bytes=4, dtype="float32", parameters=parameters) for parameters in held]
        layouts.append(wire.Layout(module=module, name="m", revision=0, comm="", buckets=buckets))
    for one in range(RANKS):
        of_rank = changed(spans, **{name: getattr(spans, name)[np.repeat(rank, 2) == one] for name in spans.names})
        sent = half(steps, np.flatnonzero(rank == one))
        ingest(store, batch(one, 0, steps=sent, spans=of_rank, layouts=layouts))
    (finding,) = (f for f in Reports(store).diagnostics(RUN, ATTEMPT)["findings"] if f["code"] == "straggler")
    assert (finding["ranks"], finding["buckets"], finding["parameters"]) == ([1], [0], ["0.0"])
    assert finding["evidence"]["module"] == 0
