"""Tables of the HTML report have no column without a value."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from ddpobs_server.figures.report_tables import report_tables
from ddpobs_server.reports.attempts import AttemptOutcome
from ddpobs_server.store import Source

from ddpobs import wire
from tests.support.server.batches import ATTEMPT, hello

FAILED = AttemptOutcome(ATTEMPT, 0, "failed", "OSError", 0, 10**18, 10**18 + 10**9, 2, 2, 0)


def source(**facts: str) -> Source:
    return Source(
        *("0" * 16, ATTEMPT, 0, 2, 1, 0, 1, 0, 0),
        anchor=wire.Anchor(wall_ns=1, monotonic_ns=0),
        hello=msgspec.structs.replace(hello(), **facts),
        pulse=None,
        goodbye=False,
        ended="failed",
        stuck_ns=0,
        first_seen_ns=1,
    )


def test_a_column_without_a_value_is_left_out() -> None:
    ranks, _ = report_tables([source(host="unknown", device=""), source(host="unknown")], [FAILED], [], {})
    assert ranks.columns == ("rank", "process", "device", "steps", "end")
    assert ranks.rows == [("0", "7", "", "0", "failed"), ("0", "7", "cpu", "0", "failed")]
    ranks, settings = report_tables([replace(source(), dropped=1200)], [], [], {"device": "unknown", "torch": "2.13"})
    assert (ranks.columns[-1], ranks.rows[0][-1]) == ("dropped", "1,200")
    assert settings.rows == [("torch", "2.13")]


def test_a_rank_that_got_sigterm_has_the_words_of_the_page() -> None:
    ranks, _ = report_tables([replace(source(), ended="terminated")], [FAILED], [], {})
    assert [row[-1] for row in ranks.rows] == ["ended by SIGTERM"]


def test_an_attempt_has_its_begin_and_its_end() -> None:
    _, attempts = report_tables([source()], [FAILED, replace(FAILED, ordinal=1, ended_ns=None)], [], {})
    assert attempts.columns[-2:] == ("began", "ended")
    assert [row[-2:] for row in attempts.rows] == [
        ("2001-09-09 01:46:40 UTC", "2001-09-09 01:46:41 UTC"),
        ("2001-09-09 01:46:40 UTC", "–"),
    ]
