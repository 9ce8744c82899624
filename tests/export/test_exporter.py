"""The exporter's queue and thread against real HTTP servers."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

from benchmarks.broken import broken
from benchmarks.rig import patience
from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.export.exporter import Exporter
from ddpobs.export.spool import Spool
from tests.support.exporters import IDENTITY, encode, event, exporter, kinds
from tests.support.integration.collectors import Reply, absent, acknowledge, collector, rubbish, status


def test_a_batch_reaches_the_collector_whole(tmp_path: Path) -> None:
    with collector(acknowledge) as server:
        running = exporter(server.url, tmp_path)
        assert running.offer(event("hello"))
        running.close()
    path, body, _ = server.puts[0]
    assert path == f"/api/v1/runs/r/sources/{'b' * 16}/batches/0"
    assert wire.decode(zstandard.decompress(body)).events[0].kind == "hello"
    assert (running.emitted, running.dropped, list(tmp_path.iterdir())) == (1, 0, [])


def test_close_waits_for_records_that_the_device_has_not_finished(tmp_path: Path) -> None:
    """A record that needs no device, such as the goodbye, may follow."""
    ready = threading.Event()
    with collector(acknowledge) as server:
        config = TelemetryConfig(collector=server.url, spool=tmp_path)
        running = Exporter(config, encode, lambda record: record.kind != "late" or ready.is_set())  # type: ignore[attr-defined]
        running.identify(IDENTITY)
        running.start()
        for kind in ("late", "goodbye"):
            running.offer(event(kind))
        threading.Timer(0.1, ready.set).start()
        running.close()
    assert kinds(server.puts) == ["late", "goodbye"]
    assert running.dropped == 0


def test_records_from_the_last_periodic_calls_are_sent(tmp_path: Path) -> None:
    with collector(acknowledge) as server:
        running = exporter(server.url, tmp_path)
        offered: list[bool] = []

        def offer_at_the_end() -> None:
            if running._stopping:
                offered.append(running.offer(event("peers")))

        running.call_every(1000, offer_at_the_end)
        running.close()
    assert all(offered)
    assert kinds(server.puts) == ["peers"] * len(offered) != []


@pytest.mark.parametrize("reply", [status(500), status(503), status(429), status(408), rubbish])
def test_a_retry_has_the_same_body(tmp_path: Path, reply: Callable[[str], Reply]) -> None:
    with collector(reply, acknowledge) as server:
        running = exporter(server.url, tmp_path)
        running.offer(event())
        patience.until(lambda: len(server.puts) == 2)
        running.close()
    assert server.puts[0][:2] == server.puts[1][:2]
    assert running.dropped == 0


@pytest.mark.parametrize("code", [429, 503])
def test_retry_after_is_honoured(tmp_path: Path, code: int) -> None:
    with collector(status(code, Retry_After="1"), acknowledge) as server:
        running = exporter(server.url, tmp_path)
        running.offer(event())
        patience.until(lambda: len(server.puts) == 2)
        running.close()
    assert server.puts[1][2] - server.puts[0][2] >= 1.0


@pytest.mark.parametrize("code", [409, 413, 422])
def test_a_refused_batch_is_dropped_and_counted(tmp_path: Path, code: int) -> None:
    with collector(status(code)) as server:
        running = exporter(server.url, tmp_path)
        running.offer(event(), weight=7)
        running.close()
    assert (len(server.puts), running.dropped, list(tmp_path.iterdir())) == (1, 7, [])


@pytest.mark.parametrize("code", [401, 403, 421])
def test_a_wrong_token_or_name_keeps_the_batch_in_the_spool(tmp_path: Path, code: int) -> None:
    with collector(status(code)) as server:
        running = exporter(server.url, tmp_path)
        running.offer(event())
        running.close()
    assert len(list(Spool(tmp_path, 10**6).batches())) == 1
    assert running.dropped == 0


def test_an_absent_collector_leaves_the_batch_in_the_spool(tmp_path: Path) -> None:
    running = exporter(absent(), tmp_path)
    running.offer(event())
    running.close()
    assert len(list(Spool(tmp_path, 10**6).batches())) == 1


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    full = Exporter(TelemetryConfig(spool=tmp_path, queue_records=2), encode)
    assert [full.offer(event(), weight=3) for _ in range(3)] == [True, True, False]
    assert (full.emitted, full.dropped) == (9, 3)


def test_a_record_may_take_several_slots_of_the_queue(tmp_path: Path) -> None:
    full = Exporter(TelemetryConfig(spool=tmp_path, queue_records=5), encode)
    assert [full.offer(event(), weight=9, slots=slots) for slots in (4, 2, 1, 1)] == [True, False, True, False]
    assert (full.emitted, full.dropped) == (36, 18)


def test_a_record_that_is_not_ready_does_not_delay_pulses(tmp_path: Path) -> None:
    """A device that hangs never reaches the end of its steps. Pulses report the hang, so they must not wait for it."""
    passed = threading.Event()
    with collector(acknowledge) as server:
        config = TelemetryConfig(collector=server.url, spool=tmp_path, flush_s=0.05)
        waiting = Exporter(config, encode, lambda record: passed.is_set() or record.kind == "pulse")  # type: ignore[attr-defined]
        waiting.identify(IDENTITY)
        waiting.call_every(0.01, lambda: waiting.offer_latest(event("pulse")))
        waiting.start()
        waiting.offer(event("step"))
        patience.until(lambda: len(server.puts) > 3)
        assert "step" not in kinds(server.puts)
        passed.set()
        patience.until(lambda: "step" in kinds(server.puts))
        waiting.close()


def test_an_error_in_the_encoder_does_not_end_the_thread(tmp_path: Path) -> None:
    with collector(acknowledge) as server:
        running = exporter(server.url, tmp_path)
        running.offer(object())
        patience.until(lambda: running.dropped == 1)
        running.offer(event())
        patience.until(lambda: server.puts)
        running.close()
    running.close()


def test_a_forked_child_has_no_exporter(tmp_path: Path) -> None:
    with broken("silent") as url:
        running = exporter(url, tmp_path, exit_s=0.2)
        running.offer(event())
        patience.until(lambda: running.queued_sizes)
        child = os.fork()
        if child == 0:
            os._exit(0 if not running.offer(event()) and threading.active_count() == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert running.offer(event())
        running.close()


@pytest.mark.parametrize("shared", [True, False])
def test_the_last_flush_waits_a_moment_for_the_identity(
    tmp_path: Path, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A short run may end before rank 0 has shared the identity. A rank without an identity still ends."""
    with collector(acknowledge) as server:
        exit_s = 20.0 if shared else 4.0  # Without an identity, it waits for half of that.
        waiting = Exporter(TelemetryConfig(collector=server.url, spool=tmp_path, exit_s=exit_s), encode)
        shared_at = time.monotonic() + 0.3
        waiting.call_every(
            0.01, lambda: waiting.identify(IDENTITY) if shared and time.monotonic() > shared_at else None
        )
        waiting.start()
        waiting.offer(event())
        began = time.monotonic()
        waiting.close()
    assert (len(server.puts), waiting.dropped) == ((1, 0) if shared else (0, 1))
    assert ("lost 1 records: the run's id had not arrived" in caplog.text) == (not shared)
    assert time.monotonic() - began < exit_s


