"""Finding `utilisation-swings`: the step rate swings between fast and slow stretches, on all ranks at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs.shared.quantities import duration
from ddpobs.shared.words import percent
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, advice_severity
from ddpobs_server.analysis.statistics.level_shifts import level_segments
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps
from ddpobs_server.analysis.steps.shared_time import shared_ns

CODES = ("utilisation-swings",)
SWING = 0.2
"""Maximum swing of the step time, from its fast tenth to its slow tenth, that is no finding."""
MIN_STEPS = 60
_PERIODS = 3
"""Minimum number of periods among the examined steps."""
_CORRELATION, _CONTRAST = 0.35, 0.3
"""Minimum autocorrelation at the period, and by how much it exceeds the lowest at shorter lags."""
_SHIFTS = 4
"""Minimum number of level shifts that make swings without a period."""
_REMEDIES = {
    "data": "Check the input: shards that differ, a cache that empties, workers that deliver in bursts.",
    "exposed_comm": "Check other traffic on the link, and other programs on the hosts.",
    "other": "Check the work between the phases that comes back with this period: logging, metrics, snapshots.",
}
_COMPUTATION = (
    "Check for inputs that change in length with this period, clocks that throttle, other programs on the hosts."
)


@dataclass(frozen=True)
class UtilisationSwingsFacts(Facts):
    """How the step time swings.

    Attributes:
        swing: Difference between the slow and the fast tenth, as a share of the mean step.
        period_steps: Steps from one slow stretch to the next; None without a period.
        fast_step_ns: Step time of the fast tenth.
        slow_step_ns: Step time of the slow tenth.
        slow_share: Share of slow steps.
        phase_share: Share of the difference that is in the finding's phase.
        steps_used: Number of steps.
    """

    swing: float
    period_steps: int | None
    fast_step_ns: int
    slow_step_ns: int
    slow_share: float
    phase_share: float
    steps_used: int


FACTS = (UtilisationSwingsFacts,)


@dataclass(frozen=True)
class _Swing:
    """Fast and slow steps.

    Attributes:
        period: Steps from one slow stretch to the next; 0 without a period.
        profile_ns: Step time by position in the period; without one, of each segment's steps.
        slow: Mask of the steps above the middle, shape [steps].
    """

    period: int
    profile_ns: Floats
    slow: Floats


def utilisation_swings(evidence: Evidence) -> Judgement:
    """Judge step times that swing by more than 20 %, periodically or between levels that last.

    Single long steps and one lasting change are no swings, nor are steps with a compilation. Only time that ranks share
    counts, phase by phase: a rank that is late now and then is a straggler.
    """
    joined = evidence.joined
    if evidence.separate_groups_reason or not len(joined.ranks):
        return []
    # A step without a successor may end with a checkpoint or an evaluation.
    rows = np.flatnonzero(joined.has_successor & ~joined.compile_ns.any(axis=1))
    if len(rows) < MIN_STEPS - 1:
        return [NotJudged("utilisation-swings", f"fewer than {MIN_STEPS} comparable steps in a row")]
    step_ns = _series_ns(joined, rows)
    swing = _periodic(step_ns) or _between_levels(step_ns)
    if swing is None or _size(swing) <= SWING:
        return []
    return [_finding(evidence, swing, step_ns)]


def _series_ns(joined: JoinedSteps, rows: wire.Ints) -> Floats:
    """Return the time of each step number between the first and the last row; the median where none is known."""
    window_ns = shared_ns(joined)[rows]
    median_ns = float(np.median(window_ns))
    position = joined.step[rows] - joined.step[rows[0]]
    if position[-1] >= 2 * len(rows):
        position = np.arange(len(rows))
    series_ns = np.full(int(position[-1]) + 1, median_ns)
    series_ns[position] = np.minimum(window_ns, 4 * median_ns)
    return series_ns


def _size(swing: _Swing) -> float:
    low, high = np.quantile(swing.profile_ns, [0.1, 0.9])
    return float((high - low) / np.mean(swing.profile_ns))


def _periodic(step_ns: Floats) -> _Swing | None:
    """Return the swing if the step times repeat with a period.

    The autocorrelation at the period is high, at twice the period too, and low in between.
    """
    correlation = autocorrelation(step_ns)
    longest = len(step_ns) // _PERIODS
    period = int(np.argmax(_peaks(correlation, longest)))
    if period < 2 or correlation[period] < _CORRELATION:
        return None
    if correlation[2 * period] < 0.6 * correlation[period]:
        return None
    if correlation[period] - float(correlation[1:period].min()) < _CONTRAST:
        return None
    position = np.arange(len(step_ns)) % period
    profile_ns = np.array([np.median(step_ns[position == index]) for index in range(period)])
    middle = (profile_ns.min() + profile_ns.max()) / 2
    return _Swing(period, profile_ns, (profile_ns > middle)[position].astype(np.float64))


def _peaks(correlation: Floats, longest: int) -> Floats:
    """Return the autocorrelation at its local maxima after its first minimum, up to the longest period; else -1.

    A period's multiples correlate about as well. Only what exceeds the shortest clearly counts.
    """
    inner = correlation[1 : longest + 1]
    peaks = np.full(longest + 1, -1.0)
    lags = np.arange(1, longest + 1)
    is_peak = (inner >= correlation[lags - 1]) & (inner >= correlation[lags + 1])
    begin = int(np.argmax(np.diff(correlation[: longest + 1]) > 0)) + 1
    is_peak &= lags >= begin
    peaks[lags[is_peak]] = inner[is_peak]
    best = peaks.max()
    if best > 0:
        peaks[int(np.argmax(peaks >= 0.85 * best)) + 1 :] = -1.0
    return peaks


def autocorrelation(values: Floats) -> Floats:
    """Return the autocorrelation at each lag, unbiased by the shorter overlap; zeros for constant values."""
    centred = values - values.mean()
    spectrum = np.fft.rfft(centred, 2 * len(values))
    sums = np.fft.irfft(np.abs(spectrum) ** 2)[: len(values)]
    means = sums / np.arange(len(values), 0, -1)
    return np.asarray(means / means[0]) if means[0] > 1e-12 * values.mean() ** 2 else np.zeros_like(values)


def _between_levels(step_ns: Floats) -> _Swing | None:
    """Return the swing if the step time shifts several times between levels."""
    segments = level_segments(step_ns)
    levels = np.array([np.median(step_ns[first:end]) for first, end in segments])
    shifts = np.diff(levels)
    large = shifts[np.abs(shifts) > SWING * np.median(step_ns)]
    if np.count_nonzero(np.diff(np.sign(large))) + 1 < _SHIFTS or not len(large):
        return None
    profile_ns = np.repeat(levels, [end - first for first, end in segments])
    return _Swing(0, profile_ns, (profile_ns > (levels.min() + levels.max()) / 2).astype(np.float64))


def _finding(evidence: Evidence, swing: _Swing, step_ns: Floats) -> Finding:
    phase, phase_share = _phase(evidence.joined, swing, step_ns)
    fast_ns, slow_ns = np.quantile(swing.profile_ns, [0.1, 0.9])
    every = f"every {swing.period} steps" if swing.period else "without a period"
    saving = _gain(step_ns, swing) if swing.period else None
    named = phase.replace("exposed_comm", "exposed communication")
    return Finding(
        code="utilisation-swings",
        severity=advice_severity(saving) if saving else "info",
        verdict=f"The step time swings by {percent(_size(swing))} {every}",
        measure=f"{duration(fast_ns)} in fast steps, {duration(slow_ns)} in slow ones",
        cause=f"not known: {percent(phase_share)} of the difference is in {named}",
        remedy=_REMEDIES.get(phase, _COMPUTATION),
        steps=evidence.step_range,
        phase=phase,
        gain=saving,
        evidence=UtilisationSwingsFacts(
            swing=round(_size(swing), 4),
            period_steps=swing.period or None,
            fast_step_ns=round(float(fast_ns)),
            slow_step_ns=round(float(slow_ns)),
            slow_share=round(float(swing.slow.mean()), 4),
            phase_share=round(phase_share, 4),
            steps_used=len(step_ns),
        ),
    )


def _phase(joined: JoinedSteps, swing: _Swing, step_ns: Floats) -> tuple[str, float]:
    """Return the phase that differs most between slow and fast steps, and its share of the difference."""
    position = joined.step - joined.step[np.flatnonzero(joined.has_successor)[0]]
    slow = swing.slow[np.clip(position, 0, len(step_ns) - 1)] > 0
    times_ns = np.concatenate([joined.phases_ns.mean(axis=1), joined.exposed_ns.min(axis=1)[:, None]], axis=1)
    names = (*wire.OWN_PHASES, "exposed_comm")
    differences = np.median(times_ns[slow], axis=0) - np.median(times_ns[~slow], axis=0)
    largest = int(differences.argmax())
    return names[largest], float(differences[largest] / max(1.0, float(differences[differences > 0].sum())))


def _gain(step_ns: Floats, swing: _Swing) -> Gain | None:
    """Return the saving if every step were as fast as the fast steps; the error is that of the periods' means."""
    saved_ns = float(np.mean(swing.profile_ns) - np.quantile(swing.profile_ns, 0.1))
    whole = len(step_ns) // swing.period * swing.period
    means = step_ns[:whole].reshape(-1, swing.period).mean(axis=1)
    error_ns = float(means.std()) / np.sqrt(len(means))
    if saved_ns - error_ns < 0.03 * float(np.mean(step_ns)):
        return None
    return Gain(round(saved_ns), round(saved_ns / float(np.mean(step_ns)), 4), round(float(error_ns / saved_ns), 4))
