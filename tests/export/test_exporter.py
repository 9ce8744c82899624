from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

from benchmarks.broken import broken
from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.export.exporter import Exporter
from ddpobs.export.identity import Envelope, Identity
from ddpobs.export.spool import Spool
from tests.integration.collectors import absent, acknowledge, collector, rubbish, status

IDENTITY = Identity(run="r", attempt="a" * 16, source="b" * 16, rank=0, world_size=1)


def encode(records: Sequence[object], envelope: Envelope) -> wire.Batch:
    events = [record for record in records if isinstance(record, wire.Event)]
    if len(events) < len(records):
        raise ValueError("no event")
    return wire.Batch(version=wire.VERSION, **vars(envelope), events=events)


def exporter(url: str, folder: Path, **settings: float) -> Exporter:
    config = TelemetryConfig(collector=url, spool=folder, flush_s=0.05, **settings)  # type: ignore[arg-type]
    made = Exporter(config, encode)
    made.identify(IDENTITY)
    made.start()
    return made


def event(kind: str = "e") -> wire.Event:
    return wire.Event(kind=kind, at_ns=1)


def kinds(puts: Sequence[tuple[str, bytes, float]]) -> list[str]:
    """Of all events in these requests."""
    return [one.kind for _, body, _ in puts for one in wire.decode(zstandard.decompress(body)).events]


