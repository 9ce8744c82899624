"""Facts of events have types: a batch with another one is refused, and one that is stored already breaks no read."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import httpx
import msgspec
import pytest

from benchmarks.rig import patience
from benchmarks.rig.collector import Collector, collector
from ddpobs import wire
from ddpobs.wire.facts import FORMS
from tests.support.server.batches import ATTEMPT, assert_problem, batch, pulse, put, steps

READS = ("", "/attempts", "/diagnostics", "/pipeline", "/account", "/ranks", f"/steps?rank=0&attempt={ATTEMPT}")
FACTS = [(kind, field.name) for kind, form in FORMS.items() for field in msgspec.structs.fields(form)]
WRONG = ("\ud7ff", -(2**70), True, 1.5)


@pytest.mark.parametrize(("kind", "name"), FACTS)
def test_a_fact_of_another_type_is_refused_with_its_name(shared: Collector, run: str, kind: str, name: str) -> None:
    event = wire.Event(kind=kind, at_ns=0, detail={name: 1.5})
    problem = assert_problem(put(shared.url, batch(run, events=[wire.Event(kind="x", at_ns=0), event])), 422)
    assert problem["field"] == f"events[1].detail.{name}"


def test_facts_beyond_their_bounds_are_refused(shared: Collector, run: str) -> None:
    for kind, detail in (
        ("stuck", {"idle_ns": -1}),
        ("stuck", {"activity": "sleeping"}),
        ("pipeline", {"stages": 50_000_000}),
        ("pipeline", {"held": "0,x"}),
        ("failed", {"wall_ns": 2**63}),
        ("died", {"source": "elsewhere"}),
        ("died", {"rank": -1}),
    ):
        (name,) = detail
        event = wire.Event(kind=kind, at_ns=0, detail=dict(detail))
        problem = assert_problem(put(shared.url, batch(run, events=[event])), 422)
        assert problem["field"] == f"events[0].detail.{name}"


def test_a_pulse_with_another_key_than_a_rank_is_refused(shared: Collector, run: str) -> None:
    problem = assert_problem(put(shared.url, batch(run, pulse=pulse("data", processes={"\u0661": "gone"}))), 422)
    assert problem["field"] == "pulse.processes"


def test_events_without_facts_as_older_clients_send_them_are_read(shared: Collector, run: str) -> None:
    for rank in range(2):
        events = [wire.Event(kind=kind, at_ns=0, step=3) for kind in FORMS]
        assert put(shared.url, batch(run, rank=rank, steps=steps(0, 30), events=events)).status_code == 201
    for read in READS:
        assert httpx.get(f"{shared.url}/api/v1/runs/{run}{read}").status_code == 200, read


def test_wrong_facts_that_are_stored_already_break_no_read(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        for number, wrong in enumerate(WRONG):
            for rank in range(2):
                events = [wire.Event(kind=kind, at_ns=0, step=3) for kind in FORMS]
                put(running.url, batch(f"run-{number}", rank=rank, steps=steps(0, 30), events=events))
            with sqlite3.connect(running.database, timeout=patience.HANG_S) as connection:
                for kind, form in FORMS.items():
                    detail = dict.fromkeys(form.__struct_fields__, wrong)
                    body = json.dumps({"kind": kind, "at_ns": 0, "step": 3, "detail": detail})
                    where = "run_id = ? AND kind = ?"
                    connection.execute(f"UPDATE events SET body = ? WHERE {where}", (body, f"run-{number}", kind))
            connection.close()
            put(running.url, batch(f"run-{number}", 1, steps=steps(30, 1)))
            for read in (*READS, f"/compare?with=run-{number}"):
                answer = httpx.get(f"{running.url}/api/v1/runs/run-{number}{read}")
                assert answer.status_code == 200, (wrong, read, answer.text)
        assert httpx.get(f"{running.url}/metrics").status_code == 200
        assert httpx.get(f"{running.url}/readyz").json()["faulty_runs"] == 0
