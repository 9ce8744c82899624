"""Delivery under every fault of a collector: bounded in time and memory, nothing lost, and nobody waits for it."""

from __future__ import annotations

import os
import socket
import threading
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from benchmarks.broken import FAULTS, broken
from ddpobs.config import TelemetryConfig
from ddpobs.export import delivery
from ddpobs.export.http_sender import Answer, Outcome, Sender
from ddpobs.export.spool import Encoded, Spool
from tests.export.test_exporter import event, exporter, kinds, until
from tests.integration.collectors import absent, acknowledge, collector, status


def kept(folder: Path) -> int:
    """Records in the spool."""
    return sum(one.records for one in Spool(folder, 10**9).batches())


def send(url: str, within_s: float = 20.0) -> Answer:
    """One batch to that address; fails where the sender does not come back."""
    answers: list[Answer] = []
    sender = Sender(TelemetryConfig(collector=url))
    asking = lambda: answers.append(sender.send("r", "b" * 16, 0, b"x" * 10**6, within_s))  # noqa: E731
    threading.Thread(target=asking, daemon=True).start()
    until(lambda: answers, 15.0)
    sender.close()
    return answers[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_exit_is_bounded_and_loses_nothing_whatever_the_collector_does(tmp_path: Path, fault: str) -> None:
    with broken(fault) as url:
        sent = exporter(url, tmp_path, exit_s=0.4, timeout_s=60.0)
        sent.offer(event(), weight=3)
        until(lambda: sent.queued_sizes)
        sent.offer(event(), weight=4)
        began = time.monotonic()
        sent.close()
        assert time.monotonic() - began < 20.0, "bounded by exit_s, not by timeout_s"
    assert (kept(tmp_path), sent.dropped) == (7, 0)


def test_batches_that_ranks_cut_together_are_not_sent_together(tmp_path: Path) -> None:
    """Each rank waits its own time, always the same, for longer where they come seldom; at the end nothing waits."""
    with collector(acknowledge) as seen:
        config = TelemetryConfig(collector=seen.url, spool=tmp_path, flush_s=40.0)
        ranks = [delivery.Delivery(config, lambda _: None, delivery.Once()) for _ in range(64)]
        spread = [rank.spread_s(100.0) for rank in ranks]
        assert min(spread) >= 0
        assert max(spread) <= 40
        assert max(spread) - min(spread) > 10
        assert max(rank.spread_s(0.1) for rank in ranks) <= 0.1
        assert spread == [rank.spread_s(100.0) for rank in ranks]
        made = ranks[spread.index(max(spread))]
        made.start()
        for seq in range(3):
            made.put(Encoded("r", "b" * 16, seq, 1, b"x"))
        time.sleep(0.2)
        assert (len(seen.puts), len(made.held)) == (0, 3)
        made.close(time.monotonic() + 20)
        assert [path.rpartition("/")[2] for path, *_ in seen.puts] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("fault", "within_s"),
    [("drops", 0.2), ("waits", 0.2), ("silent", 0.2), ("headers", 20.0), ("endless", 20.0), ("drips", 1.3)],
)
def test_a_request_ends_in_time_however_slowly_it_is_answered(fault: str, within_s: float) -> None:
    """Bytes of what drips come sooner than `within_s`: each by itself is in time."""
    with broken(fault) as url:
        assert send(url, within_s).outcome is Outcome.RETRY


def test_the_thread_works_on_while_a_request_hangs(tmp_path: Path) -> None:
    rounds: list[int] = []
    with broken("silent") as url:
        sent = exporter(url, tmp_path, exit_s=0.2, timeout_s=60.0)
        sent.call_every(0.01, lambda: rounds.append(sent.offer_latest(event("pulse"))))  # type: ignore[func-returns-value,arg-type]
        sent.offer(event())
        until(lambda: sent.queued_sizes)
        since = len(rounds)
        until(lambda: len(rounds) > since + 20)
        assert len(sent.queued_sizes) == 1, "news alone wait for one another"
        sent.offer(event("step"))
        until(lambda: len(sent.queued_sizes) == 2)
        sent.close()


def test_memory_holds_a_few_batches_and_the_disk_the_others(tmp_path: Path) -> None:
    with broken("silent") as url:
        sent = exporter(url, tmp_path, exit_s=0.2, timeout_s=60.0, batch_spans=1)
        for _ in range(60):
            sent.offer(event())
        until(lambda: kept(tmp_path) + len(sent.queued_sizes) == 60)
        assert len(sent.queued_sizes) <= delivery.WAITING_BATCHES + 1
        sent.close()
    assert (kept(tmp_path), sent.dropped) == (60, 0)


def test_what_went_to_disk_is_sent_once_the_collector_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "WAITING_BATCHES", 1)
    with collector(status(500), status(503), acknowledge) as seen:
        sent = exporter(seen.url, tmp_path, batch_spans=1)
        for number in range(8):
            sent.offer(event(str(number)))
        until(lambda: {str(number) for number in range(8)} <= set(kinds(seen.puts[2:])))
        sent.close()
    assert (kept(tmp_path), sent.dropped) == (0, 0)


@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_pause_that_the_collector_asks_for_is_kept_at_exit_too(tmp_path: Path, code: int, form: str) -> None:
    asked = "60" if form == "seconds" else formatdate(time.time() + 60, usegmt=True)
    with collector(status(code, Retry_After=asked)) as seen:
        sent = exporter(seen.url, tmp_path)
        sent.offer(event())
        until(lambda: seen.puts)
        sent.close()
        assert 30 < send(seen.url).retry_after_s <= 60
    assert (len(seen.puts), kept(tmp_path), sent.dropped) == (2, 1, 0)


