"""The start line and the verdict of rank 0, against small HTTP servers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ddpobs.config import TelemetryConfig
from ddpobs.export.http_sender import Outcome, Response
from ddpobs.terminal.announcer import Announcer, start_line
from tests.support.integration.collectors import Reply, collector, status

STORED = Response(Outcome.STORED)


def announced(
    url: str, response: Response | None = STORED, *, rank: int = 0, size: int = 2, **settings: Any
) -> Announcer:
    announcer = Announcer(TelemetryConfig(collector=url, **settings), rank, size, lambda: response)
    announcer.start()
    announcer.identify("r")
    announcer.look()
    return announcer


@pytest.mark.parametrize(
    ("response", "size", "line"),
    [
        (STORED, 2, "ddpobs: http://c:1/base/runs/r"),
        (STORED, 1, "ddpobs: http://c:1/base/runs/r (one process only: there are no ranks to compare)"),
        (None, 2, "ddpobs: http://c:1/base has not answered; the batches of run r wait in /s"),
        (
            Response(Outcome.RETRY, "refused"),
            2,
            "ddpobs: http://c:1/base is not reachable (refused); the batches of run r wait in /s",
        ),
        (
            Response(Outcome.FORBIDDEN, "HTTP 401"),
            2,
            "ddpobs: http://c:1/base rejects the token (DDPOBS_TOKEN): HTTP 401; the batches of run r wait in /s",
        ),
        (
            Response(Outcome.REFUSED, "HTTP 413"),
            2,
            "ddpobs: no telemetry of run r: http://c:1/base refuses it: HTTP 413",
        ),
    ],
)
def test_the_start_line_has_the_address_or_the_reason_without_one(
    response: Response | None, size: int, line: str
) -> None:
    config = TelemetryConfig(collector="http://user:secret@c:1/base/", spool=Path("/s"))
    assert start_line(config, "r", size, response) == line


def test_the_start_line_waits_for_an_answer_and_comes_once(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[Response] = []
    announcer = Announcer(TelemetryConfig(), 0, 2, lambda: answers[0] if answers else None)
    assert announcer.look() is False
    announcer.identify("r")
    assert announcer.look() is False
    answers.append(STORED)
    assert (announcer.look(), announcer.look()) == (True, True)
    assert capsys.readouterr().err == "ddpobs: http://127.0.0.1:8321/runs/r\n"


def test_a_collector_that_does_not_answer_in_time_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    announcer = Announcer(TelemetryConfig(timeout_s=0.01), 0, 2, lambda: None)
    announcer.identify("r")
    time.sleep(0.02)
    assert announcer.look() is True
    assert "has not answered" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "quiet"), [(1, False), (0, True)])
def test_other_ranks_and_quiet_trainings_print_nothing(
    rank: int, quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    announced("http://127.0.0.1:9", rank=rank, quiet=quiet).end(1, delivered=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("live", ["running", "stalled", "hung"])
def test_the_verdict_waits_until_the_other_ranks_have_ended(live: str, capsys: pytest.CaptureFixture[str]) -> None:
    states = [live, live, "finished"]

    def reply(path: str) -> Reply:
        answers = {
            "/api/v1/runs/r/diagnostics": {"findings": [], "summary": f"{3 - len(states)} states seen", "missing": []},
            "/api/v1/runs/r/account": {"parts": []},
        }
        document = answers.get(path) or {"state": states.pop(0)}
        return 200, {}, json.dumps(document).encode()

    with collector(reply) as server:
        announced(server.url).end(30, delivered=True)
    assert "3 states seen" in capsys.readouterr().err


def test_a_collector_without_a_verdict_adds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with collector(status(500)) as server:
        announced(server.url).end(30, delivered=True)
    assert capsys.readouterr().err == f"ddpobs: {server.url}/runs/r\n"


def test_a_collector_that_hangs_is_given_up_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    def hang(path: str) -> Reply:
        time.sleep(1)
        return 200, {}, b"{}"

    with collector(hang) as server:
        announced(server.url, size=1).end(0.2, delivered=True)
    assert f"ddpobs: the findings were not ready in time: {server.url}/runs/r" in capsys.readouterr().err


def test_batches_that_are_not_delivered_leave_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with collector(status(500)) as server:
        announced(server.url, None).end(30, delivered=False)
        assert server.headers == []
    assert "has not answered; the batches of run r wait in" in capsys.readouterr().err
