"""Evidence of failures without steps."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from ddpobs_server.analysis.account.rank_account import Process
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.steps.joined_steps import join

from ddpobs import wire

S = 10**9
TIMEOUT = "[gloo] Timed out waiting 14000ms for recv operation to complete"
NO_STEPS = wire.Steps.from_table(np.zeros((len(wire.Steps.names), 0), np.int64))


def evidence(**fields: Any) -> Evidence:
    none = np.zeros(0, np.int64)
    return Evidence(rank=none, steps=NO_STEPS, joined=join(none, NO_STEPS), now_ns=0, **({"world_size": 2} | fields))


def pulse(activity: str, **fields: Any) -> wire.Pulse:
    known: dict[str, Any] = {
        "phase": "backward",
        "step": 7,
        "idle_ns": 12 * S,
        "patience_ns": 8 * S,
        "synchronised": 7,
        "place": "a.py:3",
        "activity": activity,
    }
    return wire.Pulse(at_ns=0, **(known | fields))


class Layouts:
    def layouts(self) -> list[wire.Layout]:
        bucket = wire.Bucket(size_bytes=8, dtype="float32", parameters=[wire.Parameter(name="head.weight", size=2)])
        return [wire.Layout(module=0, name="model", revision=1, comm="all_reduce", buckets=[bucket])]


def failed(rank: int, error: str, message: str, wall_s: int, **facts: Any) -> tuple[int, wire.Event]:
    detail = {"error": error, "message": message, "wall_ns": wall_s * S, "phase": "forward", "bucket": -1, **facts}
    return rank, wire.Event(kind="failed", at_ns=0, step=6, detail=detail)


def gave_up(rank: int, wall_s: int = 100, **facts: Any) -> tuple[int, wire.Event]:
    return failed(rank, "RuntimeError", TIMEOUT, wall_s, **facts)


def at(wall_s: int, activity: str, idle_s: int = 14, **fields: Any) -> wire.Pulse:
    known = {"idle_ns": idle_s * S, "step": 6, "synchronised": 7 if activity == "bucket" else 6, "module": 0}
    return msgspec.structs.replace(pulse(activity, **known | fields), at_ns=wall_s * S)


def gave_up_evidence(*events: tuple[int, wire.Event], **pulses: wire.Pulse) -> Evidence:
    """A run whose rank 0 waited in bucket 0 of step 6 until 100 s, when its collective timed out."""
    by_rank = {0: at(99, "bucket", bucket=0)} | {int(name[1:]): each for name, each in pulses.items()}
    ended = {rank: "failed" for rank, event in events if event.kind in ("failed", "terminated")}
    world_size = len(by_rank)
    processes = [Process(rank, None) for rank in range(world_size)]
    known = {"processes": processes, "columns": Layouts(), "hosts": dict.fromkeys(range(world_size), "one")}
    return evidence(events=list(events), pulses=by_rank, ended=ended, world_size=world_size, **known)


def terminated(rank: int, wall_s: int) -> tuple[int, wire.Event]:
    return rank, wire.Event(kind="terminated", at_ns=0, step=6, detail={"wall_ns": wall_s * S, "signal": "SIGTERM"})
