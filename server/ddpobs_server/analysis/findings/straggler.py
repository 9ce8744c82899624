"""Which rank is late by its own doing, in which phase, and whether that is more than chance.

Compares *own* times: what a rank spent between the end of one synchronisation and its last gradient's readiness. All
ranks leave a synchronisation together, so these are comparable over ranks with no common clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs_server.analysis.finding import Finding, Gain, NotJudged, severity_of
from ddpobs_server.analysis.joined_steps import Floats, Joined, median_of_others

MIN_STEPS = 32
MIN_COST_SHARE = 0.05
"""What a rank must cost on average, as a share of the step, to be worth a finding."""
CHANCE = 0.01
RECENT_STEPS = 1024
"""What is judged: who was slow long ago is not slow now."""
SUDDEN = {128: 0.1, 64: 0.2}
"""So many of the latest steps are judged by themselves, too: who has just become slow is not slow in all quarters.
A burst of noise may fill so few: in each of their quarters a rank is late in `_SUDDEN_LATE_SHARE`, and costs this."""
_SUDDEN_LATE_SHARE = 0.8
_MOST_MEDIANS = 4.0
"""No step counts for more than so many median ones: one that holds an upload is as long as thousands."""
_SELDOM_TIMES = 3.0
"""A rank that is late as often as others, by noise, stands out where it costs so many times what the others cost."""
_BULK = 0.8
"""The fewest steps that hold so much of what such a rank costs tell how late it is: the others are noise as well."""
_BLOCK = 4
_PARTS = 4
_PERMUTATIONS = 400
_MANY = 2**12
"""Ranks times blocks above which these are rotated instead of permuted."""
_EXPLAINED = 0.8
_BUCKET_BITS = 20
"""Hold the index of any bucket."""


@dataclass(frozen=True)
class Lateness:
    """Per step and rank, from `Joined`.

    Attributes:
        excess_ns: Own time above the other ranks' median, shape [steps, ranks].
        delay_ns: The last rank's excess, shape [steps].
        last: Index of the last rank, shape [steps].
        late: Excess above `wire.STRAGGLER_SHARE` of the step, shape [steps, ranks].
    """

    excess_ns: Floats
    delay_ns: Floats
    last: wire.Ints
    late: npt.NDArray[np.bool_]

    @property
    def cost_ns(self) -> Floats:
        """What a step loses to each rank where it is late, were all the others in time; shape [steps, ranks]."""
        return np.where(self.late, self.excess_ns, 0.0)

    def latest(self, count: int) -> Lateness:
        """Of the last so many steps."""
        return Lateness(self.excess_ns[-count:], self.delay_ns[-count:], self.last[-count:], self.late[-count:])


def lateness(joined: Joined) -> Lateness:
    """Excess, delay and who was last; needs two ranks."""
    excess = joined.own_ns - median_of_others(joined.own_ns)
    last = joined.own_ns.argmax(axis=1)
    delay = excess[np.arange(len(joined)), last]
    return Lateness(excess, delay, last, excess > wire.STRAGGLER_SHARE * joined.step_ns[:, None])


def chance_of(late: npt.NDArray[Any], seed: int = 0) -> Floats:
    """How often chance alone would make some rank late as often as each rank was, or cost as much.

    Ranks are permuted anew in each block of steps, so that what comes in bursts stays in bursts. Many are rotated.

    Args:
        late: Whether a rank was late, or what it cost; shape [steps, ranks].
        seed: Of the permutations; the same run always gets the same answer.

    Returns:
        Shape [ranks], a p-value with the usual +1 correction.
    """
    steps, ranks = late.shape
    late = late.astype(np.int8) if late.dtype == bool else _in_parts(late)
    blocks = steps // _BLOCK
    counts = late[: blocks * _BLOCK].reshape(blocks, _BLOCK, ranks).sum(axis=1)
    observed = counts.sum(axis=0)
    most = (_permuted_most if counts.size <= _MANY else _rotated_most)(counts, np.random.default_rng(seed))
    return np.asarray((1 + (most[:, None] >= observed).sum(axis=0)) / (1 + _PERMUTATIONS))


def _in_parts(cost: Floats) -> wire.Ints:
    """Whole parts of the highest cost: sums of these do not depend on their order."""
    return np.asarray(np.rint(cost * (1000 / max(1.0, float(cost.max(initial=0.0))))), np.int64)


def _permuted_most(counts: wire.Ints, random: np.random.Generator) -> wire.Ints:
    """How often the rank that is late most is late, each time the ranks are permuted anew in each block."""
    repeated = np.broadcast_to(counts.astype(np.int16), (_PERMUTATIONS, *counts.shape))
    return np.asarray(random.permuted(repeated, axis=2).sum(axis=1, dtype=np.int64).max(axis=1))


def _rotated_most(counts: wire.Ints, random: np.random.Generator) -> wire.Ints:
    """Likewise, with the ranks of each block rotated by a random number: as likely for each rank, and far quicker."""
    blocks, ranks = counts.shape
    block, rank = np.nonzero(counts)
    turns = random.integers(ranks, size=(_PERMUTATIONS, blocks))
    weights = counts[block, rank]
    return np.array([np.bincount((rank + turn[block]) % ranks, weights, ranks).max() for turn in turns], np.int64)


def weights(window_ns: Floats) -> Floats:
    """By how much each step counts, above 0 and at most 1: none counts for more than `_MOST_MEDIANS` median ones.

    The median is of the steps that took any time. What others answer for may leave nothing of a step.
    """
    took_ns = window_ns[window_ns > 0]
    if not len(took_ns):
        return np.ones_like(window_ns)
    most_ns = _MOST_MEDIANS * np.median(took_ns)
    return np.asarray(most_ns / np.maximum(most_ns, window_ns))


def cost_shares(joined: Joined, late: Lateness, rows: wire.Ints) -> Floats:
    """What these steps lose to each rank, as a share of them; shape [ranks], each from 0 to 1."""
    window_ns = joined.window_ns[rows]
    counts = weights(window_ns)
    return np.asarray(counts @ late.cost_ns[rows] / max(1.0, float(counts @ window_ns)))


def recurring(joined: Joined, late: Lateness, least_late: float = 0.0, least_cost: float = MIN_COST_SHARE) -> list[int]:
    """Indices of the ranks that stand out in each quarter of the steps, not in one burst of noise.

    In each such a rank is late at least half as often as the one that is late most, at least twice as often as the
    others' median and in the share `least_late` of the steps, and costs `least_cost`.
    """
    stand_out = np.ones(len(joined.ranks), bool)
    for rows in np.array_split(np.arange(len(joined)), _PARTS):
        shares = late.late[rows].mean(axis=0)
        stand_out &= (shares >= 0.5 * shares.max()) & (shares >= 2 * median_of_others(shares[None])[0])
        stand_out &= (shares >= least_late) & (cost_shares(joined, late, rows) >= least_cost)
    return np.flatnonzero(stand_out).tolist()


def costly(joined: Joined, late: Lateness) -> list[int]:
    """Indices of the ranks that may be late as seldom as others, but cost far more in each quarter of the steps.

    A rank that takes long in every tenth step is not late twice as often as one that noise makes late in every fifth.
    """
    stand_out = np.ones(len(joined.ranks), bool)
    for rows in np.array_split(np.arange(len(joined)), _PARTS):
        costs = cost_shares(joined, late, rows)
        stand_out &= (costs >= 0.5 * costs.max()) & (costs >= _SELDOM_TIMES * median_of_others(costs[None])[0])
        stand_out &= costs >= MIN_COST_SHARE
    return np.flatnonzero(stand_out).tolist()


def typical_lateness(joined: Joined, late: Lateness, rank: int) -> Lateness:
    """The same, with a rank late only in the steps that make up most of what it costs, and in those about as long.

    Args:
        joined: The run.
        late: Of its steps.
        rank: Index of the rank.
    """
    cost_ns = weights(joined.window_ns) * late.cost_ns[:, rank]
    order = np.argsort(-cost_ns, kind="stable")
    held = int(np.searchsorted(np.cumsum(cost_ns[order]), _BULK * cost_ns.sum())) + 1
    excess_ns = late.excess_ns[:, rank]
    told = late.late.copy()
    told[:, rank] &= excess_ns >= 0.5 * np.median(excess_ns[order[:held]])
    return replace(late, late=told)


def onset(late: npt.NDArray[np.bool_], share: float) -> int:
    """Since when a rank is late about as often as it is now, and no more as seldom as before.

    Args:
        late: Of one rank, shape [steps].
        share: In which it is late now.

    Returns:
        Index of the step since which the excess over half of that share adds up to most.
    """
    since_each = np.cumsum(late[::-1] - 0.5 * share)[::-1]
    return int(since_each.argmax())


def causes(joined: Joined, rank: int, rows: wire.Ints) -> list[tuple[str, float]]:
    """Phases that explain at least 80 % of a rank's excess in these steps, the dominant one first.

    Args:
        joined: The run.
        rank: Index of the rank.
        rows: Indices of the steps in which it was late.

    Returns:
        (phase, mean excess in ns).
    """
    phases = joined.phases_ns[rows]
    excess = (phases[:, rank] - np.median(np.delete(phases, rank, axis=1), axis=1)).mean(axis=0)
    total = max(1.0, float(excess[excess > 0].sum()))
    named: list[tuple[str, float]] = []
    for index in np.argsort(-excess):
        if excess[index] <= 0 or sum(ns for _, ns in named) >= _EXPLAINED * total:
            break
        named.append((wire.OWN_PHASES[index], float(excess[index])))
    return named


def backward_began_ns(steps: tuple[wire.Ints, wire.Steps], spans: tuple[wire.Ints, wire.Spans]) -> wire.Ints:
    """When backward began: the step's last readiness less its backward phase, of steps with one micro-step.

    Args:
        steps: Rank of each row, and columns, sorted by step and rank.
        spans: Likewise, or rank by rank; of all modules that a step has, not empty.

    Returns:
        For each span, on its rank's clock; `wire.UNKNOWN` where it is not known.
    """
    (step_rank, step), (span_rank, span) = steps, spans
    origin, final = span.step.min(), span.step.max()
    whole = np.flatnonzero((step.micro_steps == 1) & (step.step >= origin) & (step.step <= final))
    width = max(int(span_rank.max()), int(step_rank.max(initial=0))) + 1
    known = (step.step[whole] - origin) * width + step_rank[whole]
    wanted = (span.step - origin) * width + span_rank
    begins = np.flatnonzero(np.diff(wanted, prepend=wanted[0] - 1))
    last_ready = np.maximum.reduceat(span.ready_ns, begins)
    place = np.searchsorted(known, wanted[begins], "right") - 1
    found = place >= 0
    found[found] = known[place[found]] == wanted[begins][found]
    began = np.full(len(begins), wire.UNKNOWN, np.int64)
    began[found] = last_ready[found] - step.backward_ns[whole][place[found]]
    return np.repeat(began, np.diff(begins, append=len(wanted)))


def late_collectives(joined: Joined, rank: int, first: int, typical_ns: float) -> wire.Ints:
    """Those of the steps from `first` on in which a rank was late, by at least half of what it typically is."""
    index, late = int(np.searchsorted(joined.ranks, rank)), lateness(joined)
    by_so_much = late.excess_ns[:, index] >= 0.5 * typical_ns
    return joined.collective[late.late[:, index] & by_so_much & (joined.step >= first)]


def late_bucket(
    rank: int, row_rank: wire.Ints, spans: wire.Spans, began_ns: wire.Ints, excess_ns: float
) -> tuple[int, int, int] | None:
    """The bucket at which a slow backward shows: at least half of the rank's excess arises there, not evenly over all.

    A bucket's compute span begins at the readiness before its own, of whichever module: a lag shows only where it
    arises. Of several buckets it is the one whose lag adds up to most, for one late step may be a spike anywhere.

    Args:
        rank: The slow rank.
        row_rank: Rank of each span.
        spans: Of the steps in which it was late, of all modules.
        began_ns: When backward began, of each span, on that rank's clock; `wire.UNKNOWN` where it is not known.
        excess_ns: What the rank takes longer than the others in such a step.

    Returns:
        Its module, the layout's revision and its index, or None where the ranks' buckets do not compare.
    """
    order = np.lexsort((spans.ready_ns, row_rank, spans.step))
    order = order[began_ns[order] >= 0]
    of, cut = row_rank[order], spans.select(order)
    first = (np.diff(cut.step, prepend=-1) != 0) | (np.diff(of, prepend=-1) != 0)
    compute_ns = cut.ready_ns - np.where(first, began_ns[order], np.roll(cut.ready_ns, 1))
    revisions, of_revision = np.unique(cut.revision, return_inverse=True)
    layout = cut.module * len(revisions) + of_revision
    _, some, place = np.unique(layout << _BUCKET_BITS | cut.bucket, return_index=True, return_inverse=True)
    medians, counts = _medians_of(2 * place + (of == rank), compute_ns, 2 * len(some))
    lag_ns = medians[1::2] - medians[::2]
    known = ~np.isnan(lag_ns)
    lags = zip(*(values[known].tolist() for values in (lag_ns * counts[1::2], lag_ns, some)), strict=True)
    _, most_ns, row = max(lags, key=lambda lag: lag[:2], default=(0.0, 0.0, 0))
    if most_ns < max(1.0, 0.5 * excess_ns):
        return None
    return int(cut.module[row]), int(cut.revision[row]), int(cut.bucket[row])


def _medians_of(group: wire.Ints, values: wire.Ints, groups: int) -> tuple[Floats, wire.Ints]:
    """Each group's median, NaN where it has no values, and how many it has; both of shape [groups]."""
    counts = np.bincount(group, minlength=groups)
    begins, there = np.cumsum(counts) - counts, counts > 0
    values = values[np.lexsort((values, group))]
    medians = np.full(groups, np.nan)
    medians[there] = (values[(begins + (counts - 1) // 2)[there]] + values[(begins + counts // 2)[there]]) / 2
    return medians, counts


def gain(joined: Joined, late: Lateness, rank: int) -> Gain:
    """What a step would save were this rank as fast as the others' median.

    T - T_ideal of S = T / T_ideal (arXiv 2505.05713) with this one rank brought to the others' median: where it was
    last, the step then waits for the next to last. Steps count by their `weights`. The error is the standard deviation
    over resampled blocks of steps.
    """
    counts = weights(joined.window_ns)
    next_to_last = np.sort(joined.own_ns, axis=1)[:, -2]
    saved = counts * np.where(late.last == rank, joined.own_ns.max(axis=1) - next_to_last, 0.0)
    blocks = max(1, len(saved) // _BLOCK)
    means = saved[: blocks * _BLOCK].reshape(blocks, -1).mean(axis=1)
    resampled = np.random.default_rng(0).choice(means, (200, blocks)).mean(axis=1)
    step_ns = float(saved.mean())
    return Gain(
        step_ns=round(step_ns),
        ratio=round(step_ns / float((counts * joined.window_ns).mean()), 4),
        error_ratio=round(float(resampled.std()) / step_ns, 4) if step_ns else 0.0,
    )


def lateness_table(joined: Joined) -> dict[str, Any]:
    """Excess, delay and last rank by step, and each rank's shares, delay, own time and excess, as the REST gives it."""
    late = lateness(joined)
    medians = np.median(joined.phases_ns, axis=0)
    excess = medians - median_of_others(medians[None])[0]
    own = np.median(joined.own_ns, axis=0)
    late_share = late.late.mean(axis=0)
    last_share = np.bincount(late.last, minlength=len(joined.ranks)) / len(joined)
    delay = np.bincount(late.last, late.delay_ns, len(joined.ranks)) / len(joined)
    per_rank = [
        {
            "rank": rank,
            "last_share": round(float(last_share[index]), 4),
            "late_share": round(float(late_share[index]), 4),
            "delay_ns": round(float(delay[index])),
            "own_ns": round(float(own[index])),
            "excess_ns": dict(zip(wire.OWN_PHASES, map(round, excess[index].tolist()), strict=True)),
        }
        for index, rank in enumerate(joined.ranks.tolist())
    ]
    return {
        "excess_ns": late.excess_ns.astype(np.int64).tolist(),
        "delay_ns": late.delay_ns.astype(np.int64).tolist(),
        "last_rank": joined.ranks[late.last].tolist(),
        "per_rank": per_rank,
    }


def straggler_findings(joined: Joined, hosts: dict[int, str]) -> list[Finding] | NotJudged:
    """A finding for each rank that is late more often than chance, and that costs enough to matter."""
    if len(joined.ranks) < 2:
        return NotJudged("straggler", "needs steps of at least two ranks")
    if len(joined) < MIN_STEPS:
        return NotJudged("straggler", f"{len(joined)} of {MIN_STEPS} steps in which every rank's own time is known")
    joined = joined.latest(RECENT_STEPS)
    late = lateness(joined)
    habits = _beyond_chance(late.late, recurring(joined, late))
    found = [_finding(joined, late, index, chance, hosts) for index, chance in habits.items()]
    found += _sudden_findings(joined, late, set(habits), hosts)
    return found + _seldom_findings(joined, late, {finding.ranks[0] for finding in found}, hosts)


def _seldom_findings(joined: Joined, late: Lateness, known: set[int], hosts: dict[int, str]) -> list[Finding]:
    """A finding for each other rank that is seldom late, but by so much that it costs more than chance would."""
    suspects = [index for index in costly(joined, late) if joined.ranks[index] not in known]
    cost_ns = weights(joined.window_ns)[:, None] * late.cost_ns
    chances = _beyond_chance(cost_ns, suspects)
    return [_finding(joined, typical_lateness(joined, late, index), index, chances[index], hosts) for index in chances]


def _sudden_findings(joined: Joined, late: Lateness, known: set[int], hosts: dict[int, str]) -> list[Finding]:
    """A finding for each other rank that has become slow of late, of the steps since then."""
    found = []
    for count, least_cost in SUDDEN.items():
        if len(joined) <= count:
            continue
        now, late_now = joined.latest(count), late.latest(count)
        suspects = set(recurring(now, late_now, _SUDDEN_LATE_SHARE, least_cost)) - known
        for index, chance in _beyond_chance(late_now.late, sorted(suspects)).items():
            steps = len(joined) - onset(late.late[:, index], float(late_now.late[:, index].mean()))
            found.append(_finding(joined.latest(steps), late.latest(steps), index, chance, hosts, sudden=True))
            known |= {index}
    return found


def _beyond_chance(late: npt.NDArray[Any], suspects: list[int]) -> dict[int, float]:
    """Those that are late more often than chance, or cost more, and how often chance would do it."""
    if not suspects:
        return {}  # Chance takes longer to work out than all the rest.
    chance = chance_of(late)
    return {index: float(chance[index]) for index in suspects if chance[index] <= CHANCE}


def _finding(  # noqa: PLR0917 - the facts of one rank
    joined: Joined, late: Lateness, index: int, chance: float, hosts: dict[int, str], sudden: bool = False
) -> Finding:
    rank, rows = int(joined.ranks[index]), np.flatnonzero(late.late[:, index])
    named = causes(joined, index, rows)
    phase = named[0][0] if named else "other"
    share = len(rows) / len(joined)
    excess_ns = float(np.median(late.excess_ns[rows, index]))
    step_ns = float(np.median(joined.step_ns))
    saved = gain(joined, late, index)
    lost_share = float(cost_shares(joined, late, np.arange(len(joined)))[index])
    kind = "persistent" if share >= 0.6 else "intermittent"
    when = "in every step" if share > 0.98 else f"in {share:.0%} of the steps"
    first, last = int(joined.step[0]), int(joined.step[-1])
    return Finding(
        code="straggler",
        severity=severity_of(lost_share),
        title=(
            f"Rank {rank} is slow in {phase}: {excess_ns / 1e6:.1f} ms more than the other ranks {when}"
            f"{f' since step {first}' if sudden else ''}, of a step of {step_ns / 1e6:.1f} ms"
        ),
        remedy=_REMEDIES[phase] + (_NOT_ALONE if saved.ratio < 0.5 * lost_share else ""),
        steps=(first, last),
        ranks=[rank],
        phase=phase,
        evidence={
            "kind": kind,
            "host": hosts.get(rank),
            "since_step": first if sudden else None,
            "late_share": round(share, 4),
            "lost_share": round(lost_share, 4),
            "chance": round(chance, 4),
            "excess_ns": round(excess_ns),
            "step_ns": round(step_ns),
            "phase_excess_ns": {name: round(ns) for name, ns in named},
            "own_ns": {str(r): round(float(ns)) for r, ns in _medians(joined)},
            "steps_used": len(joined),
        },
        gain=saved,
    )


def _medians(joined: Joined) -> list[tuple[int, float]]:
    return list(zip(joined.ranks.tolist(), np.median(joined.own_ns, axis=0).tolist(), strict=True))


_NOT_ALONE = " Other ranks are late in the same steps: most of it is gained when they are put right, too."
_REMEDIES = {
    "data": "Look at this rank's input: its storage, its loader workers, the sizes of its samples.",
    "forward": "Look for longer inputs on this rank, other processes on its host, a slower device.",
    "backward": "Look for longer inputs on this rank, other processes on its host, a slower device.",
    "optimizer": "Look at what this rank alone does after backward: clipping, logging, an optimizer of its own.",
    "other": "Look at what this rank does between the phases: logging, metrics, checks.",
}
