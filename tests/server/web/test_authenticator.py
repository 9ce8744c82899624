"""Floods of wrong and of new tokens: how often the database is read, and who has to wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from ddpobs_server.app import create_app
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store, Token
from ddpobs_server.web.authenticator import Authenticator, new_token
from ddpobs_server.web.problems import Problem

from benchmarks.rig import databases
from benchmarks.rig.collector import collector
from tests.support.server.batches import assert_problem
from tests.support.server.serving import served
from tests.support.server.tokens import create_token


class RecordingStore(Store):
    """Records the times at which the tokens are read."""

    token_reads: ClassVar[list[float]] = []

    def tokens(self) -> list[Token]:
        self.token_reads.append(time.monotonic())
        return super().tokens()


@pytest.fixture
def token_reads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times at which the tokens are read; empty at first."""
    monkeypatch.setattr(RecordingStore, "token_reads", [])
    return RecordingStore.token_reads


@pytest.fixture
def database(tmp_path: Path) -> str:
    return databases.sqlite(tmp_path)


@pytest.fixture
def authenticator(database: str, token_reads: list[float]) -> Iterator[Authenticator]:
    """An authenticator that has read its tokens: s3cret from the settings and one from the database."""
    create_token(database, "first", "default", "read")
    store = RecordingStore(database)
    authenticator = Authenticator(Settings(database_url=database, token="s3cret"), store)
    authenticator.refresh()
    yield authenticator
    store.close()


@pytest.fixture
def statuses(authenticator: Authenticator) -> Iterator[Callable[..., set[int]]]:
    """A function: the set of statuses of concurrent requests from one address, one for each token."""

    async def call(token: str) -> int:
        try:
            await authenticator.refresh_if_stale(f"Bearer {token}", "here")
            authenticator.caller(f"Bearer {token}", "here")
        except Problem as refused:
            return int(refused.document["status"])
        return 200

    async def call_all(tokens: tuple[str, ...]) -> set[int]:
        return set(await asyncio.gather(*map(call, tokens)))

    with asyncio.Runner() as loop:
        yield lambda *tokens: loop.run(call_all(tokens))


def test_a_flood_of_wrong_tokens_reads_the_database_once_a_second(
    statuses: Callable[..., set[int]], token_reads: list[float]
) -> None:
    for count in (10, 100):
        wrong = [new_token("", "", [])[0] for _ in range(count)]
        assert statuses(*wrong) <= {401, 429}
    assert statuses(new_token("", "", [])[0]) == {429}
    assert len(token_reads) == 3
    assert min(later - earlier for earlier, later in pairwise(token_reads)) > 0.9


def test_unknown_tokens_do_not_delay_a_known_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs_server.web.authenticator._REFRESH_S", 5.0)
    database = f"sqlite:///{tmp_path}/runs.db"
    headers = {"Authorization": f"Bearer {create_token(database, 'known', 'default', 'read')}"}
    app = create_app(Settings(database_url=database))
    with served(app) as (host, port), ThreadPoolExecutor(16) as strangers:
        url = f"http://{host}:{port}/api/v1/runs"
        assert httpx.get(url, headers=headers).status_code == 200

        def send_wrong_token(_: int) -> float:
            httpx.get(url, headers={"Authorization": f"Bearer {new_token('', '', [])[0]}"})
            return time.monotonic()

        requests = [strangers.submit(send_wrong_token, number) for number in range(16)]
        while not any(request.running() for request in requests):
            time.sleep(0.001)
        assert httpx.get(url, headers=headers).status_code == 200
        answered = time.monotonic()
        assert sum(request.result() > answered for request in requests) > 4, "more wait than there are read slots"


def test_a_token_that_cannot_be_new_does_not_read_the_database(
    statuses: Callable[..., set[int]], authenticator: Authenticator, token_reads: list[float], database: str
) -> None:
    store = Store(database)
    revoked, record = new_token("gone", "default", ["read"])
    store.add_token(record)
    store.revoke_token(record.token_id, time.time_ns())
    store.close()
    authenticator.refresh()
    assert statuses(revoked, revoked[:-1] + "!", "guess", "ddpobs_0_0") == {401}
    assert len(token_reads) == 2


def test_a_new_token_does_not_count_as_a_wrong_one(statuses: Callable[..., set[int]], database: str) -> None:
    new = create_token(database, "new", "default", "read")
    assert statuses(*[new] * 30) == {200}
    assert statuses("s3cret") == {200}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_revoking_the_last_token_does_not_allow_anonymous_access(tmp_path: Path, host: str) -> None:
    settings = Settings(database_url=databases.migrated_sqlite(tmp_path), host=host)
    token = create_token(settings.database_url, "last", "default", "read")
    store = Store(settings.database_url)
    authenticator = Authenticator(settings, store)
    authenticator.refresh()
    assert authenticator.caller(f"Bearer {token}", "here").scopes == {"read"}
    assert store.revoke_token(token.split("_")[1], time.time_ns())
    authenticator.refresh()
    for header in ("", f"Bearer {token}"):
        with pytest.raises(Problem) as refused:
            authenticator.caller(header, "here")
        assert refused.value.status == 401
    store.close()


def test_an_address_has_to_wait_after_many_wrong_tokens(tmp_path: Path) -> None:
    with collector(tmp_path, token="s3cret") as running:
        for number in range(20):
            wrong = {"Authorization": f"Bearer guess-{number}"}
            assert_problem(httpx.get(f"{running.url}/api/v1/runs", headers=wrong), 401)
        refused = httpx.get(f"{running.url}/api/v1/runs", headers={"Authorization": "Bearer s3cret"})
        assert_problem(refused, 429)
        assert 0 < int(refused.headers["retry-after"]) <= 61
