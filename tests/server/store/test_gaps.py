"""Batches that are missing before others, whether or not their source still sends."""

from __future__ import annotations

from ddpobs_server.reports.reports import Reports
from ddpobs_server.store import Arrival, Store

from ddpobs import wire
from tests.server.batches import ATTEMPT, batch, hello, steps
from tests.server.statement_counts import recorded

OTHER = {"attempt": "b" * 16, "source": "b" * 16}


def ingest(store: Store, *batches: wire.Batch) -> None:
    store.ingest([Arrival(one, bytes([one.rank, one.seq]) * 16, 100, 10**18) for one in batches])


def flagged(rank: int, *seqs: int) -> list[wire.Batch]:
    """Twenty steps each, of a rank that looks for unused parameters."""
    told = hello()
    told.settings["find_unused_parameters"] = True
    return [batch("run", seq, rank, hello=told, steps=steps(20 * seq, 20)) for seq in seqs]


def judged(store: Store) -> tuple[set[str], set[str]]:
    """Codes of the findings, and of what could not be judged."""
    told = Reports(store).diagnostics("run", ATTEMPT)
    return {finding["code"] for finding in told["findings"]}, {what.partition(":")[0] for what in told["missing"]}


def test_the_flag_is_not_called_needless_while_a_batch_of_any_rank_is_missing(store: Store) -> None:
    ingest(store, *flagged(0, 0, 1, 2, 3), *flagged(1, 0, 1, 3))
    assert judged(store) == (set(), {"find-unused-needless"})
    ingest(store, *flagged(1, 2))
    assert judged(store) == ({"find-unused-needless"}, set())


def test_a_gap_of_another_attempt_is_none_of_this_one(store: Store) -> None:
    ingest(store, *flagged(0, 0, 1, 2, 3), *flagged(1, 0, 1, 2, 3), batch("run", 5, **OTHER))
    assert judged(store) == ({"find-unused-needless"}, set())
    assert store.has_gaps("run", OTHER["attempt"])


def test_batches_are_counted_only_where_fewer_are_stored_than_the_last_ones_tell(store: Store) -> None:
    ingest(store, *flagged(0, 0, 1, 2), *flagged(1, 0, 1), batch("run", 0, **OTHER))
    with recorded(store._engine) as seen:
        assert not store.has_gaps("run", ATTEMPT)
    assert not [statement for statement in seen if "count(" in statement]
    ingest(store, *flagged(1, 3))
    with recorded(store._engine) as seen:
        assert store.has_gaps("run", ATTEMPT)
    assert [statement for statement in seen if "count(" in statement]
