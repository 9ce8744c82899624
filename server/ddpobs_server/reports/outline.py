"""The part of a diagnosis that the list of runs and `/metrics` show; it is kept for thousands of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddpobs.shared.words import shown_findings

MAX_FINDINGS = 10
"""Findings of a run that are kept one by one: the most severe ones."""
PLACE_CHARACTERS, _MAX_RANKS = 160, 8
"""Longest place, and maximum ranks, in a text."""
FAILURES, STRAGGLER = ("crash", "lost", "replicas-differ"), "straggler"
"""Codes whose explanation is kept for labels."""


class Explanation(NamedTuple):
    """Why, where and when, and what to do: texts that stay the same from look to look, as a label must.

    Attributes:
        cause: Its cause, without figures that change; `not known, because …` if the data do not show it.
        where: Host, process and bucket.
        remedy: What to do.
        when: The time of a crash; else empty.
    """

    cause: str
    where: str
    remedy: str
    when: str


@dataclass(frozen=True)
class FindingOutline:
    """What a row or a label shows of a finding.

    Attributes:
        code: Its code.
        verdict: Its verdict.
        severity: Its severity.
        phase: Its phase; empty for none.
        ranks: Its ranks as a text, such as `0, 2 and 7 more`.
        gain: The predicted saving, as in a response; None if it is not known.
        explanation: Of a failure or a slow rank; None for any other.
    """

    code: str
    verdict: str
    severity: Any
    phase: str
    ranks: str
    gain: Any
    explanation: Explanation | None


@dataclass(frozen=True)
class DiagnosisOutline:
    """What a row or a label shows of a diagnosis.

    Attributes:
        findings: The most severe findings, at most `MAX_FINDINGS`.
        verdict: What the run is, as `ddpobs_server.analysis.verdict` has it.
        summary: The same in one sentence; empty with findings.
        worst: Verdict of the first finding that is shown as such; None without any.
        counts: Number of findings by code and severity.
        missing: Number of findings that could not be judged.
        goodput: Time in steps that no restart repeated, as a share of the run's wall time; None if it is not known.
        time_shares: Share of each group of the account in the wall time.
        telemetry: Cost of telemetry, as in a response; None if it is not known.
        hang: Place, ranks, remedy and host of a hang that has not ended; None without one.
    """

    findings: tuple[FindingOutline, ...]
    verdict: Any
    summary: str
    worst: str | None
    counts: Mapping[tuple[str, str], int]
    missing: int
    goodput: float | None
    time_shares: Mapping[str, float]
    telemetry: Mapping[str, float] | None
    hang: tuple[str, str, str, str] | None

    @classmethod
    def of(cls, diagnosis: Mapping[str, Any]) -> DiagnosisOutline:
        """Return the outline of a response with findings."""
        findings, shown = diagnosis["findings"], shown_findings(diagnosis)
        return cls(
            findings=tuple(map(_finding, findings[:MAX_FINDINGS])),
            verdict=diagnosis["verdict"],
            summary=diagnosis["summary"],
            worst=shown[0]["verdict"] if shown else None,
            counts=Counter((finding["code"], finding["severity"]) for finding in findings),
            missing=len(diagnosis["missing"]),
            goodput=diagnosis["goodput"],
            time_shares=diagnosis["time_shares"],
            telemetry=diagnosis.get("telemetry"),
            hang=_hang(findings),
        )


def _finding(finding: Mapping[str, Any]) -> FindingOutline:
    code, verdict, severity = finding["code"], finding["verdict"], finding["severity"]
    phase, ranks = finding["phase"] or "", _rank_list(finding)
    return FindingOutline(code, verdict, severity, phase, ranks, finding["gain"], _explanation(finding))


def _explanation(finding: Mapping[str, Any]) -> Explanation | None:
    code = finding["code"]
    if code not in (*FAILURES, STRAGGLER):
        return None
    cause = finding["evidence"].get("reason") or finding["cause"]
    return Explanation(cause, finding["where"], finding["remedy"], finding["when"] if code == "crash" else "")


def _hang(findings: Any) -> tuple[str, str, str, str] | None:
    hang = next((f for f in findings if f["code"] == "hang" and f["evidence"]["places"]), None)
    return None if hang is None else (_place(hang)[:PLACE_CHARACTERS], _rank_list(hang), hang["remedy"], hang["where"])


def _rank_list(finding: Mapping[str, Any]) -> str:
    """The ranks of a finding: `1`, `0, 2`; a long list is cut."""
    ranks, left_out = finding["ranks"], len(finding["ranks"]) - _MAX_RANKS
    return ", ".join(map(str, ranks[:_MAX_RANKS])) + (f" and {left_out} more" if left_out > 0 else "")


def _place(hang: Mapping[str, Any]) -> str:
    """Place of the first of these ranks: lines of Python, else its phase, else the kind of hang."""
    locations = hang["evidence"]["places"]
    location = next((locations[rank] for rank in hang["ranks"] if locations.get(rank)), "")
    return str(location or hang["phase"] or hang["evidence"]["kind"])
