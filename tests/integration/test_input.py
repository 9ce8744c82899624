"""Findings about input and other code, on two real ranks whose steps are slow by real means."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Finding
from ddpobs_server.analysis.findings.input_bound import InputBoundFacts, input_bound
from ddpobs_server.analysis.findings.other_bound import other_bound
from ddpobs_server.analysis.findings.processor_bound import ProcessorBoundFacts, processor_bound

from benchmarks.causes import evidence_of
from benchmarks.faults.launch import ranks_of
from ddpobs import wire
from ddpobs.export.spool import Spool
from tests.support.analysis.judged import facts_of, findings_in

pytestmark = pytest.mark.wide

SCRIPT = Path(__file__).with_name("scripts") / "input_cases.py"
TRAINING = {
    "DDPOBS_TELEMETRY": "http://127.0.0.1:9",
    "DDPOBS_RUN": "input",
    "DDPOBS_FLUSH_S": "0.5",
    "DDPOBS_PULSE_S": "0.5",
    "DDPOBS_EXIT_S": "30",
}


def evidence_from(case: str, folder: Path, **environ: str) -> Evidence:
    """Train a case, and read the steps and latest pulses of its ranks."""
    with ranks_of(SCRIPT, case, ranks=2, folder=folder, environ=TRAINING | environ) as ranks:
        ended = [process.wait(60) for process in ranks.processes]
        assert not any(ended), ranks.logs()
    pulses: dict[int, wire.Pulse] = {}
    for spooled in Spool(folder / "spool", 2**30).batches():
        batch = wire.decode(zstandard.decompress(spooled.body(), max_output_size=2**28))
        if batch.pulse is not None:
            pulses[batch.rank] = max(pulses.get(batch.rank, batch.pulse), batch.pulse, key=lambda pulse: pulse.at_ns)
    return replace(evidence_of(folder / "spool"), pulses=pulses)


def findings_of(evidence: Evidence) -> list[Finding]:
    return findings_in([*input_bound(evidence), *other_bound(evidence)])


@pytest.mark.parametrize(
    ("case", "cause", "words"),
    [
        ("generator", "own-loader", "input_cases.py"),
        ("class", "own-loader", "input_cases.py"),
        ("iter-each-step", "new-iterators", "for batch in loader"),
        pytest.param("few-workers", "few-workers", "not keep up", marks=pytest.mark.alone),
        pytest.param("slow-worker", "slow-worker", "worker 1", marks=pytest.mark.alone),
        ("slow-collate", "slow-collate", "collate_fn"),
    ],
)
def test_slow_input_has_its_cause_and_remedy(case: str, cause: str, words: str, tmp_path: Path) -> None:
    (finding,) = findings_of(evidence_from(case, tmp_path))
    assert finding.code == "input-bound"
    assert facts_of(InputBoundFacts, finding).cause == cause, finding
    assert words in finding.title + finding.remedy
    assert "of the steps' time" in finding.title


def test_time_in_other_code_has_its_place(tmp_path: Path) -> None:
    (finding,) = findings_of(evidence_from("logging", tmp_path))
    assert finding.code == "other-bound"
    assert "log_loss (sleep)" in finding.title
    assert finding.gain is not None


def test_without_texts_the_place_is_not_sent(tmp_path: Path) -> None:
    evidence = evidence_from("logging", tmp_path, DDPOBS_TRACEBACK="0")
    assert all(place.place == place.calls == "" for pulse in evidence.pulses.values() for place in pulse.code)
    (finding,) = findings_of(evidence)
    assert "not known" in finding.title


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks on one processor cannot have more")
def test_ranks_on_one_processor_wait_for_it_together(tmp_path: Path) -> None:
    evidence = evidence_from("one-processor", tmp_path)
    (finding,) = processor_bound(evidence)
    assert isinstance(finding, Finding)
    assert isinstance(finding.evidence, ProcessorBoundFacts)
    assert (finding.ranks, finding.evidence.cause) == ([0, 1], "allowed")
    assert finding.verdict.startswith("All ranks wait for a processor")
    assert finding.cause.startswith("ranks 0 and 1 may use processor ")


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    assert findings_of(evidence_from("quick", tmp_path)) == []
