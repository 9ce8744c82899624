"""The verdict about a run: the whole diagnosis of its spooled batches, compared with the known fault."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import zstandard
from ddpobs_server.reports.diagnosis import Diagnosis
from ddpobs_server.store import Arrival, Store

from benchmarks.causes import evidence_of
from benchmarks.diagnosis.cases import Expected
from ddpobs import wire
from ddpobs.export.spool import Spool

PREFIXES = (36, 40, 45, 50, 60, 70, 80, 90, 100, 110, 120)
"""Numbers of steps after which the run is diagnosed."""
_EDGE_STEPS = 4
"""Most steps by which an end of an interval may be off."""
_ALARMS = ("warning", "critical")


class JudgedRun:
    """A run whose batches are read from a spool into a store of its own."""

    def __init__(self, folder: Path) -> None:
        database = folder / "judged.db"
        for file in folder.glob("judged.db*"):
            file.unlink()
        self._store = Store(f"sqlite:///{database}")
        self._store.migrate()
        arrivals = [_arrival(spooled.body()) for spooled in Spool(folder / "spool", 2**30).batches()]
        self._store.ingest(arrivals)
        self.run = arrivals[0].batch.run
        known = self._store.run(self.run)
        assert known is not None
        self._attempt = known.attempt

    def findings(self, last: int | None = None) -> list[dict[str, Any]]:
        """Diagnose the run, or its steps up to `last`."""
        findings = Diagnosis(self._store).diagnose(self.run, self._attempt, last=last)["findings"]
        return [_without_bulk(finding) for finding in findings]

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def _arrival(body: bytes) -> Arrival:
    batch = wire.decode(zstandard.decompress(body, max_output_size=2**28))
    if batch.spans is not None:
        batch = msgspec.structs.replace(batch, packed_spans=wire.pack_spans(batch.spans))
    return Arrival(batch, hashlib.sha256(body).digest(), len(body), time.time_ns())


def _without_bulk(finding: dict[str, Any]) -> dict[str, Any]:
    names = (
        "cause",
        "kind",
        "excess_ns",
        "phase_excess_ns",
        "late_share",
        "lost_share",
        "chance",
        "cause_ns",
        "shares",
        "turns",
    )
    kept = ("code", "severity", "title", "ranks", "phase", "buckets", "parameters", "intervals", "steps")
    evidence = {name: value for name, value in finding["evidence"].items() if name in names}
    return {name: finding[name] for name in kept} | {"evidence": evidence}


def verdict(folder: Path, expected: Expected) -> dict[str, Any]:
    """Diagnose a run with a fault, and compare."""
    run = JudgedRun(folder)
    findings = run.findings()
    injected = injected_of(folder)
    first = finding_about(findings, expected)
    right = compared(first, expected, injected) if first else {"named": False}
    answer: dict[str, Any] = right | {
        "findings": findings,
        "injected": injected,
        "other_alarms": [finding["code"] for finding in _others(findings, expected)],
    }
    if expected.code == "straggler" and expected.interval is None and expected.kind in ("persistent", None):
        named = (steps for steps in PREFIXES if finding_about(run.findings(steps - 1), expected))
        answer["steps_until_named"] = next(named, None)
    run.close()
    return answer


def balanced_findings(folder: Path) -> list[dict[str, Any]]:
    """Diagnose a run without a fault."""
    run = JudgedRun(folder)
    findings = run.findings()
    run.close()
    return findings


def disturbance(folder: Path) -> float:
    """Return the ranks' time in the run queue over their time on a processor: other programs, and their own threads."""
    steps = evidence_of(folder / "spool").steps
    steps = steps.select(steps.running_ns >= 0)
    return float(steps.run_delay_ns.sum() / max(1, steps.running_ns.sum()))


def alarms(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the findings of severity warning and above."""
    return [finding for finding in findings if finding["severity"] in _ALARMS]


def injected_of(folder: Path) -> dict[str, float] | None:
    """Return the medians of the work over the steps with a fault, and of a step without a fault, in ns.

    `work_ns` is the work's time on a processor, `delay_ns` its wall time: other programs may have interrupted it.
    """
    entries = [json.loads(file.read_text()) for file in sorted(folder.glob("injected-*.json"))]
    entries = [entry for entry in entries if entry["injected_ns"]]
    if not entries:
        return None
    delays = [delay for entry in entries for delay in entry["injected_ns"].values()]
    works = [work for entry in entries for work in entry["work_ns"].values()]
    return {
        "work_ns": statistics.median(works),
        "delay_ns": statistics.median(delays),
        "typical_ns": statistics.median(entry["typical_ns"] for entry in entries),
    }


def finding_about(findings: list[dict[str, Any]], expected: Expected) -> dict[str, Any] | None:
    """Return the finding with the expected code and ranks."""
    for finding in findings:
        if finding["code"] == expected.code and sorted(finding["ranks"]) in ([], sorted(expected.ranks)):
            return finding
    return None


def _others(findings: list[dict[str, Any]], expected: Expected) -> list[dict[str, Any]]:
    """Return the alarms about anything else than the fault."""
    allowed = (expected.code, *expected.others)
    return [
        finding
        for finding in alarms(findings)
        if finding["code"] not in allowed
        or (expected.ranks and finding["ranks"] and not set(finding["ranks"]) <= set(expected.ranks))
    ]


def compared(finding: dict[str, Any], expected: Expected, injected: dict[str, float] | None) -> dict[str, Any]:
    """Compare a finding with the fault; a question that the case does not ask is left out."""
    answer: dict[str, Any] = {"named": True}
    if expected.phase is not None:
        answer["phase"] = finding["phase"] == expected.phase
    if expected.layer is not None:
        answer["bucket"] = any(name.startswith(f"layers.{expected.layer}.") for name in finding["parameters"])
    if expected.cause is not None:
        answer["cause"] = finding["evidence"].get("cause") == expected.cause
    if expected.kind is not None:
        answer["kind"] = finding["evidence"].get("kind") == expected.kind
    if expected.interval is not None:
        ends = [(interval["from"], interval["to"]) for interval in finding["intervals"]]
        wanted = expected.interval
        answer["interval"] = len(ends) == 1 and all(
            abs(end - known) <= _EDGE_STEPS for end, known in zip(ends[0], wanted, strict=True)
        )
    stated_ns = finding["evidence"].get("phase_excess_ns", {}).get(expected.phase)
    if injected and stated_ns is not None:
        answer["stated_ratio"] = stated_ns / injected["work_ns"]
    return answer
