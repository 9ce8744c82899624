"""The ledger of series counts what `/metrics` shows."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from ddpobs_server.ingest import series_ledger
from ddpobs_server.ingest.series_ledger import RANK_SERIES, RUN_SERIES, SeriesLedger
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store, UnavailableError
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.workspace_limits import WorkspaceLimits

from ddpobs import wire
from tests.support.server.batches import batch

_SERIES = RUN_SERIES + 2 * RANK_SERIES
_GOODBYE = wire.Event(kind="goodbye", at_ns=0)


class _Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(series_ledger, "time", clock)
    return clock


class _Sender:
    """Sends batches of two ranks through a ledger with room for a run of two ranks."""

    def __init__(self, store: Store) -> None:
        settings = Settings(max_series=_SERIES, quiet_after_s=300)
        self.ledger, self._store = SeriesLedger(settings, WorkspaceLimits(settings, store), store), store

    def put(self, run: str, attempt: str = "a", **fields: Any) -> None:
        for rank in range(2):
            payload = batch(run, rank=rank, attempt=attempt * 16, source=f"{attempt}{rank:015x}", **fields)
            self.ledger.check(payload)
            self._store.ingest([Arrival(payload, f"{run} {payload.source}".encode(), 1, 1)])
            self.ledger.stored(payload)


@pytest.fixture
def sender(store: Store) -> _Sender:
    return _Sender(store)


def test_a_run_that_is_over_counts_as_long_as_its_series_are_shown(clock: _Clock, sender: _Sender) -> None:
    sender.put("ended", events=[_GOODBYE])
    clock.now_s += 59
    assert sender.ledger.series() == {"default": _SERIES}
    with pytest.raises(Problem, match="try again once other runs"):
        sender.put("next")
    clock.now_s += 12
    sender.put("next")
    assert sender.ledger.series() == {"default": _SERIES}
    clock.now_s += 71  # This one has not ended.
    assert sender.ledger.series() == {"default": _SERIES}
    with pytest.raises(Problem, match="try again once other runs"):
        sender.put("third")
    clock.now_s += 300
    assert sender.ledger.series() == {}
    assert sender.ledger.used_ratio("max_run_series") == 0


def test_a_run_with_a_rank_that_goes_on_counts(clock: _Clock, sender: _Sender, store: Store) -> None:
    sender.put("run")
    store.ingest([Arrival(batch("run", 1, source=f"a{0:015x}", events=[_GOODBYE]), b"1", 1, 1)])
    clock.now_s += 200
    assert sender.ledger.series() == {"default": _SERIES}


def test_a_run_that_is_launched_again_counts_again(clock: _Clock, sender: _Sender) -> None:
    sender.put("run", events=[_GOODBYE])
    clock.now_s += 71
    assert sender.ledger.series() == {}
    sender.put("run", "b")
    clock.now_s += 71
    assert sender.ledger.series() == {"default": _SERIES}


def test_ends_in_a_store_that_is_away_are_looked_up_later(
    clock: _Clock, sender: _Sender, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.put("run", events=[_GOODBYE])
    clock.now_s += 71
    with monkeypatch.context() as away:
        away.setattr(store, "going_on", Mock(side_effect=UnavailableError("away", full=False)))
        assert sender.ledger.series() == {"default": _SERIES}
    clock.now_s += 71
    assert sender.ledger.series() == {}
