"""Delivery under every fault of a collector: bounded in time and memory, without losses and without waiting threads."""

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
from benchmarks.rig import patience
from ddpobs.config import TelemetryConfig
from ddpobs.export import delivery
from ddpobs.export.http_sender import Outcome, Response, Sender
from ddpobs.export.once import Once
from ddpobs.export.spool import Encoded, Spool
from tests.support.exporters import event, exporter, kinds
from tests.support.integration.collectors import absent, acknowledge, collector, status


def spooled(folder: Path) -> int:
    """Number of records in the spool."""
    return sum(batch.records for batch in Spool(folder, 10**9).batches())


def send(url: str, within_s: float = 20.0) -> Response:
    """Send one batch to that address; fails if the sender does not return."""
    answers: list[Response] = []
    sender = Sender(TelemetryConfig(collector=url))
    request = lambda: answers.append(sender.send("r", "b" * 16, 0, b"x" * 10**6, within_s))  # noqa: E731
    threading.Thread(target=request, daemon=True).start()
    patience.until(lambda: answers, limit_s=15.0)
    sender.close()
    return answers[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_exit_is_bounded_and_loses_nothing_with_any_fault(tmp_path: Path, fault: str) -> None:
    with broken(fault) as url:
        running = exporter(url, tmp_path, exit_s=0.4, timeout_s=60.0)
        running.offer(event(), weight=3)
        patience.until(lambda: running.queued_sizes)
        running.offer(event(), weight=4)
        began = time.monotonic()
        running.close()
        assert time.monotonic() - began < 20.0, "bounded by exit_s, not by timeout_s"
    assert (spooled(tmp_path), running.dropped) == (7, 0)


def test_ranks_send_at_different_moments(tmp_path: Path) -> None:
    """Each rank waits a constant share of the time between batches; at the end nothing waits."""
    with collector(acknowledge) as server:
        config = TelemetryConfig(collector=server.url, spool=tmp_path, flush_s=40.0)
        ranks = [delivery.Delivery(config, lambda _: None, Once()) for _ in range(64)]
        spread = [rank.spread_s(100.0) for rank in ranks]
        assert min(spread) >= 0
        assert max(spread) <= 40
        assert max(spread) - min(spread) > 10
        assert max(rank.spread_s(0.1) for rank in ranks) <= 0.1
        assert spread == [rank.spread_s(100.0) for rank in ranks]
        latest = ranks[spread.index(max(spread))]
        latest.start()
        for seq in range(3):
            latest.put(Encoded("r", "b" * 16, seq, 1, b"x"))
        time.sleep(0.2)
        assert (len(server.puts), len(latest.queued_sizes)) == (0, 3)
        latest.close(time.monotonic() + 20)
        assert [path.rpartition("/")[2] for path, *_ in server.puts] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("fault", "within_s"),
    [("drops", 0.2), ("waits", 0.2), ("silent", 0.2), ("headers", 20.0), ("endless", 20.0), ("drips", 1.3)],
)
def test_a_request_ends_in_time_even_if_the_answer_is_slow(fault: str, within_s: float) -> None:
    """The fault `drips` sends each single byte within `within_s`."""
    with broken(fault) as url:
        assert send(url, within_s).outcome is Outcome.RETRY


def test_the_thread_continues_while_a_request_hangs(tmp_path: Path) -> None:
    rounds: list[int] = []
    with broken("silent") as url:
        running = exporter(url, tmp_path, exit_s=0.2, timeout_s=60.0)
        running.call_every(0.01, lambda: rounds.append(running.offer_latest(event("pulse"))))  # type: ignore[func-returns-value,arg-type]
        running.offer(event())
        patience.until(lambda: running.queued_sizes)
        since = len(rounds)
        patience.until(lambda: len(rounds) > since + 20)
        assert len(running.queued_sizes) == 1, "pulses alone wait for the previous batch"
        running.offer(event("step"))
        patience.until(lambda: len(running.queued_sizes) == 2)
        running.close()


def test_a_few_batches_stay_in_memory_and_the_rest_go_to_disk(tmp_path: Path) -> None:
    with broken("silent") as url:
        running = exporter(url, tmp_path, exit_s=0.2, timeout_s=60.0, batch_spans=1)
        for _ in range(60):
            running.offer(event())
        patience.until(lambda: spooled(tmp_path) == 60)
        assert len(running.queued_sizes) <= delivery.WAITING_BATCHES + 1
        running.close()
    assert (spooled(tmp_path), running.dropped) == (60, 0)


def test_spooled_batches_are_sent_when_the_collector_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "WAITING_BATCHES", 1)
    with collector(status(500), status(503), acknowledge) as server:
        running = exporter(server.url, tmp_path, batch_spans=1)
        for number in range(8):
            running.offer(event(str(number)))
        patience.until(lambda: {str(number) for number in range(8)} <= set(kinds(server.puts[2:])))
        running.close()
    assert (spooled(tmp_path), running.dropped) == (0, 0)


