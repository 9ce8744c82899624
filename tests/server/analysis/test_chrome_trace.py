"""The Chrome trace shows the steps, one process per rank."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.analysis.chrome_trace import chrome_trace
from ddpobs_server.analysis.clock_alignment import offsets_ns

from ddpobs import wire
from tests.server.analysis.scenario import MS, columns, own_times, spans, with_columns

HOUR = 3_600_000 * MS


def trace() -> tuple[wire.Steps, list[Any]]:
    """Two ranks, three steps; the only bucket moves in the last 3 ms of a step."""
    rank, steps = columns(own_times(3, 2, seed=0))
    rows = [
        (int(s), 0, int(e) - 3 * MS, int(e) - 3 * MS, int(e)) for s, e in zip(steps.step, steps.end_ns, strict=True)
    ]
    bucket_spans = spans(rank.tolist(), rows)
    return steps, events_of((rank, steps), bucket_spans, offsets_ns((rank, steps), bucket_spans)[0])


def events_of(*arguments: Any) -> list[Any]:
    events: list[Any] = msgspec.json.decode(msgspec.json.encode(chrome_trace(*arguments)))["traceEvents"]
    return events


def test_the_phases_of_a_step_add_up_and_follow_each_other() -> None:
    steps, events = trace()
    phases = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["tid"] == 0 and e["args"] == {"step": 2}]
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
    assert names == {0: "rank 0", 1: "rank 1"}
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
    assert len(names) == len(set(names.values()))
    times_by_track: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and "bucket" in event["args"]:
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
    assert chrome_trace((no_ranks, no_steps), (no_ranks, no_spans), {})["traceEvents"] == []
