"""Batches that are missing before later batches, from live and ended sources."""

from __future__ import annotations

from typing import Any

from ddpobs_server.reports.reports import Reports
from ddpobs_server.store import Arrival, Store

from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, hello, steps
from tests.support.server.statement_counts import recorded

OTHER: dict[str, Any] = {"attempt": "b" * 16, "source": "b" * 16}


def ingest(store: Store, *batches: wire.Batch) -> None:
    store.ingest(
        [Arrival(sent_batch, bytes([sent_batch.rank, sent_batch.seq]) * 16, 100, 10**18) for sent_batch in batches]
    )


def flagged(rank: int, *seqs: int) -> list[wire.Batch]:
    """Batches of twenty steps from a rank with `find_unused_parameters`."""
    flagged_hello = hello()
    flagged_hello.settings["find_unused_parameters"] = True
    return [batch("run", seq, rank, hello=flagged_hello, steps=steps(20 * seq, 20)) for seq in seqs]


def codes(store: Store) -> tuple[set[str], set[str]]:
    """Codes of the findings, and codes without a judgement."""
    answer = Reports(store).diagnostics("run", ATTEMPT)
    return {finding["code"] for finding in answer["findings"]}, {text.partition(":")[0] for text in answer["missing"]}


def test_the_flag_is_not_judged_while_a_batch_of_any_rank_is_missing(store: Store) -> None:
    ingest(store, *flagged(0, 0, 1, 2, 3), *flagged(1, 0, 1, 3))
    assert codes(store) == (set(), {"find-unused-needless", "utilisation-swings"})
    ingest(store, *flagged(1, 2))
    assert codes(store) == ({"find-unused-needless"}, set())


def test_a_gap_in_another_attempt_does_not_count(store: Store) -> None:
    ingest(store, *flagged(0, 0, 1, 2, 3), *flagged(1, 0, 1, 2, 3), batch("run", 5, **OTHER))
    assert codes(store) == ({"find-unused-needless"}, set())
    assert store.has_gaps("run", OTHER["attempt"])


def test_batches_are_counted_only_if_fewer_are_stored_than_the_last_numbers_imply(store: Store) -> None:
    ingest(store, *flagged(0, 0, 1, 2), *flagged(1, 0, 1), batch("run", 0, **OTHER))
    with recorded(store._engine) as executed:
        assert not store.has_gaps("run", ATTEMPT)
    assert not [statement for statement in executed if "count(" in statement]
    ingest(store, *flagged(1, 3))
    with recorded(store._engine) as executed:
        assert store.has_gaps("run", ATTEMPT)
    assert [statement for statement in executed if "count(" in statement]
