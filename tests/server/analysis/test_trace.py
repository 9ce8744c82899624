"""The Chrome trace tells the steps, one process a rank."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ddpobs_server.analysis.clocks import offsets_ns
from ddpobs_server.analysis.trace import chrome_trace

from ddpobs import wire
from tests.server.analysis.scenario import MS, columns, own_times, spans

HOUR = 3_600_000 * MS


def trace() -> tuple[wire.Steps, list[dict[str, object]]]:
    """Two ranks, three steps; the only bucket moves in the last 3 ms of a step."""
    rank, steps = columns(own_times(3, 2, seed=0))
    rows = [
        (int(s), 0, int(e) - 3 * MS, int(e) - 3 * MS, int(e)) for s, e in zip(steps.step, steps.end_ns, strict=True)
    ]
    moved = spans(rank.tolist(), rows)
    made = chrome_trace((rank, steps), moved, offsets_ns((rank, steps), moved)[0])
    return steps, json.loads(json.dumps(made))["traceEvents"]


def test_the_phases_of_a_step_add_up_and_follow_each_other() -> None:
    steps, events = trace()
    laid = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["tid"] == 0 and e["args"] == {"step": 2}]
    assert [e["name"] for e in laid] == [p for p in wire.PHASES if getattr(steps, f"{p}_ns")[5]]
    assert sum(e["dur"] for e in laid) == pytest.approx(float(steps.end_ns[5] - steps.start_ns[5]) / 1e3)
    ends = [e["ts"] + e["dur"] for e in laid]
    assert [e["ts"] for e in laid[1:]] == pytest.approx(ends[:-1])


def test_ranks_an_hour_apart_end_a_bucket_at_the_same_time() -> None:
    _, events = trace()
    ends = {(e["pid"], e["args"]["step"]): e["ts"] + e["dur"] for e in events if e["name"] == "bucket 0"}
    assert len(ends) == 6
    for step in range(3):
        assert ends[0, step] == pytest.approx(ends[1, step])
    assert max(ends.values()) * 1e3 < HOUR


def test_every_rank_is_a_named_process_and_times_begin_at_zero() -> None:
    _, events = trace()
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {0: "rank 0", 1: "rank 1"}
    assert min(e["ts"] for e in events if e["ph"] == "X") == pytest.approx(0)


def test_no_steps_give_an_empty_trace() -> None:
    _, steps = columns(own_times(1, 1, seed=0))
    none = wire.Steps(**{name: getattr(steps, name)[:0] for name in steps.names})
    _, some = spans([0], [(0, 0, 0, 0, 0)])
    no_spans = wire.Spans(**{name: getattr(some, name)[:0] for name in some.names})
    nobody = np.zeros(0, np.int64)
    assert chrome_trace((nobody, none), (nobody, no_spans), {})["traceEvents"] == []
