"""The verdict on a run without findings: too early, too short, or all well, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ddpobs.shared.delay import moving
from ddpobs.shared.quantities import counted, duration
from ddpobs.shared.words import STATED_ELSEWHERE, percent
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence
from ddpobs_server.analysis.finding import Finding
from ddpobs_server.analysis.findings.straggler import MIN_COMPARED_STEPS
from ddpobs_server.analysis.steps.joined_steps import JoinedSteps

_MAX_BALANCED = 1.1
"""Maximum ratio of the longest to the shortest median own time of balanced ranks."""
_MAX_NAMED = 4
"""Maximum number of ranks whose own times are all stated."""


@dataclass(frozen=True)
class Verdict:
    """What a run without findings is: `kind` for programs, `text` for people; empty with findings."""

    kind: Literal["findings", "too-early", "too-short", "not-compared", "well"]
    text: str = ""


def verdict_of(evidence: Evidence, findings: Sequence[Finding], steps: int, *, is_over: bool) -> Verdict:
    """Return the verdict.

    Args:
        evidence: The run.
        findings: Its findings.
        steps: Number of its steps.
        is_over: Whether no more steps will arrive.
    """
    if any(finding.code not in STATED_ELSEWHERE for finding in findings):
        return Verdict("findings")
    joined = evidence.joined if evidence.whole is None else evidence.whole
    is_alone = evidence.world_size < 2
    needed = MIN_STEPS if is_alone else MIN_COMPARED_STEPS
    there = steps if is_alone or steps < needed else len(joined)
    if there >= needed:
        return Verdict("well", f"Nothing found in {counted(steps, 'step')} of one rank." if is_alone else _well(joined))
    if steps >= 2 * needed:
        text = f"Not compared: own times of all ranks are known in {there} of {steps:,} steps, {needed} are needed."
        return Verdict("not-compared", text)
    if is_over:
        return Verdict("too-short", f"Too short to judge: {there} of {needed} steps.")
    return Verdict("too-early", f"Too early: {needed} steps are needed, {there} {'is' if there == 1 else 'are'} there.")


def _well(joined: JoinedSteps) -> str:
    own_ns = np.sort(joined.usual_own_ns)
    least, most = own_ns[0], own_ns[-1]
    word = "Balanced" if most <= _MAX_BALANCED * least else "No rank stands out"
    if len(own_ns) <= _MAX_NAMED:
        times = f"{', '.join(map(duration, own_ns[:-1]))} and {duration(most)}"
    else:
        times = f"{duration(least)} to {duration(most)}"
    wall_ns, moving_ns = joined.wall_ns.mean(), moving(joined.exposed_ns).mean()
    waiting_ns = joined.exposed_ns.mean() - moving_ns
    shares = f"of a step {percent(moving_ns / wall_ns)} moving data, {percent(waiting_ns / wall_ns)} waiting for ranks"
    return f"{word}: own times {times}; {shares}."