@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_the_collectors_pause_is_respected_at_exit_too(tmp_path: Path, code: int, form: str) -> None:
    value = "60" if form == "seconds" else formatdate(time.time() + 60, usegmt=True)
    with collector(status(code, Retry_After=value)) as server:
        running = exporter(server.url, tmp_path)
        running.offer(event())
        patience.until(lambda: server.puts)
        running.close()
        assert 30 < send(server.url).retry_after_s <= 60
    assert (len(server.puts), spooled(tmp_path), running.dropped) == (2, 1, 0)


@pytest.mark.parametrize("value", ["soon", "-5", "nan", "Mon, 01 Jan 0001 00:00:00 -0000"])
def test_a_meaningless_pause_is_ignored(value: str) -> None:
    with collector(status(503, Retry_After=value)) as server:
        assert send(server.url) == Response(Outcome.RETRY, 'HTTP 503: {"detail": "no"}', 0.0)


def test_a_wrong_token_is_logged_once_and_seldom_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert delivery.FORBIDDEN_PAUSE_S >= 60, "a collector counts wrong tokens by address, which ranks share"
    monkeypatch.setattr(delivery, "FORBIDDEN_PAUSE_S", 0.0)
    with collector(status(403)) as server:
        running = exporter(server.url, tmp_path)
        running.offer(event())
        patience.until(lambda: len(server.puts) > 2)
        running.close()
    assert [record.message for record in caplog.records if "rejects the token" in record.message] == [
        'ddpobs: the collector rejects the token (DDPOBS_TOKEN): HTTP 403: {"detail": "no"}'
    ]
    assert spooled(tmp_path) == 1


def test_a_redirect_is_reported_with_its_target() -> None:
    with broken("redirects") as url:
        assert "redirected to http://127.0.0.1:9/" in send(url).detail


def test_a_name_that_does_not_resolve_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested, answered = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        requested.set()
        answered.wait(60)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    running = exporter("http://collector.invalid:8321", tmp_path, exit_s=0.4)
    running.offer(event())
    assert requested.wait(20)
    running.offer(event())
    patience.until(lambda: len(running.queued_sizes) == 2)
    running.close()
    assert (spooled(tmp_path), running.dropped) == (2, 0)
    answered.set()


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", absent())
    monkeypatch.setenv("ALL_PROXY", absent())
    with collector(acknowledge) as server:
        assert send(server.url).outcome is Outcome.STORED


def test_a_sender_that_cannot_be_created_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("httpcore.default_ssl_context", lambda: open("/no/such/certificates"))  # noqa: PTH123, SIM115
    running = exporter("https://127.0.0.1:9", tmp_path)
    running.offer(event())
    running.close()
    assert (spooled(tmp_path), running.dropped) == (1, 0)


def test_a_batch_is_on_disk_until_it_is_acknowledged(tmp_path: Path) -> None:
    with collector(status(503, Retry_After="2"), acknowledge) as server:
        running = exporter(server.url, tmp_path)
        running.offer(event("first"))
        patience.until(lambda: len(server.puts) == 1)
        running.offer(event("second"))
        patience.until(lambda: spooled(tmp_path) == 2)  # One waits for its second request, the other for its first.
        patience.until(lambda: {"first", "second"} <= set(kinds(server.puts[1:])) and spooled(tmp_path) == 0)
        running.close()
    assert (spooled(tmp_path), running.dropped) == (0, 0)


def test_a_batch_is_copied_while_a_request_hangs(tmp_path: Path) -> None:
    with broken("silent") as url:
        running = exporter(url, tmp_path, exit_s=0.2, timeout_s=60.0)
        running.offer(event("first"))
        patience.until(lambda: running._delivery._in_flight)
        running.offer(event("second"))
        patience.until(lambda: spooled(tmp_path) == 2)
        running.close()
    assert (spooled(tmp_path), running.dropped) == (2, 0)


def test_a_spool_that_cannot_be_written_changes_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with collector(acknowledge) as server:
        running = exporter(server.url, tmp_path / "file")
        running.offer(event("first"))
        patience.until(lambda: "first" in kinds(server.puts))
        running.offer(event("second"))
        patience.until(lambda: "second" in kinds(server.puts))
        running.close()
    assert (running.dropped, caplog.text) == (0, "")


