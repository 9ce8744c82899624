"""The account of a run of many attempts reads and returns a bounded part of them."""

from __future__ import annotations

import msgspec
import pytest
from ddpobs_server.reports.reports import Reports
from ddpobs_server.store import Store

from tests.support.server.report_batches import RUN, batch, ingest
from tests.support.server.statement_counts import recorded

MANY = 40


def attempt_id(number: int) -> str:
    return f"{number:016x}"


def ingest_attempts(store: Store, count: int, world_size: int) -> None:
    for number in range(count):
        payload = msgspec.structs.replace(
            batch(0, 0), attempt=attempt_id(number), source=attempt_id(number), world_size=world_size
        )
        ingest(store, payload, received_ns=number + 1)


@pytest.fixture
def reports(store: Store) -> Reports:
    return Reports(store, now_ns=lambda: 10**9)


def test_an_account_covers_the_latest_attempts_that_fit(store: Store, reports: Reports) -> None:
    ingest_attempts(store, MANY, 16_384 // 4)
    account = reports.account(RUN, attempt_id(MANY - 1))
    assert [part["attempt"] for part in account["attempts"]] == [attempt_id(n) for n in range(MANY - 4, MANY)]
    assert account["attempts_left_out"] == MANY - 4
    assert len(account["missing"]) == 16_384


def test_an_account_contains_an_earlier_attempt_that_is_requested(store: Store, reports: Reports) -> None:
    ingest_attempts(store, MANY, 16_384 // 4)
    account = reports.account(RUN, attempt_id(9))
    assert [part["attempt"] for part in account["attempts"]] == [attempt_id(n) for n in (6, 7, 8, 9)]


def test_the_latest_attempt_is_covered_whatever_its_size(store: Store, reports: Reports) -> None:
    ingest_attempts(store, 2, 16_385)
    account = reports.account(RUN, attempt_id(1))
    assert (len(account["attempts"]), account["attempts_left_out"]) == (1, 1)


def test_the_statements_of_a_diagnosis_do_not_depend_on_the_number_of_attempts(store: Store) -> None:
    counts = []
    for attempts in (2, MANY):
        ingest_attempts(store, attempts, 1)
        with recorded() as statements:
            Reports(store, now_ns=lambda: 10**9).diagnostics(RUN, attempt_id(attempts - 1))
        counts.append(len(statements))
    assert counts[0] == counts[1]
