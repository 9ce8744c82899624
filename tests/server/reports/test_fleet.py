"""Totals by host are written after diagnoses, and the fleet report is made of them alone."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.metrics.fleet_metrics import render_fleet
from ddpobs_server.operations.fleet_totals import FleetTotals
from ddpobs_server.reports.fleet import fleet_json
from ddpobs_server.reports.fleet_figures import FleetFigures
from ddpobs_server.reports.reports import Reports
from ddpobs_server.store import DEFAULT_WORKSPACE, Arrival, HostTotal, Store, UnavailableError, schema
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import select as select_rows

from ddpobs import wire
from tests.support.analysis.scenario import Slow, columns, own_times
from tests.support.server.report_batches import ATTEMPT, batch, ingest, select

S = 10**9
DAY_NS = 86_400 * S
NOW_NS = 1_750_000_000 * S
RANKS = 3


def send(store: Store, run: str, *, slow: int = 2, steps: int = 60, received_ns: int = NOW_NS - DAY_NS) -> None:
    """A run of three ranks on three hosts, which has ended; one rank is slow."""
    rank, rows = columns(own_times(steps, RANKS, seed=1, slow=(Slow(slow, "backward", 60),)))
    account = wire.Account(
        started_ns=0,
        imported_ns=5 * S,
        ready_ns=10 * S,
        until_ns=100 * S,
        phases_ns=[0, 60 * S, *[0] * (len(wire.PHASES) - 2)],
        outside=[],
        finished=True,
    )
    for number in range(RANKS):
        settings: dict[str, Any] = {"tags": "nlp,large"}
        hello = wire.Hello(
            host=f"node{number}", pid=1, device="cpu", backend="gloo", versions={"torch": "2.13"}, settings=settings
        )
        payload = batch(
            number,
            0,
            hello=hello,
            steps=select(rows, np.flatnonzero(rank == number)),
            account=account,
            events=[wire.Event(kind="goodbye", at_ns=0)],
        )
        sent = wire.decode(wire.encode(payload))
        store.ingest([Arrival(msgspec.structs.replace(sent, run=run), b"", 1, received_ns)])


def job(store: Store) -> tuple[FleetTotals, Reports]:
    reports = Reports(store, now_ns=lambda: NOW_NS)
    return FleetTotals(store, reports, CollectorRegistry()), reports


def write(store: Store, *runs: str) -> None:
    totals, reports = job(store)
    for run in runs:
        reports.diagnostics(run, ATTEMPT)
    assert totals.write(NOW_NS) == len(runs)


def totals_of(store: Store, run: str) -> list[HostTotal]:
    """The stored totals of a run."""
    c = schema.host_totals.c
    with store._engine.connect() as connection:
        rows = connection.execute(select_rows(schema.host_totals).where(c.run_id == run).order_by(c.host)).mappings()
        return [
            HostTotal(
                **{name: row[name] for name in ("attempt", "host", "commits", "began_ns", "wall_ns", "ranks", "torch")},
                has_rank_zero=bool(row["has_rank_zero"]),
                tags=tuple(msgspec.json.decode(row["tags"])),
                parts=msgspec.json.decode(row["parts"]),
                excess_ratio=row["excess_ratio"],
            )
            for row in rows
        ]


def report(store: Store, **arguments: Any) -> dict[str, Any]:
    return fleet_json(store, DEFAULT_WORKSPACE, **{"weeks": 4, "now_ns": NOW_NS} | arguments)


def test_a_diagnosis_leaves_a_row_for_each_host(store: Store) -> None:
    send(store, "a")
    write(store, "a")
    totals = totals_of(store, "a")
    assert [(total.host, total.ranks, total.has_rank_zero) for total in totals] == [
        ("node0", 1, True),
        ("node1", 1, False),
        ("node2", 1, False),
    ]
    first = totals[0]
    assert (first.torch, first.tags, first.wall_ns, first.began_ns) == (
        "2.13",
        ("nlp", "large"),
        100 * S,
        NOW_NS - DAY_NS,
    )
    assert first.parts["forward"] == 60 * S
    ratios = [total.excess_ratio or 0 for total in totals]
    assert ratios[2] > 0.2
    assert max(ratios[:2]) < 0


def test_the_report_sums_up_runs_and_names_the_slow_host(store: Store) -> None:
    runs = [f"run-{number}" for number in range(6)]
    for run in runs:
        send(store, run)
    write(store, *runs)
    fleet = report(store)
    assert (fleet["runs"], fleet["compared_runs"]) == (6, 6)
    assert fleet["rank_hours"] == pytest.approx(6 * RANKS * 100 / 3600)
    assert fleet["goodput"] == pytest.approx(0.6)
    assert sum(cause["hours"] for cause in fleet["causes"]) == pytest.approx(fleet["lost_hours"])
    assert [row["name"] for row in fleet["by_host"]] == ["node0", "node1", "node2"]
    assert {row["name"]: row["runs"] for row in fleet["by_tag"]} == {"nlp": 6, "large": 6}
    assert [row["name"] for row in fleet["by_torch"]] == ["2.13"]
    assert [(host["host"], host["slow_jobs"], host["rank_zero_jobs"]) for host in fleet["slow_hosts"]] == [
        ("node2", 6, 0)
    ]
    assert sum(week["rank_hours"] for week in fleet["by_week"]) == pytest.approx(fleet["rank_hours"])
    assert report(store, tag="none")["runs"] == 0


def test_a_slow_host_that_always_holds_rank_zero_is_named_with_this_doubt(store: Store) -> None:
    runs = [f"run-{number}" for number in range(6)]
    for run in runs:
        send(store, run, slow=0)
    write(store, *runs)
    (host,) = report(store)["slow_hosts"]
    assert host["host"] == "node0"
    assert "the work of rank 0 may be the cause" in host["text"]


def test_the_comparison_of_hosts_is_the_same_for_all_readers(store: Store) -> None:
    runs = [f"run-{number}" for number in range(6)]
    for run in runs:
        send(store, run, received_ns=NOW_NS - 40 * DAY_NS)
    write(store, *runs)
    hosts = ("slow_hosts", "slow_hosts_since_ns", "compared_runs")
    fleet, other = report(store, weeks=1, tag="none"), report(store, weeks=50)
    assert (fleet["runs"], other["runs"]) == (0, 6)
    assert [host["host"] for host in fleet["slow_hosts"]] == ["node2"]
    assert {name: fleet[name] for name in hosts} == {name: other[name] for name in hosts}
    assert 12 * 7 * DAY_NS <= NOW_NS - fleet["slow_hosts_since_ns"] < 24 * 7 * DAY_NS


def test_a_run_counts_in_the_comparison_when_it_has_ended_and_its_totals_are_final(store: Store) -> None:
    for number in range(6):
        send(store, f"run-{number}", received_ns=NOW_NS - 60 * S)
    write(store, *(f"run-{number}" for number in range(6)))
    assert report(store)["compared_runs"] == 0
    assert report(store, now_ns=NOW_NS + 61 * S)["compared_runs"] == 6
    ingest(store, msgspec.structs.replace(batch(0, 1), run="run-0"), received_ns=NOW_NS - 60 * S)
    assert report(store, now_ns=NOW_NS + 61 * S)["compared_runs"] == 5


def test_tags_of_a_person_replace_those_of_the_training(store: Store) -> None:
    send(store, "a")
    write(store, "a")
    store.set_labels("a", ["vision"], None)
    assert [row["name"] for row in report(store)["by_tag"]] == ["vision"]


def test_other_workspaces_and_older_runs_are_not_summed(store: Store) -> None:
    send(store, "other/a")
    send(store, "old", received_ns=NOW_NS - 60 * DAY_NS)
    write(store, "other/a", "old")
    assert report(store)["runs"] == 0
    assert report(store, weeks=12)["runs"] == 1


def test_a_page_of_totals_has_whole_runs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in (("_READ_ROWS", 2), ("_PAGE_ROWS", 1)):
        monkeypatch.setattr(f"ddpobs_server.store.queries.fleet_queries.{name}", rows)
    runs = ("c", "a", "b")
    for number, run in enumerate(runs):
        send(store, run, received_ns=NOW_NS - DAY_NS - number)
    write(store, *runs)
    pages = list(store.fleet_totals(DEFAULT_WORKSPACE, 0, 10))
    assert [page.run for page in pages] == [("c",) * 3, ("a",) * 3, ("b",) * 3]
    assert [page.host for page in pages] == [("node0", "node1", "node2")] * 3


def test_deleting_a_run_removes_its_totals(store: Store) -> None:
    send(store, "a")
    _, reports = job(store)
    write(store, "a")
    store.delete("a")
    assert report(store)["runs"] == 0
    store.write_host_totals("a", [], NOW_NS)
    assert reports.fleet(DEFAULT_WORKSPACE, 4, NOW_NS, None)["runs"] == 0


def test_a_comparison_of_hosts_outlives_the_steps(store: Store) -> None:
    send(store, "a")
    write(store, "a")
    totals = totals_of(store, "a")
    without = [replace(total, excess_ratio=None) for total in totals]
    store.write_host_totals("a", without, NOW_NS)
    assert totals_of(store, "a") == totals


def test_runs_that_nobody_looked_at_are_diagnosed_and_written(store: Store) -> None:
    send(store, "a")
    send(store, "team/b")
    totals, reports = job(store)
    assert totals.diagnose(NOW_NS) == 2
    until = time.monotonic() + 60
    while store.runs_without_totals(NOW_NS, 0, 2**62, 10) and time.monotonic() < until:
        totals.write(NOW_NS)
        time.sleep(0.05)
    reports.close()
    assert totals.diagnose(NOW_NS) == 0


def test_a_run_that_goes_on_is_due_every_ten_minutes(store: Store) -> None:
    send(store, "a")
    write(store, "a")
    payload = msgspec.structs.replace(batch(0, 1), run="a")
    ingest(store, payload, received_ns=NOW_NS)

    def due(silent_ns: int, made_ns: int) -> list[str]:
        return [run for run, _, _ in store.runs_without_totals(silent_ns, made_ns, 2**62, 10)]

    assert due(NOW_NS - 1, NOW_NS - 1) == []
    assert due(NOW_NS - 1, NOW_NS + 1) == ["a"]
    assert due(NOW_NS + 1, NOW_NS - 1) == ["a"]


def test_totals_wait_while_the_database_does_not_answer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    send(store, "a")
    totals, reports = job(store)
    reports.diagnostics("a", ATTEMPT)
    with monkeypatch.context() as fault:

        def refuse(*_: Any) -> None:
            raise UnavailableError("down", full=False)

        fault.setattr(store, "write_host_totals", refuse)
        with pytest.raises(UnavailableError):
            totals.write(NOW_NS)
    assert totals.write(NOW_NS) == 1
    assert report(store)["runs"] == 1


def test_one_run_that_cannot_be_written_costs_only_itself(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write_totals = store.write_host_totals
    for run in ("bad", "good"):
        send(store, run)

    def write_or_fail(run: str, *arguments: Any) -> None:
        if run == "bad":
            raise ValueError(run)
        write_totals(run, *arguments)

    monkeypatch.setattr(store, "write_host_totals", write_or_fail)
    write(store, "bad", "good")
    assert report(store)["runs"] == 1


def test_the_oldest_runs_are_left_out_and_this_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs_server.reports.fleet.MAX_RUNS", 1)
    for number, run in enumerate(("old", "new")):
        send(store, run, received_ns=NOW_NS - DAY_NS + number)
    write(store, "old", "new")
    fleet = report(store)
    assert fleet["runs"] == 1
    assert any("older runs" in reason for reason in fleet["missing"])


def test_a_scrape_has_the_figures_that_were_made_after_the_one_before(store: Store) -> None:
    runs = [f"run-{number}" for number in range(6)]
    for run in runs:
        send(store, run)
    write(store, *runs)
    figures = Reports(store, now_ns=lambda: NOW_NS).fleet_figures
    assert figures.latest(DEFAULT_WORKSPACE) is None
    figures.refresh()
    made = figures.latest(DEFAULT_WORKSPACE)
    assert made is not None
    assert (list(made.late_ratios), made.compared_runs) == (["node2"], 6)
    lines = render_fleet(made, generate_latest).decode().splitlines()
    assert f"ddpobs_fleet_rank_seconds {made.rank_s}" in lines
    assert made.rank_s == pytest.approx(6 * RANKS * 100)
    lost = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("ddpobs_fleet_lost_seconds{cause=")]
    assert sum(lost) == pytest.approx(0.4 * made.rank_s)
    assert f'ddpobs_fleet_slow_host_ratio{{host="node2"}} {made.late_ratios["node2"]}' in lines
    assert not [line for line in render_fleet(None, generate_latest).decode().splitlines() if line[0] != "#"]


def test_a_workspace_whose_report_fails_does_not_hold_up_the_others() -> None:
    now_s = [0.0]

    def report(workspace: str) -> dict[str, Any]:
        if workspace == "broken":
            raise ValueError(workspace)
        return {"rank_hours": 1.0, "causes": [], "slow_hosts": [], "compared_runs": 0}

    figures = FleetFigures(report, lambda: now_s[0])
    for workspace in ("broken", "team"):
        figures.latest(workspace)
    with pytest.raises(ValueError, match="broken"):
        figures.refresh()
    now_s[0] = 1
    figures.refresh()
    made = figures.latest("team")
    assert made is not None
    assert made.rank_s == 3600


def test_figures_take_at_most_a_hundredth_of_the_time_and_end_without_scrapes() -> None:
    now_s, reports = [0.0], list[str]()
    empty = {"rank_hours": 0.0, "causes": [], "slow_hosts": [], "compared_runs": 0}

    def report(workspace: str) -> dict[str, Any]:
        reports.append(workspace)
        now_s[0] += 2
        return empty

    figures = FleetFigures(report, lambda: now_s[0])
    figures.refresh()
    figures.latest("team")
    figures.refresh()
    for at_s, count in ((201, 1), (202, 2)):
        now_s[0] = at_s
        figures.latest("team")
        figures.refresh()
        assert len(reports) == count
    now_s[0] = 900
    figures.refresh()
    assert (len(reports), figures.latest("team")) == (2, None)
