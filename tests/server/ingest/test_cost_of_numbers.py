"""Whatever numbers an accepted batch has, it costs little more than an ordinary batch of its size.

Integers and texts of the wire are set to the ends of their ranges, sixty at once, in some runs. Every read, scrape and
background job then works on these runs.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.app import create_app
from ddpobs_server.ingest.limits import check_batch
from ddpobs_server.settings import Settings
from ddpobs_server.web.problems import Problem
from fastapi.testclient import TestClient

from benchmarks.rig import databases
from ddpobs import wire
from ddpobs.errors import WireError
from ddpobs.wire.facts import FORMS
from tests.support.server.batches import batch, fingerprint, hello, layout, pulse, spans, steps
from tests.support.server.costs import costs
from tests.support.server.peers import peers

NUMBERS = (0, 1, 50_000_000, 2**20 - 1, 2**40 - 1, 2**48, 2**62, 2**63 - 1, -1, -(2**62))
TEXTS = ("", "9" * 1024, ",".join(["0-999999"] * 100), "0," * 500 + "0")
Path_ = tuple[str | int, ...]
CASES = 6
"""Batches with many such values; `make test` has the first two."""
SETTINGS = Settings()
TIMES_ORDINARY = 3
"""Most memory of any request or job, as a multiple of what an ordinary batch takes."""
TIMES_ORDINARY_S, LEAST_S = 10, 0.1
"""Most processor time likewise, and the time that any may take: garbage collections and other threads count."""


def ordinary() -> dict[str, Any]:
    """A batch with every kind of record, in its JSON form."""
    schedule: dict[str, wire.Scalar] = {"stages": 2, "micro_batches": 4, "schedule": "ScheduleGPipe", "held": "0"}
    times: dict[str, wire.Scalar] = {"wall_ns": 1, "idle_ns": 2, "count": 1}
    events = [
        wire.Event(kind=kind, at_ns=0, step=3, detail=dict(schedule if kind == "pipeline" else times)) for kind in FORMS
    ]
    account = wire.Account(
        imported_ns=1,
        ready_ns=2,
        until_ns=3,
        phases_ns=[1] * 6,
        outside=[
            wire.Outside(
                kind="evaluation",
                total_ns=1,
                count=1,
                intervals=[wire.OutsideInterval(first_step=0, last_step=1, began_ns=0, ended_ns=1, total_ns=1)],
            )
        ],
    )
    zeros = np.zeros(3, np.int64)
    comms = wire.Comms(step=np.arange(3), module=zeros, kind=zeros, launched_ns=zeros, done_ns=zeros)
    settings: dict[str, wire.Scalar] = {"processors": "0-3", "threads": 2, "group_ranks": 2, "bucket_cap_mb": 25}
    full = batch(
        "run",
        steps=steps(0, 40),
        spans=spans(0, 40),
        comms=comms,
        hello=msgspec.structs.replace(hello(), settings=settings),
        layouts=[layout()],
        readiness=[wire.Readiness(step=1, module=0, revision=0, ready_ns=np.arange(2))],
        unused=[wire.Unused(step=0, module=0, locally=["a"], globally=["a"])],
        peers=[peers(0, 9)],
        fingerprints=[fingerprint(3)],
        pulse=pulse("bucket", 12, machine=wire.Machine(), input=wire.Input(), processes={"1": "gone"}),
        account=account,
        events=events,
    )
    plain: dict[str, Any] = json.loads(wire.encode_json(full))
    return plain


def leaves(value: Any, at: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Each number and text; of a long list the first and the last."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*at, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from leaves(value[index], (*at, index))
    elif isinstance(value, int | str) and not isinstance(value, bool):
        yield at, value


def changed(plain: Any, changes: dict[Path_, Any]) -> Any:
    """A copy with other values at some places."""
    copy = json.loads(json.dumps(plain))
    for at, value in changes.items():
        place = copy
        for key in at[:-1]:
            place = place[key]
        place[at[-1]] = value
    return copy


def accepted(plain: Any) -> bool:
    try:
        check_batch(wire.decode(json.dumps(plain).encode(), wire.JSON), SETTINGS)
    except (WireError, Problem):
        return False
    return True


def cases(count: int) -> dict[str, Any]:
    """Batches by the name of their run: one with a step far from the others, the rest with many accepted extremes."""
    plain, pick = ordinary(), random.Random(5)
    alone = [
        (at, value)
        for at, old in leaves(plain)
        if at[0] not in ("run", "attempt", "source", "rank", "version", "seq")
        for value in (TEXTS if isinstance(old, str) else NUMBERS)
        if accepted(changed(plain, {at: value}))
    ]
    assert len(alone) > 300
    found = {"far-step": changed(plain, {("steps", "step", 39): wire.MAX_STEP})}
    for number in range(count):
        changes: dict[Path_, Any] = {}
        for at, value in pick.sample(alone, 60):
            if accepted(changed(plain, changes | {at: value})):
                changes[at] = value
        found[f"run-{number}"] = changed(plain, changes)
    return found


@pytest.mark.parametrize("count", [2, pytest.param(CASES, marks=pytest.mark.wide)])
def test_no_number_of_a_client_makes_a_read_or_a_job_expensive(tmp_path: Path, count: int) -> None:
    settings = Settings(database_url=databases.migrated_sqlite(tmp_path), keep_spans_days=1, keep_share=1)
    hostile = cases(count)
    with TestClient(create_app(settings)) as http:
        costs(http, settings, ordinary(), "warm")
        tracemalloc.start()
        try:
            usual = costs(http, settings, ordinary(), "usual")
            for run, plain in hostile.items():
                for what, cost in costs(http, settings, plain, run).items():
                    assert cost.size_bytes <= TIMES_ORDINARY * max(usual[what].size_bytes, 2**20), (run, what, cost)
                    limit_s = TIMES_ORDINARY_S * max(usual[what].processor_s, LEAST_S)
                    assert cost.processor_s <= limit_s, (run, what, cost, usual[what])
        finally:
            tracemalloc.stop()
