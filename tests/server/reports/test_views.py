"""Data of figures about a run whose steps are large."""

from __future__ import annotations

import pytest
from ddpobs_server.reports.views import RunViews
from ddpobs_server.store import Store, TooManyRowsError

from tests.support.server.report_batches import ATTEMPT, RANKS, RUN, fill


def test_a_step_is_drawn_from_its_own_spans_if_those_around_are_too_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 60)
    views = RunViews(store, RUN, ATTEMPT)
    whole = views.timeline(30, None, None)
    monkeypatch.setattr("ddpobs_server.store.queries.column_queries._MAX_BYTES", 2_000)
    with pytest.raises(TooManyRowsError):
        views.timeline(30, None, None)
    monkeypatch.setattr("ddpobs_server.reports.views._ALIGNED_SPANS", 5 * 2 * RANKS - 1)
    alone = views.timeline(30, None, None)
    assert alone.spans.bucket.tolist() == whole.spans.bucket.tolist() == [0, 1] * RANKS
