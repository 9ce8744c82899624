"""The contract of a finding's words, held by every finding that a test of the analysis makes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
from ddpobs_server.analysis.finding import Finding

MAX_VERDICT_WORDS = 12


def _holds(part: str, other: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(other)}(?!\w)", part) is not None


def faults_of(finding: Finding) -> list[str]:
    """What is wrong with the words of a finding."""
    parts = [part for part in (finding.verdict, finding.measure, finding.when, finding.cause, finding.where) if part]
    faults = [f"{part!r} ends with a full stop" for part in parts if part.endswith(".")]
    faults += [f"{part!r} repeats {other!r}" for part, other in permutations(parts, 2) if _holds(part, other)]
    if len(finding.verdict.split()) > MAX_VERDICT_WORDS:
        faults.append(f"{finding.verdict!r} has more than {MAX_VERDICT_WORDS} words")
    return faults


@pytest.fixture(autouse=True)
def _words_of_findings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check each finding of the test."""
    faults: list[str] = []
    make = Finding.__init__

    def checked(finding: Finding, *args: Any, **fields: Any) -> None:
        make(finding, *args, **fields)
        faults.extend(faults_of(finding))

    monkeypatch.setattr(Finding, "__init__", checked)
    yield
    assert faults == []
