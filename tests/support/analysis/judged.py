"""What a judgement holds: its findings, and the facts of a finding."""

from __future__ import annotations

from typing import TypeVar

from ddpobs_server.analysis.evidence import Judgement
from ddpobs_server.analysis.finding import Facts, Finding

F = TypeVar("F", bound=Facts)


def only(judgement: Judgement) -> Finding:
    """Return the finding of a judgement that has nothing else."""
    (finding,) = judgement
    assert isinstance(finding, Finding)
    return finding


def findings_in(judgement: Judgement) -> list[Finding]:
    """Return the findings, without the questions that were not judged."""
    return [result for result in judgement if isinstance(result, Finding)]


def facts_of(kind: type[F], finding: Finding) -> F:
    """Return the facts of a finding, which are of that kind."""
    assert isinstance(finding.evidence, kind)
    return finding.evidence