@pytest.mark.parametrize("asked", ["soon", "-5", "nan", "Mon, 01 Jan 0001 00:00:00 -0000"])
def test_a_pause_that_makes_no_sense_is_none(asked: str) -> None:
    with collector(status(503, Retry_After=asked)) as seen:
        assert send(seen.url) == Answer(Outcome.RETRY, 'HTTP 503: {"detail": "no"}', 0.0)


def test_a_wrong_token_is_said_once_and_seldom_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert delivery.FORBIDDEN_PAUSE_S >= 60, "a collector counts wrong tokens by address, those of all ranks there"
    monkeypatch.setattr(delivery, "FORBIDDEN_PAUSE_S", 0.0)
    with collector(status(403)) as seen:
        sent = exporter(seen.url, tmp_path)
        sent.offer(event())
        until(lambda: len(seen.puts) > 2)
        sent.close()
    assert [record.message for record in caplog.records if "another token" in record.message] == [
        'ddpobs: the collector wants another token (DDPOBS_TOKEN): HTTP 403: {"detail": "no"}'
    ]
    assert kept(tmp_path) == 1


def test_a_redirect_says_where_to() -> None:
    with broken("redirects") as url:
        assert "redirected to http://127.0.0.1:9/" in send(url).detail


def test_a_name_that_does_not_resolve_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        asked.set()
        answered.wait(60)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    sent = exporter("http://collector.invalid:8321", tmp_path, exit_s=0.4)
    sent.offer(event())
    assert asked.wait(20)
    sent.offer(event())
    until(lambda: len(sent.queued_sizes) == 2)
    sent.close()
    assert (kept(tmp_path), sent.dropped) == (2, 0)
    answered.set()


def test_proxies_of_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", absent())
    monkeypatch.setenv("ALL_PROXY", absent())
    with collector(acknowledge) as seen:
        assert send(seen.url).outcome is Outcome.STORED


def test_a_sender_that_cannot_be_made_leaves_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("httpcore.default_ssl_context", lambda: open("/no/such/certificates"))  # noqa: PTH123, SIM115
    sent = exporter("https://127.0.0.1:9", tmp_path)
    sent.offer(event())
    sent.close()
    assert (kept(tmp_path), sent.dropped) == (1, 0)


@pytest.mark.parametrize("fault", ["unlink", "read_bytes"])
def test_a_disk_that_fails_ends_no_delivery_and_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What was sent cannot be removed, or cannot be read nor renamed: the next ones are sent all the same."""
    monkeypatch.setattr(delivery, "WAITING_BATCHES", 1)
    broken_path: list[str] = []
    works = {name: getattr(Path, name) for name in ("unlink", "read_bytes", "rename")}

    def failing(name: str) -> Any:
        def call(path: Path, *args: Any, **kwargs: Any) -> Any:
            if path.suffix == ".batch" and (not broken_path or path.name in broken_path):
                broken_path[:] = [path.name]
                raise OSError(5, "Input/output error")
            return works[name](path, *args, **kwargs)

        return call

    with collector(status(500), status(503), acknowledge) as seen:
        sent = exporter(seen.url, tmp_path, batch_spans=1)
        for name in {"unlink": ("unlink",), "read_bytes": ("read_bytes", "rename")}[fault]:
            monkeypatch.setattr(Path, name, failing(name))
        for number in range(8):
            sent.offer(event(str(number)))
        until(lambda: len(set(kinds(seen.puts[2:])) & set(map(str, range(8)))) == (8 if fault == "unlink" else 7))
        sent.offer(event("last"))
        until(lambda: "last" in kinds(seen.puts[2:]))
        sent.close()
    assert sent.dropped == (0 if fault == "unlink" else 1)


def test_a_disk_that_fails_does_not_hold_up_what_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be neither listed nor written, as a stale handle of NFS."""
    monkeypatch.setattr(delivery, "WAITING_BATCHES", 1)
    listed, wrote = os.listdir, Path.write_bytes

    def stale(works: Any) -> Any:
        def call(path: Any = ".", *args: Any) -> Any:
            if tmp_path in (Path(path), Path(path).parent):
                raise OSError(116, "Stale file handle")
            return works(path, *args)

        return call

    with collector(status(500), status(500), acknowledge) as seen:
        sent = exporter(seen.url, tmp_path, batch_spans=1)
        for number in range(4):
            sent.offer(event(str(number)))
        until(lambda: list(tmp_path.glob("*.batch")))
        monkeypatch.setattr(os, "listdir", stale(listed))
        monkeypatch.setattr(Path, "write_bytes", stale(wrote))
        until(lambda: sent._delivery._disk_failed > 3)
        sent.offer(event("last"))
        until(lambda: "last" in kinds(seen.puts[2:]), 10.0)
        sent.close()


def test_what_another_run_left_in_a_full_spool_is_no_loss_of_this_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Spool(tmp_path, 10**9).put(Encoded("earlier", "c" * 16, 0, 1000, b"x" * 1900), 0, lambda *_: None)
    sent = exporter(absent(), tmp_path, spool_mb=0.002, exit_s=0.2)
    sent.offer(event())
    sent.close()
    assert (kept(tmp_path), sent.dropped) == (1, 0)
    assert "run earlier" in caplog.text


def test_an_address_of_ipv6_keeps_its_brackets() -> None:
    """As proxies demand: httpcore by itself leaves them out."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no IPv6 on the loopback: {error}")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        asked: list[bytes] = []

        def answer() -> None:
            line, _ = server.accept()
            with line:
                asked.append(line.recv(65536))

        threading.Thread(target=answer, daemon=True).start()
        send(f"http://[::1]:{port}", 2.0)
    assert f"\r\nHost: [::1]:{port}\r\n".encode() in asked[0]