def until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def test_a_batch_reaches_the_collector_whole(tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        sent = exporter(seen.url, tmp_path)
        assert sent.offer(event("hello"))
        sent.close()
    path, body, _ = seen.puts[0]
    assert path == f"/api/v1/runs/r/sources/{'b' * 16}/batches/0"
    assert wire.decode(zstandard.decompress(body)).events[0].kind == "hello"
    assert (sent.emitted, sent.dropped, list(tmp_path.iterdir())) == (1, 0, [])


def test_the_end_waits_for_what_the_device_is_not_through_with(tmp_path: Path) -> None:
    """Also where something follows that needs no device, as the goodbye does."""
    ready = threading.Event()
    with collector(acknowledge) as seen:
        config = TelemetryConfig(collector=seen.url, spool=tmp_path)
        sent = Exporter(config, encode, lambda record: record.kind != "late" or ready.is_set())  # type: ignore[attr-defined]
        sent.identify(IDENTITY)
        sent.start()
        for kind in ("late", "goodbye"):
            sent.offer(event(kind))
        threading.Timer(0.1, ready.set).start()
        sent.close()
    assert kinds(seen.puts) == ["late", "goodbye"]
    assert sent.dropped == 0


def test_what_the_last_periodic_calls_offer_travels(tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        sent = exporter(seen.url, tmp_path)
        offered: list[bool] = []
        sent.call_every(1000, lambda: sent._stopping and offered.append(sent.offer(event("peers"))))
        sent.close()
    assert all(offered)
    assert kinds(seen.puts) == ["peers"] * len(offered) != []


@pytest.mark.parametrize("reply", [status(500), status(503), status(429), status(408), rubbish])
def test_a_retry_has_the_same_body(tmp_path: Path, reply: Callable[..., object]) -> None:
    with collector(reply, acknowledge) as seen:  # type: ignore[arg-type]
        sent = exporter(seen.url, tmp_path)
        sent.offer(event())
        until(lambda: len(seen.puts) == 2)
        sent.close()
    assert seen.puts[0][:2] == seen.puts[1][:2]
    assert sent.dropped == 0


@pytest.mark.parametrize("code", [429, 503])
def test_retry_after_is_honoured(tmp_path: Path, code: int) -> None:
    with collector(status(code, Retry_After="1"), acknowledge) as seen:
        sent = exporter(seen.url, tmp_path)
        sent.offer(event())
        until(lambda: len(seen.puts) == 2)
        sent.close()
    assert seen.puts[1][2] - seen.puts[0][2] >= 1.0


@pytest.mark.parametrize("code", [409, 413, 422])
def test_a_refused_batch_is_dropped_and_counted(tmp_path: Path, code: int) -> None:
    with collector(status(code)) as seen:
        sent = exporter(seen.url, tmp_path)
        sent.offer(event(), weight=7)
        sent.close()
    assert (len(seen.puts), sent.dropped, list(tmp_path.iterdir())) == (1, 7, [])


@pytest.mark.parametrize("code", [401, 403, 421])
def test_a_wrong_token_or_name_keeps_the_batch_in_the_spool(tmp_path: Path, code: int) -> None:
    with collector(status(code)) as seen:
        sent = exporter(seen.url, tmp_path)
        sent.offer(event())
        sent.close()
    assert len(list(Spool(tmp_path, 10**6).batches())) == 1
    assert sent.dropped == 0


def test_an_absent_collector_leaves_the_batch_in_the_spool(tmp_path: Path) -> None:
    sent = exporter(absent(), tmp_path)
    sent.offer(event())
    sent.close()
    assert len(list(Spool(tmp_path, 10**6).batches())) == 1


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    full = Exporter(TelemetryConfig(spool=tmp_path, queue_records=2), encode)
    assert [full.offer(event(), weight=3) for _ in range(3)] == [True, True, False]
    assert (full.emitted, full.dropped) == (9, 3)


def test_a_record_may_take_several_places_in_the_queue(tmp_path: Path) -> None:
    made = Exporter(TelemetryConfig(spool=tmp_path, queue_records=5), encode)
    assert [made.offer(event(), weight=9, places=places) for places in (4, 2, 1, 1)] == [True, False, True, False]
    assert (made.emitted, made.dropped) == (36, 18)


def test_what_the_encoder_would_wait_for_holds_up_its_records_alone(tmp_path: Path) -> None:
    """A device that hangs never gets to its steps' ends: pulses tell so, if they do not wait for it too."""
    passed = threading.Event()
    with collector(acknowledge) as seen:
        config = TelemetryConfig(collector=seen.url, spool=tmp_path, flush_s=0.05)
        made = Exporter(config, encode, lambda record: passed.is_set() or record.kind == "pulse")  # type: ignore[attr-defined]
        made.identify(IDENTITY)
        made.call_every(0.01, lambda: made.offer_latest(event("pulse")))
        made.start()
        made.offer(event("step"))
        until(lambda: len(seen.puts) > 3)
        assert "step" not in kinds(seen.puts)
        passed.set()
        until(lambda: "step" in kinds(seen.puts))
        made.close()


def test_an_error_in_the_encoder_does_not_end_the_thread(tmp_path: Path) -> None:
    with collector(acknowledge) as seen:
        sent = exporter(seen.url, tmp_path)
        sent.offer(object())
        until(lambda: sent.dropped == 1)
        sent.offer(event())
        until(lambda: seen.puts)
        sent.close()
    sent.close()


def test_a_forked_child_has_no_exporter(tmp_path: Path) -> None:
    with broken("silent") as url:
        sent = exporter(url, tmp_path, exit_s=0.2)
        sent.offer(event())
        until(lambda: sent.queued_sizes)
        child = os.fork()
        if child == 0:
            os._exit(0 if not sent.offer(event()) and threading.active_count() == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert sent.offer(event())
        sent.close()


@pytest.mark.parametrize("known", [True, False])
def test_the_last_flush_waits_a_moment_for_whose_records_these_are(tmp_path: Path, known: bool) -> None:
    """A rank of a short run may be done before rank 0 shared the run's name; one that never hears it still ends."""
    with collector(acknowledge) as seen:
        made = Exporter(TelemetryConfig(collector=seen.url, spool=tmp_path), encode)
        heard_at = time.monotonic() + 0.3
        made.call_every(0.01, lambda: made.identify(IDENTITY) if known and time.monotonic() > heard_at else None)
        made.start()
        made.offer(event())
        began = time.monotonic()
        made.close()
    assert (len(seen.puts), made.dropped) == ((1, 0) if known else (0, 1))
    assert time.monotonic() - began < TelemetryConfig().exit_s


def test_ranks_that_began_at_different_times_work_at_the_same_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each did at its own time would hold up all the others."""
    now_s, booted_s, worked, cut = 0.0, 0.0, defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    clocks = SimpleNamespace(monotonic=lambda: now_s - booted_s, time=lambda: now_s)
    monkeypatch.setattr("ddpobs.export.exporter.time", clocks)

    def live(rank: int, began_s: float) -> None:
        nonlocal now_s, booted_s
        now_s, booted_s = began_s, 7.7 * rank
        made = Exporter(TelemetryConfig(spool=tmp_path, flush_s=2.0), encode)
        made.identify(IDENTITY)
        made._delivery.put = lambda _: cut[rank].append(round(now_s, 1))  # type: ignore[method-assign]
        made.call_every(0.5, lambda: worked[rank].append(round(now_s, 1)))
        while now_s < 9.0:
            made.offer(event())
            made._tick()
            made._cut_due()
            now_s += made._pause_s()

    live(0, 0.0)
    live(1, 1.3)
    live(2, 1.95)
    assert cut[0] == [2.0, 4.0, 6.0, 8.0]
    assert cut[1] == cut[2] == cut[0]
    assert worked[1][1:] == [one / 2 for one in range(3, 18)]
    assert worked[2][1:] == worked[0][-len(worked[2]) + 1 :]
