"""Findings reach a real receiver, once, signed, after failures too; and ingest waits for nothing of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ddpobs_server.app import create_app
from ddpobs_server.operations import webhook_job, webhook_sender
from ddpobs_server.operations.webhook_job import WebhookJob
from ddpobs_server.operations.webhook_message import Message, headers_of
from ddpobs_server.reports.reports import Reports
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, NotificationKey, Store
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from benchmarks.rig import databases, patience
from benchmarks.rig.databases import Fresh
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, pulse
from tests.support.server.http_receiver import Receiver, http_receiver
from tests.support.server.in_process import client, fill, put

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with http_receiver() as running:
        yield running


class Clock:
    """A monotonic clock that the test sets."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def job_of(store: Store, url: str, clock: Clock, **settings: Any) -> WebhookJob:
    given = Settings(webhook_url=url, webhook_after_s=settings.pop("webhook_after_s", 0), **settings)
    reports = Reports(store)
    reports.diagnostics("slow", ATTEMPT)  # A round waits only a second for the first diagnosis.
    return WebhookJob(given, store, reports, CollectorRegistry(), clock)


@pytest.fixture
def filled(fresh: Fresh, tmp_path: Path) -> Iterator[Store]:
    """A store with a run whose last rank has a slow backward."""
    url = fresh(tmp_path)
    with client(url) as http:
        fill(http, "slow", 3)
    store = Store(url)
    yield store
    store.close()


@pytest.mark.usefixtures("no_time_passes")
def test_a_finding_is_sent_once_by_all_collectors_together(filled: Store, receiver: Receiver) -> None:
    settings: dict[str, Any] = {"webhook_secret": SECRET, "public_url": "https://ddpobs.example"}
    for _ in range(2):
        job = job_of(filled, receiver.url + "/hook", Clock(), **settings)
        for _ in range(2):
            job.judge()
            job.send_due()
    (request,) = [each for each in receiver.requests if b'"straggler"' in each.body]
    document = json.loads(request.body)
    assert (request.path, document["type"]) == ("/hook", "findings")
    data = document["data"]
    assert (data["run"], data["workspace"], data["address"]) == ("slow", "default", "https://ddpobs.example/runs/slow")
    assert data["findings"][0]["ranks"] == [2]
    assert data["findings"][0]["verdict"].startswith("Rank 2 is slow in backward")
    signed = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.".encode() + request.body
    digest = hmac.new(b64decode(SECRET.removeprefix("whsec_")), signed, hashlib.sha256).digest()
    assert request.headers["webhook-signature"] == f"v1,{b64encode(digest).decode()}"
    assert len({each.headers["webhook-id"] for each in receiver.requests}) == len(receiver.requests)


def test_a_lost_run_is_sent_once_with_the_ranks_that_were_last_heard_and_their_places(
    fresh: Fresh, tmp_path: Path, receiver: Receiver
) -> None:
    store = Store(fresh(tmp_path))
    store.migrate()
    for rank in range(2):
        body = wire.encode(batch("silent", 0, rank, pulse=pulse("code", place="train.py:31")))
        arrival = Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), time.time_ns() - 100 * 10**9)
        store.ingest([arrival])
    settings = Settings(webhook_url=receiver.url, webhook_after_s=0)
    reports = Reports(store)
    reports.diagnostics("silent", ATTEMPT)  # A round waits only a second for the first diagnosis.
    job = WebhookJob(settings, store, reports, CollectorRegistry(), Clock())
    for _ in range(2):
        job.judge()
        job.send_due()
    store.close()
    (request,) = receiver.requests
    (finding,) = json.loads(request.body)["data"]["findings"]
    assert (finding["code"], finding["severity"], finding["ranks"]) == ("lost", "warning", [0, 1])
    assert finding["where"] == "ranks 0 and 1 in backward of step 7 (train.py:31)"
    assert finding["cause"].startswith("not known")


