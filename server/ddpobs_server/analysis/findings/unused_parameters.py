"""Findings about unused parameters, and about a needless `find_unused_parameters`."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.evidence import _SHOWN, MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Finding, NotJudged, format_ranks

LATEST_SETS = 8
"""Of each rank's unused sets of a module so many of the latest tell one that stays from those that alternate."""


def unused_parameters(evidence: Evidence) -> Judgement:
    """Parameters that some backward left out, by name; those left out always are told apart."""
    told: dict[int, dict[int, list[wire.Unused]]] = {}
    for rank, record in evidence.unused:
        told.setdefault(record.module, {}).setdefault(rank, []).append(record)
    findings = []
    for module, by_rank in sorted(told.items()):
        lately = {
            rank: _in_force(records, evidence.last_steps.get(rank, evidence.seen[1]))
            for rank, records in by_rank.items()
        }
        lately = {rank: records for rank, records in lately.items() if any(record.locally for record in records)}
        if lately:
            findings.append(_left_out(module, lately, evidence))
    return findings


def _left_out(module: int, lately: dict[int, list[wire.Unused]], evidence: Evidence) -> Finding:
    """What the sets of some ranks say of a module, each rank's not all empty."""
    sets = {rank: [set(record.locally) for record in records] for rank, records in lately.items()}
    always = {rank: _always(of_rank) for rank, of_rank in sets.items()}
    ever = {rank: set.union(*of_rank) for rank, of_rank in sets.items()}
    everyone = sets.keys() >= evidence.last_steps.keys()
    nobody = set.intersection(*always.values()) if everyone else set()
    names = sorted(set().union(*ever.values()))
    sometimes = sorted(set().union(*(ever[rank] - always[rank] for rank in sets)))
    all_alike = everyone and all(of_rank == set(names) for of_rank in ever.values())
    where = "on every rank" if all_alike else f"on rank {format_ranks(sorted(sets))}"
    when = " in some steps" if len(sometimes) == len(names) else ""
    skip = "Some steps skip" if sometimes else "Some ranks skip"
    return Finding(
        code="unused-parameters",
        severity="warning" if nobody else "info",
        title=f"{len(names)} parameters get no gradient {where}{when}, {names[0]} among them",
        remedy=(
            "Freeze or remove what no rank uses: it is reduced for nothing."
            if nobody
            else f"{skip} a branch: find_unused_parameters=True is needed, and costs an all-reduce."
        ),
        steps=(min(one.step for records in lately.values() for one in records if one.locally), evidence.seen[1]),
        ranks=sorted(sets),
        parameters=names[:_SHOWN],
        evidence={
            "module": module,
            "globally": sorted(nobody)[:_SHOWN],
            "locally": len(names),
            "sometimes": sometimes[:_SHOWN],
        },
    )


def _always(sets: list[set[str]]) -> set[str]:
    """What all of a rank's sets name; nothing where one of the others was trained under a single one of them.

    What was drawn once may stand for many that were not drawn yet, as of experts or of heads that take turns: the
    chance of something new is about the share of what was seen once (Good, Biometrika 40, 1953).
    """
    always, ever = set.intersection(*sets), set.union(*sets)
    once = any(sum(name not in one for one in sets) == 1 for name in ever - always)
    return set() if once else always


def _in_force(told: list[wire.Unused], last: int) -> list[wire.Unused]:
    """The sets that held in the latest steps: in `MIN_STEPS`, or where sets come back in twice as many as one held.

    So a set whose turn it is, however long that is, is not taken for one that stays.

    Args:
        told: One rank's sets of a module in the order in which it told them, each valid until the next.
        last: The rank's last step.
    """
    told = told[-LATEST_SETS:]
    turns = [following.step - record.step for record, following in pairwise(told)]
    come_back = len({tuple(record.locally) for record in told}) < len(told)
    first = last + 1 - max([MIN_STEPS, *(2 * turn for turn in turns if come_back)])
    earlier = [record for record, following in pairwise(told) if following.step > first]
    return [*earlier, told[-1]]


def find_unused_needless(evidence: Evidence) -> Judgement:
    """`find_unused_parameters` is on, and nothing was ever unused."""
    if not evidence.settings.get("find_unused_parameters"):
        return []
    if len(np.unique(evidence.steps.step)) < MIN_STEPS:
        return NotJudged("find-unused-needless", f"fewer than {MIN_STEPS} steps")
    if any(evidence.dropped.values()) or evidence.gaps:
        return NotJudged(
            "find-unused-needless", "records were dropped, or have not arrived, an unused set perhaps among them"
        )
    if evidence.absent:
        return NotJudged("find-unused-needless", f"nothing is known of rank {format_ranks(evidence.absent)}")
    if any(record.locally for _, record in evidence.unused):
        return []
    return [
        Finding(
            code="find-unused-needless",
            severity="info",
            title="find_unused_parameters is on, but every parameter took part in every step",
            remedy="Leave find_unused_parameters out: it costs an all-reduce a step, and torch's reducer a graph walk.",
            steps=evidence.seen,
        )
    ]
