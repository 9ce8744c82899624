"""Gains of advice about communication: predictions of the what-if model whose whole interval is worth a change."""

from __future__ import annotations

import numpy as np

from ddpobs.whatif.model import Change, Fitted
from ddpobs.whatif.predict import predict
from ddpobs_server.analysis.communication.fitted_steps import fitted_steps
from ddpobs_server.analysis.communication.step_replay import steady_replay_of
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence
from ddpobs_server.analysis.finding import Gain

MIN_GAIN = 0.03
"""Minimum predicted saving, as a share of the step, that is reported."""


def steady_fit_of(evidence: Evidence) -> Fitted | str:
    """Return the model of the latest steps if the link, or a known lack of processors, explains the transfers."""
    fitted = fitted_steps(evidence)
    if isinstance(fitted, str):
        return fitted
    steady = steady_replay_of(evidence)
    if isinstance(steady, str) and not (fitted.slowdown_is_known and fitted.typical.contention_ns > 0):
        return steady
    return fitted


def gain_of(fitted: Fitted, change: Change, least: float = MIN_GAIN) -> Gain | None:
    """Return the gain of a change; None if it is refused, or its whole interval is not above `least` of the step."""
    answer = predict(fitted, change)
    if isinstance(answer, str) or answer.now_ns - answer.high_ns < least * answer.now_ns:
        return None
    error_ns = max(answer.high_ns - answer.step_ns, answer.step_ns - answer.low_ns)
    return Gain(round(answer.saved_ns), round(answer.saved_ratio, 4), round(error_ns / answer.saved_ns, 4))


def exposes_communication(evidence: Evidence) -> bool:
    """Whether the least exposed time over the ranks is above `MIN_GAIN` of the step: else no bucket can gain that."""
    joined = evidence.joined
    if evidence.is_sharded:
        return False
    if len(joined.ranks) < 2 or len(joined) < MIN_STEPS or evidence.absent_ranks or evidence.separate_groups_reason:
        return False
    exposed_ns = float(np.median(joined.exposed_ns.min(axis=1)))
    return exposed_ns > MIN_GAIN * float(np.median(joined.step_ns))
