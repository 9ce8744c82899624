"""The collector's log has a line per event, for any text from clients."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from ddpobs_server.operations import logs
from ddpobs_server.operations.commands import cli
from typer.testing import CliRunner

from benchmarks.rig.collector import collector
from tests.support.server.batches import batch, path, put

EVIL = 'x\n{"event": "forged"}\r\n2026-01-01T00:00:00Z [info] forged\x1b[2J\u2028forged\u202e'


@pytest.fixture
def lines() -> Iterator[Callable[[str], list[str]]]:
    """Configures logging in a style, logs two hostile texts, and returns the lines."""
    root, hooks = logging.getLogger(), (sys.excepthook, logging.getLogger().handlers[:], logging.getLogger().level)

    def write(style: str) -> list[str]:
        stream = io.StringIO()
        logs.configure("info", style, stream)
        log = logging.getLogger("tests")
        log.warning("a run: %s", EVIL, extra={"run": EVIL, "seq": 3})
        try:
            raise ValueError(EVIL)
        except ValueError:
            log.exception("it failed")
        return stream.getvalue().splitlines()

    yield write
    sys.excepthook, root.handlers[:], root.level = hooks


def test_json_has_an_object_per_line_for_any_text(lines: Callable[[str], list[str]]) -> None:
    first, second = map(json.loads, lines("json"))
    assert first["run"] == EVIL
    assert (first["level"], first["logger"], first["seq"]) == ("warning", "tests", 3)
    assert "ValueError" in second["exception"]


def test_text_of_a_client_never_begins_a_line_on_a_terminal(lines: Callable[[str], list[str]]) -> None:
    written = lines("text")
    first_lines = [line for line in written if not line.startswith("    ")]
    assert len(first_lines) == 2
    assert all("[warning" in line or "[error" in line for line in first_lines)
    assert all(line.isprintable() for line in written)


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_kind_of_line_is_written_ten_times_and_then_counted(
    lines: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    lines("json")
    stream, now = io.StringIO(), time.monotonic()
    monkeypatch.setattr(f"{logs.__name__}.time.monotonic", lambda: now)
    logs.configure("info", "json", stream)

    def log_event(number: int, kind: str = "this") -> None:
        logging.getLogger("tests").log(level, f"it happened: {number}", extra={"kind": kind})

    for number in range(25):
        log_event(number)
    log_event(0, "that")
    assert len(stream.getvalue().splitlines()) == 11
    now += 11
    log_event(25)
    assert json.loads(stream.getvalue().splitlines()[-1])["suppressed"] == 15


def test_a_refusal_is_logged_with_its_run_source_and_reason(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        put(running.url, batch("a-run", seq=7))
        conflicting = put(running.url, batch("a-run", seq=7, emitted=99))
        headers = {"Content-Type": "application/json", "X-Request-ID": "job-17"}
        assert (
            httpx.put(running.url + path(batch("bad")), content=b"{", headers=headers).headers["x-request-id"]
            == "job-17"
        )
        httpx.put(f"{running.url}/api/v1/runs/a%0Ab%22/sources/zz/batches/0", headers={"X-Request-ID": "a b"})
        with httpx.Client(base_url=running.url) as client:
            for _ in range(30):
                client.get("/api/v1/runs", params={"limit": "many"})
        running.end()
        written = [json.loads(line) for line in running.log.read_text().splitlines()]
    refused = [line for line in written if line["event"] == "request refused"]
    conflict, malformed, forged, *queries = refused
    assert (conflict["run"], conflict["source"], conflict["seq"]) == ("a-run", f"{0:016x}", "7")
    assert (conflict["status"], conflict["problem"], conflict["client"]) == (409, "Conflict", "127.0.0.1")
    assert conflict["request"] == conflicting.headers["x-request-id"]
    assert malformed["request"] == "job-17"
    assert "expected a batch" in malformed["detail"]
    assert forged["run"] == 'a\nb"'
    assert forged["request"] != "a b"
    assert len(queries) == 9, "with the line before, ten of a kind"
    assert not any("GET /" in line["event"] for line in written), "the access log is off by default"


def test_level_format_and_access_log_are_settings(tmp_path: Path) -> None:
    with collector(tmp_path, log_format="text", access_log=True) as running:
        httpx.get(f"{running.url}/healthz?x=%0Aforged")
        running.end()
        text = running.log.read_text()
    assert "GET /healthz?x=%0Aforged" in text
    assert not any(line.startswith("{") for line in text.splitlines())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--log-level", "loud"), "log_level"),
        (("--trusted-proxies", "10.0.0.0/24,proxy"), "got proxy"),
        (("--tls-key", "key.pem"), "no tls_cert"),
    ],
)
def test_invalid_flags_are_refused(flags: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(cli, ["serve", *flags])
    assert done.exit_code == 2
    assert message in done.stderr
