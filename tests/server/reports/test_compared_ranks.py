"""Ranks that can be compared, and the reasons why others cannot."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.reports.columns import RunColumns
from ddpobs_server.reports.recent_steps import read_recent_steps
from ddpobs_server.reports.reports import Reports
from ddpobs_server.store import Store

from ddpobs import wire
from tests.support.analysis.scenario import Slow, columns, own_times, with_columns
from tests.support.server.report_batches import ATTEMPT, RANKS, RUN, batch, ingest, select


def test_ranks_that_have_not_reported_are_missing(store: Store) -> None:
    rank, steps = columns(own_times(60, 2, seed=1))
    for number in range(2):
        ingest(store, batch(number, 0, steps=select(steps, np.flatnonzero(rank == number))))
    assert any("rank 2" in reason for reason in Reports(store).diagnostics(RUN, ATTEMPT)["missing"])


def slow_third(
    store: Store, count: int, *, ends: int | None = None, fewer: float = 0.0, **settings: wire.Scalar
) -> None:
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


def test_the_slow_rank_of_a_process_group_is_named(store: Store) -> None:
    """Ranks 1 and 3 reduce other gradients, and take longer, as do ranks 0 and 2."""
    own = own_times(60, 4, 1, (Slow(2, "backward", 60),))
    own[:, (1, 3)] *= 2
    rank, steps = columns(own)
    for number in range(4):
        settings: dict[str, wire.Scalar] = {"group_ranks": 2, "group_first": number % 2}
        hello = wire.Hello(host="node", pid=1, device="cpu", backend="gloo", versions={}, settings=settings)
        own_steps = select(steps, np.flatnonzero(rank == number))
        ingest(store, msgspec.structs.replace(batch(number, 0, steps=own_steps, hello=hello), world_size=4))
    findings, missing = judged(store)
    assert findings["straggler"]["ranks"] == [2]
    assert "straggler" not in missing
    table = RunColumns(store, RUN, ATTEMPT).stragglers(None, None)
    assert int(np.bincount(table["last_rank"]).argmax()) == 2


def test_ranks_of_the_one_process_group_are_compared(store: Store) -> None:
    slow_third(store, 60, group_ranks=3)
    assert judged(store)[0]["straggler"]["ranks"] == [2]


def test_ranks_of_files_that_do_not_tell_their_groups_are_not_compared(store: Store) -> None:
    slow_third(store, 300, not_compared="the files do not tell which ranks reduce gradients together")
    findings, missing = judged(store)
    assert "straggler" not in findings
    assert missing["straggler"] == "the files do not tell which ranks reduce gradients together"
