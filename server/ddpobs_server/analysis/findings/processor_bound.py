"""Finding `processor-bound`: all ranks of a host wait for a processor, so that no rank is late by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs.shared.quantities import duration
from ddpobs.shared.words import format_ranks, percent
from ddpobs_server.analysis.causes.processor_shortage import allowed_processors, shortage_cause
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Interval, NotJudged, severity_of
from ddpobs_server.analysis.slow_ranks.lateness import mean_gain, step_weights
from ddpobs_server.analysis.statistics.change_points import segments
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps

CODES = ("processor-bound",)
MAX_DELAY_SHARE = 0.2
"""Maximum share of the steps' time without a processor, as the mean of the ranks, that is no finding."""
_MIN_EACH = 0.5
"""Minimum share of each rank, as a part of the mean: a rank that waits by itself is a straggler."""
_MIN_ALIKE = 0.5
"""Minimum level of earlier steps, as a part of the later steps' level, to count as the beginning of the same waits."""
_BIN_STEPS, _MAX_BINS = 4, 256
_MIN_BOUND_STEPS = 20


@dataclass(frozen=True)
class ProcessorBoundFacts(Facts):
    """Waits for a processor.

    Attributes:
        cause: `quota`, `allowed`, `threads`, `others` or `not-known`.
        delay_ns: Time without a processor of a step, as the mean of the ranks.
        delay_share: The same as a share of the step.
        share_by_rank: Share of each rank's steps.
        running_share: Share of the steps in which a training thread ran, as the mean of the ranks.
        throttled_share: Share of the waits in which a quota held the ranks up.
        processors: Processors that each rank may use.
        since_step: First step of these waits; None if they began with the run.
    """

    cause: str
    delay_ns: int
    delay_share: float
    share_by_rank: dict[int, float]
    running_share: float
    throttled_share: float
    processors: dict[int, list[int]]
    since_step: int | None


FACTS = (ProcessorBoundFacts,)


def processor_bound(evidence: Evidence) -> Judgement:
    """Judge the time in which all ranks of the run, or of one host, were ready to run and had no processor."""
    joined = evidence.joined
    if evidence.separate_groups_reason or not len(joined.ranks):
        return []
    if len(joined) < MIN_STEPS:
        return [NotJudged("processor-bound", f"fewer than {MIN_STEPS} steps in which all ranks can be compared")]
    delay_ns = _column(evidence.steps.run_delay_ns, joined)
    if np.isnan(delay_ns).all():
        return []  # The system does not count it.
    for ranks in _groups(evidence):
        index = np.flatnonzero(np.isin(joined.ranks, ranks))
        rows = _latest_bound(joined, delay_ns[:, index])
        if rows is not None:
            return [_finding(evidence, joined, index, rows)]
    return []


def _column(values: wire.Ints, joined: JoinedSteps) -> Floats:
    """Return a column of the joined steps, shape [steps, ranks]; NaN where it is not known."""
    column = values[joined.row].astype(np.float64)
    column[column < 0] = np.nan
    return column


def _groups(evidence: Evidence) -> Iterator[list[int]]:
    """All ranks, then those of each host that has two ranks and more; a host's only rank would be a straggler."""
    ranks = evidence.joined.ranks.tolist()
    yield ranks
    hosts = {evidence.hosts.get(rank, "") for rank in ranks} - {""}
    for host in sorted(hosts) if len(hosts) > 1 else []:
        members = [rank for rank in ranks if evidence.hosts.get(rank) == host]
        if len(members) > 1:
            yield members


def _latest_bound(joined: JoinedSteps, delay_ns: Floats) -> tuple[int, int] | None:
    """Return the latest rows [begin, end) in which each of these ranks waits for a processor; None without any."""
    weights = step_weights(joined.window_ns)
    width = max(_BIN_STEPS, -(-len(joined) // _MAX_BINS))
    begins = np.arange(0, len(joined), width)
    times = np.add.reduceat(weights * joined.window_ns, begins)
    waits = np.add.reduceat(weights[:, None] * np.nan_to_num(delay_ns), begins, axis=0)
    bound, level = (0, 0), 0.0
    for begin, end in segments(waits.mean(axis=1) / np.maximum(1.0, times)):
        shares = waits[begin:end].sum(axis=0) / max(1.0, float(times[begin:end].sum()))
        if shares.mean() > MAX_DELAY_SHARE and shares.min() >= _MIN_EACH * shares.mean():
            first, last = int(begins[begin]), min(len(joined), end * width)
            goes_on = bound[1] == first and level >= _MIN_ALIKE * shares.mean()
            bound, level = (bound[0] if goes_on else first, last), float(shares.mean())
    return bound if bound[1] - bound[0] >= _MIN_BOUND_STEPS else None


def _finding(evidence: Evidence, joined: JoinedSteps, index: wire.Ints, rows: tuple[int, int]) -> Finding:
    part = joined.select(slice(*rows))
    ranks = joined.ranks[index].tolist()
    weights = step_weights(part.window_ns)
    delay_ns, running_ns, throttled_ns = (
        np.nan_to_num(_column(getattr(evidence.steps, f"{name}_ns"), part)[:, index])
        for name in ("run_delay", "running", "throttled")
    )
    time_ns = max(1.0, float(weights @ part.window_ns))
    shares, mean_delay_ns = weights @ delay_ns / time_ns, float((weights @ delay_ns).mean() / weights.sum())
    throttled_share = min(1.0, float(throttled_ns.sum() / max(1.0, delay_ns.sum())))
    running_share = float((weights @ running_ns).mean() / time_ns)
    cause = shortage_cause(evidence, ranks, throttled_share, running_share)
    steps = (int(part.step[0]), int(part.step[-1]))
    goes_on = rows[1] == len(joined)
    since = steps[0] if goes_on and rows[0] > 0 else None
    subject = _subject(ranks, len(joined.ranks))
    held_share = 1.0 if goes_on else len(part) / len(joined)
    # Beside a device the training thread runs ahead: its waits may cost nothing.
    is_ahead = any(hello.device != "cpu" for hello in evidence.hellos.values())
    return Finding(
        code="processor-bound",
        severity="info" if is_ahead else severity_of(float(shares.mean()) * held_share),
        verdict=f"{subject} for a processor" + ("" if since is None else f" since step {since}"),
        measure=f"{duration(mean_delay_ns)} a step without a processor, {percent(float(shares.mean()))} of it",
        when="" if goes_on else f"steps {steps[0]} to {steps[1]}",
        cause=cause.words,
        where=evidence.where(ranks),
        remedy=cause.remedy,
        steps=steps,
        ranks=ranks,
        evidence=ProcessorBoundFacts(
            cause=cause.name,
            delay_ns=round(mean_delay_ns),
            delay_share=round(float(shares.mean()), 4),
            share_by_rank={rank: round(float(share), 4) for rank, share in zip(ranks, shares, strict=True)},
            running_share=round(running_share, 4),
            throttled_share=round(throttled_share, 4),
            processors={rank: sorted(allowed_processors(evidence, rank)) for rank in ranks},
            since_step=since,
        ),
        gain=mean_gain(part, np.minimum(delay_ns.mean(axis=1), part.window_ns)) if goes_on and not is_ahead else None,
        intervals=(Interval(*steps),),
    )


def _subject(ranks: list[int], count: int) -> str:
    if len(ranks) == count:
        return "All ranks wait" if count > 1 else f"{format_ranks(ranks)} waits".capitalize()
    return f"{len(ranks)} ranks of one host wait"
