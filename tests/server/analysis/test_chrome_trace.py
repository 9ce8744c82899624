"""The Chrome trace shows the steps, one process per rank."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.analysis.steps.clock_alignment import offsets_ns
from ddpobs_server.analysis.trace.chrome_trace import chrome_trace
from ddpobs_server.analysis.trace.events import ALL_RANKS, PHASES_TRACK

from ddpobs import wire
from ddpobs.wire.fields import MAX_INDEX
from tests.support.analysis.scenario import MS, columns, own_times, spans, with_columns

HOUR = 3_600_000 * MS


def trace() -> tuple[wire.Steps, list[Any]]:
    """Two ranks, three steps; the only bucket moves in the last 3 ms of a step."""
    rank, steps = columns(own_times(3, 2, seed=0))
    rows = [
        (int(s), 0, int(e) - 3 * MS, int(e) - 3 * MS, int(e)) for s, e in zip(steps.step, steps.end_ns, strict=True)
    ]
    bucket_spans = spans(rank.tolist(), rows)
    return steps, events_of((rank, steps), bucket_spans, offsets_ns((rank, steps), bucket_spans)[0])


def events_of(*arguments: Any, **others: Any) -> list[Any]:
    trace = chrome_trace(*arguments, **others)
    events: list[Any] = msgspec.json.decode(msgspec.json.encode(list(trace["traceEvents"])))
    return events


def test_a_change_of_the_buckets_is_a_moment_of_its_rank_in_its_step() -> None:
    rank, steps = columns(own_times(3, 2, seed=0))
    kept = wire.Event(kind="bucket_caps_kept", at_ns=int(steps.start_ns[0]) + 5 * MS, step=1, detail={"ratio": 0.9})
    later = wire.Event(kind="bucket_caps_tried", at_ns=int(steps.start_ns[0]), step=77, detail={})
    at_ns = int(steps.start_ns[0])
    some = spans([0], [(0, 0, at_ns, at_ns, at_ns)])
    events = events_of((rank, steps), some, {1: 2 * MS}, changes_of_buckets=[(1, kept), (1, later)])
    (moment,) = [event for event in events if event["ph"] == "i"]
    assert (moment["name"], moment["pid"], moment["args"]) == ("bucket caps kept", 1, {"ratio": 0.9})
    assert moment["ts"] == pytest.approx(7000, abs=3000)


def test_the_phases_of_a_step_add_up_and_follow_each_other() -> None:
    steps, events = trace()
    phases = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["tid"] == PHASES_TRACK]
    phases = [e for e in phases if e["args"] == {"step": 2}]
    assert [e["name"] for e in phases] == [p for p in wire.PHASES if getattr(steps, f"{p}_ns")[5]]
    assert sum(e["dur"] for e in phases) == pytest.approx(float(steps.end_ns[5] - steps.start_ns[5]) / 1e3)
    ends = [e["ts"] + e["dur"] for e in phases]
    assert [e["ts"] for e in phases[1:]] == pytest.approx(ends[:-1])


def test_ranks_an_hour_apart_end_a_bucket_at_the_same_time() -> None:
    _, events = trace()
    ends = {(e["pid"], e["args"]["step"]): e["ts"] + e["dur"] for e in events if e["name"] == "bucket 0"}
    assert len(ends) == 6
    for step in range(3):
        assert ends[0, step] == pytest.approx(ends[1, step])
    assert max(ends.values()) * 1e3 < HOUR


def test_every_rank_is_a_named_process_and_times_begin_at_zero() -> None:
    _, events = trace()
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", ALL_RANKS: "all ranks"}
    assert min(e["ts"] for e in events if e["ph"] == "X") == pytest.approx(0)


def tracks(bucket_spans: wire.Spans) -> dict[str, list[tuple[float, float]]]:
    """Return begin and end of each event on rank 0's bucket tracks, by the track's name."""
    rank, steps = columns(own_times(1, 1, seed=0))
    events = events_of(
        (rank, with_columns(steps, start_ns=steps.start_ns * 0)),
        (np.zeros(len(bucket_spans), np.int64), bucket_spans),
        {},
    )
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert min(names) > MAX_INDEX
    assert len(names) == len(set(names.values()))
    times_by_track: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and "bucket" in event["args"] and not event["name"].startswith("gradients"):
            assert event["name"] == names[event["tid"]]
            times_by_track.setdefault(names[event["tid"]], []).append((event["ts"], event["ts"] + event["dur"]))
    return {name: sorted(times) for name, times in times_by_track.items()}


def test_buckets_of_modules_reduced_at_the_same_time_have_separate_tracks() -> None:
    _, bucket_spans = spans([0] * 4, [(0, 0, 0, 0, 10), (0, 0, 5, 5, 15), (0, 1, 12, 12, 20), (0, 1, 12, 12, 21)])
    bucket_spans = with_columns(bucket_spans, module=np.array([0, 2, 0, 2]))
    assert {name: times for name, ((*times,),) in tracks(bucket_spans).items()} == {
        "bucket 0": pytest.approx([0, 0.010]),
        "bucket 1": pytest.approx([0.012, 0.020]),
        "bucket 2.0": pytest.approx([0.005, 0.015]),
        "bucket 2.1": pytest.approx([0.012, 0.021]),
    }


def test_a_bucket_keeps_its_track_when_buckets_are_rebuilt_and_no_events_overlap() -> None:
    _, bucket_spans = spans([0] * 3, [(0, 0, 0, 0, 7), (1, 0, 7, 7, 15), (2, 0, 30, 30, 40)])
    bucket_spans = with_columns(bucket_spans, revision=np.array([0, 1, 1]))
    ((first, second, third),) = tracks(bucket_spans).values()
    assert first[1] == pytest.approx(second[0])
    assert second[1] < third[0]


def test_no_steps_give_an_empty_trace() -> None:
    _, steps = columns(own_times(1, 1, seed=0))
    no_steps = wire.Steps(**{name: getattr(steps, name)[:0] for name in steps.names})
    _, example = spans([0], [(0, 0, 0, 0, 0)])
    no_spans = wire.Spans(**{name: getattr(example, name)[:0] for name in example.names})
    no_ranks = np.zeros(0, np.int64)
    assert list(chrome_trace((no_ranks, no_steps), (no_ranks, no_spans), {})["traceEvents"]) == []


LAYOUT = wire.Layout(
    module=0,
    name="model",
    revision=0,
    comm="all_reduce",
    buckets=[
        wire.Bucket(size_bytes=8_000_000, dtype="float32", parameters=[wire.Parameter(name=name, size=1)] * count)
        for name, count in (("head.weight", 2), ("stem.weight", 1))
    ],
)


def late_trace() -> list[Any]:
    """Rank 1 reaches bucket 0 of the only step 30 ms after rank 0, and bucket 1 at the same time as rank 0."""
    times = [(10, 44), (41, 48)], [(40, 44), (41, 48)]
    rows = [
        (0, bucket, ready * MS, ready * MS, done * MS) for rank in times for bucket, (ready, done) in enumerate(rank)
    ]
    _, steps = columns(own_times(1, 2, seed=0))
    steps = with_columns(steps, start_ns=steps.start_ns * 0, end_ns=steps.start_ns * 0 + 60 * MS)
    rank, bucket_spans = spans([0, 0, 1, 1], rows)
    return events_of((np.array([0, 1]), steps), (rank, bucket_spans), {}, [LAYOUT], 1_700_000_000 * 1000 * MS)


def slices(events: list[Any], name: str) -> list[tuple[int, float, float]]:
    """Return rank, begin and duration in ms of the slices with this name."""
    return [(e["pid"], e["ts"] / 1e3, e["dur"] / 1e3) for e in events if e["ph"] == "X" and e["name"] == name]


def test_the_wait_for_the_late_rank_and_the_movement_of_bytes_are_apart() -> None:
    events = late_trace()
    assert slices(events, "waiting for rank 1") == [(0, 10, 30)]
    assert sorted(slices(events, "moving")) == [(0, 40, 4), (0, 44, 4), (1, 40, 4), (1, 44, 4)]
    (first, *_) = [e["args"] for e in events if e["name"] == "moving"]
    assert first == {"step": 0, "size_bytes": 8_000_000, "bandwidth_GB_s": 2.0}


def test_gradients_take_from_one_readiness_to_the_next_of_the_same_backward() -> None:
    assert slices(late_trace(), "gradients of bucket 1") == [(0, 10, 31), (1, 40, 1)]
    two_backwards = spans([0] * 4, [(0, 0, 1, 1, 9), (0, 1, 4, 4, 9), (0, 0, 20, 20, 29), (0, 1, 22, 22, 29)])
    rank, steps = columns(own_times(1, 1, seed=0))
    steps = with_columns(steps, start_ns=steps.start_ns * 0)
    events = events_of((rank, steps), two_backwards, {})
    compute = [(e["ts"] * 1e3, e["dur"] * 1e3) for e in events if e["ph"] == "X" and e["tid"] == PHASES_TRACK + 1]
    assert compute == [pytest.approx((1, 3)), pytest.approx((20, 2))]


def test_an_arrow_leads_from_the_late_rank_to_the_waiting_one() -> None:
    (start,) = [e for e in late_trace() if e["ph"] == "s"]
    (end,) = [e for e in late_trace() if e["ph"] == "f"]
    assert (start["pid"], start["ts"], end["pid"], end["ts"], end["bp"]) == (1, 40_000, 0, 40_000, "e")
    assert start["id"] == end["id"]


def test_counters_show_bandwidth_ranks_in_a_step_and_ranks_waiting() -> None:
    changes = [(e["ts"] / 1e3, *e["args"].items()) for e in late_trace() if e["ph"] == "C"]
    assert {e["pid"] for e in late_trace() if e["ph"] == "C"} == {ALL_RANKS}
    assert changes == [
        *((0, ("in a step", 2)), (60, ("in a step", 0))),
        *((40, ("GB/s", 2)), (48, ("GB/s", 0))),
        *((10, ("waiting", 1)), (40, ("waiting", 0))),
    ]


def test_a_step_carries_the_time_of_day_and_its_tracks_the_names_of_parameters() -> None:
    events = late_trace()
    assert {e["args"]["began"] for e in events if e["name"] == "step 0"} == {"2023-11-14T22:13:20.000000Z"}
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert names == ["steps", "phases", "gradients", "bucket 0: head.weight ...", "bucket 1: stem.weight"]