def test_ranks_that_started_at_different_times_work_at_the_same_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work at different moments would delay all other ranks each time."""
    now_s, booted_s, worked, cut = 0.0, 0.0, defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    clocks = SimpleNamespace(monotonic=lambda: now_s - booted_s, time=lambda: now_s)
    monkeypatch.setattr("ddpobs.export.schedule.time", clocks)

    def live(rank: int, began_s: float) -> None:
        nonlocal now_s, booted_s
        now_s, booted_s = began_s, 7.7 * rank
        waiting = Exporter(TelemetryConfig(spool=tmp_path, flush_s=2.0), encode)
        waiting.identify(IDENTITY)
        monkeypatch.setattr(waiting._delivery, "put", lambda _: cut[rank].append(round(now_s, 1)))
        waiting.call_every(0.5, lambda: worked[rank].append(round(now_s, 1)))
        while now_s < 9.0:
            waiting.offer(event())
            waiting._tick()
            waiting._cut_due()
            now_s += waiting._schedule.pause_s()

    live(0, 0.0)
    live(1, 1.3)
    live(2, 1.95)
    assert cut[0] == [2.0, 4.0, 6.0, 8.0]
    assert cut[1] == cut[2] == cut[0]
    assert worked[1][1:] == [number / 2 for number in range(3, 18)]
    assert worked[2][1:] == worked[0][-len(worked[2]) + 1 :]


def test_an_urgent_record_is_sent_at_once(tmp_path: Path) -> None:
    with collector(acknowledge) as server:
        config = TelemetryConfig(collector=server.url, spool=tmp_path, flush_s=3600)
        running = Exporter(config, encode)
        running.identify(IDENTITY)
        looks = 0

        def look() -> None:
            nonlocal looks
            looks += 1
            if looks == 2:
                running.offer_latest(event("stuck"), urgent=True)
                running.offer_latest(event("later"))

        running.offer(event("waits"))
        running.call_every(0.1, look)
        running.start()
        patience.until(lambda: server.puts)
        assert kinds(server.puts) == ["waits", "stuck"]
        running.close()