def test_a_copy_displaces_no_other_batch_and_is_displaced_by_none(tmp_path: Path) -> None:
    earlier = Spool(tmp_path, 10**9)
    earlier.put(Encoded("earlier", "c" * 16, 0, 1000, b"x" * 1900), 0, lambda *_: None)
    with broken("silent") as url:
        running = exporter(url, tmp_path, spool_mb=0.002, exit_s=0.2, timeout_s=60.0)
        running.offer(event())
        patience.until(lambda: running._delivery._in_flight)
        assert [batch.run for batch in earlier.batches()] == ["earlier"]
        running.close()
    spool = Spool(tmp_path, 25)
    copy = spool.put_if_room(Encoded("r", "b" * 16, 0, 5, b"x" * 20), 0)
    assert copy is None
    for batch in list(spool.batches()):
        spool.remove(batch, 10**6)
    copy = spool.put_if_room(Encoded("r", "b" * 16, 0, 5, b"x" * 20), 0)
    assert copy is not None
    spool.copies.add(copy.path)
    spool.put(Encoded("r", "b" * 16, 1, 5, b"x" * 20), 1, lambda *_: None)
    assert [batch.seq for batch in spool.batches()] == [0, 1]


def test_the_batches_of_a_dead_process_are_sent(tmp_path: Path) -> None:
    """A refused batch of another process is no loss of this one."""
    spool = Spool(tmp_path, 10**9)
    with collector(acknowledge, status(409), acknowledge) as server:
        running = exporter(server.url, tmp_path)
        running.offer(event())
        patience.until(lambda: len(server.puts) == 1)
        spool.put(Encoded("r", "d" * 16, 7, 5, b"x"), 0, lambda *_: None)
        spool.put(Encoded("r", "d" * 16, 8, 5, b"x"), 1, lambda *_: None)
        running.adopt({"d" * 16})
        patience.until(lambda: len(server.puts) == 3 and spooled(tmp_path) == 0)
        running.close()
    sent = [path.rpartition("sources/")[2] for path, *_ in server.puts[1:]]
    assert sent == [f"{'d' * 16}/batches/7", f"{'d' * 16}/batches/8"]
    assert running.dropped == 0


@pytest.mark.parametrize("fault", ["unlink", "read_bytes"])
def test_a_failing_disk_does_not_end_the_delivery_and_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A sent file cannot be removed, or a file can neither be read nor renamed. Later files are still sent."""
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

    with collector(status(500), status(503), acknowledge) as server:
        running = exporter(server.url, tmp_path, batch_spans=1)
        for name in {"unlink": ("unlink",), "read_bytes": ("read_bytes", "rename")}[fault]:
            monkeypatch.setattr(Path, name, failing(name))
        for number in range(8):
            running.offer(event(str(number)))
        patience.until(
            lambda: len(set(kinds(server.puts[2:])) & set(map(str, range(8)))) == (8 if fault == "unlink" else 7)
        )
        running.offer(event("last"))
        patience.until(lambda: "last" in kinds(server.puts[2:]))
        running.close()
    assert running.dropped == (0 if fault == "unlink" else 1)


def test_a_failing_disk_does_not_delay_batches_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder can be neither listed nor written, like a stale handle of NFS."""
    monkeypatch.setattr(delivery, "WAITING_BATCHES", 1)
    listed, wrote = os.listdir, Path.write_bytes

    def stale(works: Any) -> Any:
        def call(path: Any = ".", *args: Any) -> Any:
            if tmp_path in (Path(path), Path(path).parent):
                raise OSError(116, "Stale file handle")
            return works(path, *args)

        return call

    with collector(status(500), status(500), acknowledge) as server:
        running = exporter(server.url, tmp_path, batch_spans=1)
        for number in range(4):
            running.offer(event(str(number)))
        patience.until(lambda: list(tmp_path.glob("*.batch")))
        monkeypatch.setattr(os, "listdir", stale(listed))
        monkeypatch.setattr(Path, "write_bytes", stale(wrote))
        patience.until(lambda: running._delivery._backlog._failures > 3)
        running.offer(event("last"))
        patience.until(lambda: "last" in kinds(server.puts[2:]), limit_s=10.0)
        running.close()


def test_dropped_batches_of_another_run_are_not_counted_as_losses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Spool(tmp_path, 10**9).put(Encoded("earlier", "c" * 16, 0, 1000, b"x" * 1900), 0, lambda *_: None)
    running = exporter(absent(), tmp_path, spool_mb=0.002, exit_s=0.2)
    running.offer(event())
    running.close()
    assert (spooled(tmp_path), running.dropped) == (1, 0)
    assert "run earlier" in caplog.text


def test_an_address_of_ipv6_keeps_its_brackets() -> None:
    """Proxies require them, and httpcore alone omits them."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no IPv6 on the loopback: {error}")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        requests: list[bytes] = []

        def answer() -> None:
            line, _ = server.accept()
            with line:
                requests.append(line.recv(65536))

        threading.Thread(target=answer, daemon=True).start()
        send(f"http://[::1]:{port}", 2.0)
    assert f"\r\nHost: [::1]:{port}\r\n".encode() in requests[0]