def test_the_signature_is_that_of_the_published_example() -> None:
    """From the tests of the libraries of Standard Webhooks."""
    message = Message(NotificationKey("", "", "", ""), "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}')
    signature = headers_of(message, SECRET, 1614265330)["webhook-signature"]
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.usefixtures("no_time_passes")
def test_slack_gets_a_text_in_its_own_form_without_foreign_markup(filled: Store, receiver: Receiver) -> None:
    job = job_of(filled, receiver.url, Clock(), webhook_form="slack", public_url="https://ddpobs.example")
    job.judge()
    job.send_due()
    (text,) = [text for each in receiver.requests if "is slow" in (text := json.loads(each.body)["text"])]
    assert text.startswith("Run <https://ddpobs.example/runs/slow|slow> (workspace default)\n*critical: Rank 2 is slow")
    assert "• do: " in text
    assert "webhook-signature" not in receiver.requests[0].headers


@pytest.mark.usefixtures("no_time_passes")
def test_a_finding_waits_until_it_holds_for_the_time_of_the_settings(filled: Store, receiver: Receiver) -> None:
    clock = Clock()
    job = job_of(filled, receiver.url, clock, webhook_after_s=60)
    for now_s, is_sent in ((0, False), (59, False), (60, True)):
        clock.now_s = 1000 + now_s
        job.judge()
        job.send_due()
        assert bool(receiver.requests) == is_sent


@pytest.mark.usefixtures("no_time_passes")
def test_a_message_is_sent_again_after_failures_and_no_sooner_than_requested(filled: Store, receiver: Receiver) -> None:
    clock = Clock()
    receiver.replies += [(503, {}), (429, {"Retry-After": "120"})]
    job = job_of(filled, receiver.url, clock)
    job.judge()
    for advance_s, requests in ((0, 1), (0, 1), (1, 2), (119, 2), (1, 3)):
        clock.now_s += advance_s
        if requests < 3:
            job.send_due()
            assert len(receiver.requests) == requests
    job.send_due()
    assert len(receiver.requests) >= 3
    assert len({each.headers["webhook-id"] for each in receiver.requests[:3]}) == 1
    assert filled.sent_notifications("slow", ATTEMPT)


@pytest.mark.usefixtures("no_time_passes")
@pytest.mark.parametrize("status", [400, 302])
def test_a_refused_message_is_not_sent_again(
    filled: Store, receiver: Receiver, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.replies += [(status, {})] * 20
    job = job_of(filled, receiver.url + "/s3cret", Clock())
    job.judge()
    job.send_due()
    count = len(receiver.requests)
    job.judge()
    job.send_due()
    assert len(receiver.requests) == count > 0
    assert f"HTTP {status}" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.usefixtures("no_time_passes")
def test_a_message_to_nobody_is_given_up_and_claimed_again_after_its_lease(filled: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    clock = Clock()
    job = job_of(filled, address, clock)
    job.judge()
    waiting = job._sender.waiting
    while job._sender.waiting:
        clock.now_s += 61
        job.send_due()
    assert clock.now_s - 1000 > webhook_sender.MAX_AGE_S
    key = waiting[0].key
    claimed_ns = 2**62
    assert filled.claim_notification(key, claimed_ns, webhook_job._LEASE_NS)
    assert not filled.claim_notification(key, claimed_ns + 1, webhook_job._LEASE_NS)
    filled.release_notification(key)
    assert filled.claim_notification(key, 1, webhook_job._LEASE_NS)


def test_batches_are_stored_while_the_receiver_does_not_answer(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_job, "PERIOD_S", 0.1)
    receiver.may_reply.clear()
    settings = Settings(database_url=databases.migrated_sqlite(tmp_path), webhook_url=receiver.url, webhook_after_s=0)
    with TestClient(create_app(settings)) as http:
        fill(http, "slow", 3)
        patience.until(lambda: receiver.requests)
        put(http, batch("other"))
        assert http.get("/readyz").status_code == 200
        receiver.may_reply.set()


@pytest.mark.parametrize(
    "setting", [{"webhook_url": "ftp://s3cret"}, {"webhook_secret": "s3cret"}, {"webhook_secret": "whsec_c2hvcnQ="}]
)
def test_an_unusable_setting_is_refused_without_its_value(setting: dict[str, str]) -> None:
    with pytest.raises(ValidationError) as error:
        Settings(**setting)  # type: ignore[arg-type]
    assert "s3cret" not in str(error.value.errors(include_input=False)[0]["msg"])
