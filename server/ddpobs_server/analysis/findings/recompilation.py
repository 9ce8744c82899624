"""Finding `recompilation`: torch.compile compiles in mid-run, and the ranks that do not compile wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs.shared.words import format_ranks, percent
from ddpobs_server.analysis.account.rank_account import Process
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, Interval, NotJudged, severity_of

CODES = ("recompilation",)
_MIN_TIMES = 3
"""Minimum number of steps with a compilation: a last, smaller batch or an evaluation needs one or two."""
_MIN_SHARE = 0.05
_MAX_INTERVALS = 32


@dataclass(frozen=True)
class RecompilationFacts(Facts):
    """Compilations in the judged steps from number `WARM_UP_STEPS` on.

    Attributes:
        times: Number of steps with a compilation, by rank.
        compile_ns: Time in compilations, by rank.
        lost_ns: Time that these steps lost.
        share: Share of the lost time in the steps' time.
        function: Function that was compiled last; empty if it is not known.
        reason: Its guard that failed, as torch words it; empty if it is not known.
    """

    times: dict[int, int]
    compile_ns: dict[int, int]
    lost_ns: int
    share: float
    function: str = ""
    reason: str = ""


FACTS = (RecompilationFacts,)


def recompilation(evidence: Evidence) -> Judgement:
    """Judge what compilations after the first steps cost. A step loses what its last rank would gain without them."""
    joined = evidence.joined
    compiled_ns = joined.compile_ns * (joined.step >= wire.WARM_UP_STEPS)[:, None]
    if not compiled_ns.any():
        return []
    if len(joined) < MIN_STEPS:
        return [NotJudged("recompilation", f"fewer than {MIN_STEPS} steps in which all ranks can be compared")]
    steps_lost_ns = (joined.own_ns + compiled_ns).max(axis=1) - joined.own_ns.max(axis=1)
    lost_ns = float(steps_lost_ns.sum())
    share = lost_ns / max(1.0, float(joined.window_ns.sum()))
    costly = np.flatnonzero(steps_lost_ns)
    if len(costly) < _MIN_TIMES or share < _MIN_SHARE:
        return []
    total_ns, times = compiled_ns.sum(axis=0), np.count_nonzero(compiled_ns, axis=0)
    compiling = np.flatnonzero(2 * total_ns >= total_ns.max())
    ranks = joined.ranks[compiling].tolist()
    place, reason = _latest(evidence.processes, ranks)
    first, last = int(joined.step[costly[0]]), int(joined.step[costly[-1]])
    others = len(joined.ranks) - len(ranks)
    waits = f", and the other rank{'s wait' if others > 1 else ' waits'}" if others else ""
    return [
        Finding(
            code="recompilation",
            severity=severity_of(share),
            verdict=f"{format_ranks(ranks).capitalize()} compile{'s' * (len(ranks) == 1)} in mid-run{waits}",
            measure=f"{int(times[compiling].max())} times, {percent(share)} of the steps' time",
            when=f"in steps {first} to {last}",
            cause=reason or "not known, because torch gives no reason",
            where=evidence.where(ranks, place),
            remedy=_SIZES if "size mismatch" in reason else _GUARDS,
            steps=(first, last),
            ranks=ranks,
            evidence=RecompilationFacts(
                times=dict(zip(joined.ranks.tolist(), times.tolist(), strict=True)),
                compile_ns={rank: round(ns) for rank, ns in zip(joined.ranks.tolist(), total_ns, strict=True)},
                lost_ns=round(lost_ns),
                share=round(share, 4),
                function=place,
                reason=reason,
            ),
            gain=Gain(round(lost_ns / len(joined)), round(share, 4), len(costly) ** -0.5),
            intervals=tuple(Interval(int(step), int(step)) for step in joined.step[costly[-_MAX_INTERVALS:]]),
        )
    ]


def _latest(processes: Sequence[Process], ranks: list[int]) -> tuple[str, str]:
    """Return the function that one of these ranks compiled anew last, and the reason."""
    for process in processes:
        if process.rank in ranks and process.account is not None and process.account.recompile_reason:
            return process.account.recompile_place, process.account.recompile_reason
    return "", ""


_SIZES = (
    "Mark the size that varies as dynamic (torch._dynamo.mark_dynamic), compile with dynamic=True, or pad the batches "
    "to few sizes."
)
_GUARDS = "Keep what the guard names the same in every step; sizes that vary need torch._dynamo.mark_dynamic."
