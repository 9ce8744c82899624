"""Finding `accumulation-pays`: reducing the sum of several batches' gradients is predicted to save time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs.shared.quantities import duration
from ddpobs.whatif.model import Change, Fitted
from ddpobs_server.analysis.communication.predicted_gain import exposes_communication, gain_of, steady_fit_of
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged

CODES = ("accumulation-pays",)
BATCHES = 4
"""Batches whose gradients are added before they are reduced."""
MIN_GAIN = 0.1
"""Minimum predicted saving, as a share of the step. Accumulation changes the batch size: a small gain is no advice."""


@dataclass(frozen=True)
class AccumulationPaysFacts(Facts):
    """The replayed step, and what accumulation saves.

    Attributes:
        batches: Batches a step for which the gain is predicted.
        exposed_ns: Exposed communication of a step.
        replay_error_ns: Error of the replay.
        saved_ns_by_batches: Predicted saving of a batch in nanoseconds, by batches a step.
    """

    batches: int
    exposed_ns: int
    replay_error_ns: int
    saved_ns_by_batches: dict[str, int]


FACTS = (AccumulationPaysFacts,)


def accumulation_pays(evidence: Evidence) -> Judgement:
    """Judge the mean time that a batch would save if only every fourth batch reduced gradients.

    A batch without a reduction has no exposed communication. Steps that accumulate already are not judged.
    """
    if evidence.columns is None or not exposes_communication(evidence) or not evidence.columns.layouts():
        return []
    if float(np.median(evidence.steps.micro_steps)) > 1:
        return []
    fitted = steady_fit_of(evidence)
    if isinstance(fitted, str):
        return [NotJudged("accumulation-pays", fitted)]
    gain = _gain(fitted, BATCHES)
    return [] if gain is None else [_finding(evidence, fitted, gain)]


def _gain(fitted: Fitted, batches: int) -> Gain | None:
    return gain_of(fitted, Change(batches=batches), MIN_GAIN)


def _finding(evidence: Evidence, fitted: Fitted, gain: Gain) -> Finding:
    return Finding(
        code="accumulation-pays",
        severity="info",
        verdict=f"Reducing gradients every {BATCHES}th batch would save time",
        measure=f"{BATCHES - 1} of {BATCHES} batches without communication",
        cause=f"backward does not hide {duration(fitted.exposed_ns)} of communication a step",
        remedy=(
            f"Accumulate {BATCHES} batches: {BATCHES - 1} of them under no_sync. The optimizer then sees "
            f"{BATCHES} times the batch size, so the learning rate may need a change."
        ),
        steps=evidence.step_range,
        phase="exposed_comm",
        gain=gain,
        evidence=AccumulationPaysFacts(
            batches=BATCHES,
            exposed_ns=round(fitted.exposed_ns),
            replay_error_ns=round(fitted.replay_error_ns),
            saved_ns_by_batches={
                str(batches): other.step_ns for batches in (2, 4, 8, 16) if (other := _gain(fitted, batches))
            },
        ),
    )
