"""Findings about unused parameters, and about a needless `find_unused_parameters`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ddpobs import wire
from ddpobs.shared.words import format_ranks
from ddpobs_server.analysis.evidence import MAX_LISTED, MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, NotJudged, first_names

Names = frozenset[str]
CODES = ("unused-parameters", "find-unused-needless")
LATEST_SETS = 8
"""Latest unused sets of each rank and module: enough to separate a set that stays from sets that alternate."""


@dataclass(frozen=True)
class UnusedParametersFacts(Facts):
    """Parameters of one module: how many some rank leaves out, and the names of two kinds of them.

    Attributes:
        module: The module.
        globally: Names that every rank leaves out in every backward.
        locally: Number of names that some rank leaves out.
        sometimes: Names that a rank leaves out in some steps only.
    """

    module: int
    globally: list[str]
    locally: int
    sometimes: list[str]


@dataclass(frozen=True)
class FindUnusedNeedlessFacts(Facts):
    """What was looked through.

    Attributes:
        steps_used: Number of steps.
    """

    steps_used: int


FACTS = (UnusedParametersFacts, FindUnusedNeedlessFacts)


def unused_parameters(evidence: Evidence) -> Judgement:
    """Name the parameters that a recent backward left out, and which of them every backward left out."""
    findings: list[Finding | NotJudged] = []
    if evidence.unused_left_out:
        findings.append(NotJudged("unused-parameters", f"{evidence.unused_left_out} of the unused sets are too large"))
    by_module: dict[int, dict[int, list[wire.Unused]]] = {}
    for rank, record in evidence.unused:
        by_module.setdefault(record.module, {}).setdefault(rank, []).append(record)
    for module, by_rank in sorted(by_module.items()):
        in_force = {
            rank: _in_force(records, evidence.last_steps.get(rank, evidence.step_range[1]))
            for rank, records in by_rank.items()
        }
        nonempty = {rank: records for rank, records in in_force.items() if any(record.locally for record in records)}
        if nonempty:
            findings.append(_finding(module, nonempty, evidence))
    return findings


def _finding(module: int, in_force: dict[int, list[wire.Unused]], evidence: Evidence) -> Finding:
    """Describe a module's unused sets, of the ranks that have any that is not empty."""
    shared = _SharedSets()
    sets = {rank: shared.of_rank(records) for rank, records in in_force.items()}
    distinct = set(sets.values())  # Most ranks have the same sets: each combination is judged once.
    always = {rank_sets: _always_unused(rank_sets) for rank_sets in distinct}
    ever = {rank_sets: frozenset.union(*rank_sets) for rank_sets in distinct}
    all_ranks = sets.keys() >= evidence.last_steps.keys()
    globally: Names = frozenset.intersection(*always.values()) if all_ranks else frozenset()
    nothing: Names = frozenset()
    names = sorted(nothing.union(*ever.values()))
    sometimes = sorted(nothing.union(*(ever[rank_sets] - always[rank_sets] for rank_sets in distinct)))
    same_everywhere = all_ranks and all(len(rank_names) == len(names) for rank_names in ever.values())
    ranks = "every rank" if same_everywhere else format_ranks(sorted(sets))
    steps = " in some steps" if len(sometimes) == len(names) else ""
    subject = "1 parameter gets" if len(names) == 1 else f"{len(names)} parameters get"
    return Finding(
        code="unused-parameters",
        severity="warning" if globally else "info",
        verdict=f"{subject} no gradient{steps}",
        measure=f"{len(globally)} of them in no step on any rank" if globally else "",
        cause=f"the loss on {ranks} does not depend on {'it' if len(names) == 1 else 'them'}",
        where=first_names(names),
        remedy=(
            "Freeze or remove the parameters that no rank uses: they are reduced for nothing."
            if globally
            else f"{'Some steps' if sometimes else 'Some ranks'} skip a branch: find_unused_parameters=True is needed, "
            "and costs an all-reduce."
        ),
        steps=(
            min(record.step for records in in_force.values() for record in records if record.locally),
            evidence.step_range[1],
        ),
        ranks=sorted(sets),
        parameters=names[:MAX_LISTED],
        evidence=UnusedParametersFacts(
            module=module,
            globally=sorted(globally)[:MAX_LISTED],
            locally=len(names),
            sometimes=sometimes[:MAX_LISTED],
        ),
    )


class _SharedSets:
    """Names of unused sets, once for all sets with the same names: ranks times names would fill memory."""

    def __init__(self) -> None:
        self._by_list: dict[int, Names] = {}
        self._distinct: dict[Names, Names] = {}

    def of_rank(self, records: list[wire.Unused]) -> tuple[Names, ...]:
        return tuple(self._of_record(record) for record in records)

    def _of_record(self, record: wire.Unused) -> Names:
        names = self._by_list.get(id(record.locally))
        if names is None:
            names = frozenset(record.locally)
            names = self._by_list[id(record.locally)] = self._distinct.setdefault(names, names)
        return names


def _always_unused(sets: tuple[Names, ...]) -> Names:
    """Return the names in all of a rank's sets; none if some other parameter was trained under only one set.

    A parameter trained once suggests further ones that have not had their turn yet, such as experts or heads that take
    turns. The chance of a new one is about the share of those seen once (Good, Biometrika 40, 1953).
    """
    always, ever = frozenset.intersection(*sets), frozenset.union(*sets)
    trained_once = any(sum(name not in names for names in sets) == 1 for name in ever - always)
    return frozenset() if trained_once else always


def _in_force(records: list[wire.Unused], last: int) -> list[wire.Unused]:
    """Return the sets that were valid in the latest steps, so that a set that has its turn is not taken as permanent.

    The latest steps are `MIN_STEPS`, or twice the longest turn if sets come back.

    Args:
        records: Sets of one rank and module in the order of recording; each is valid until the next.
        last: The rank's last step.
    """
    records = records[-LATEST_SETS:]
    turns = [successor.step - record.step for record, successor in pairwise(records)]
    come_back = len({tuple(record.locally) for record in records}) < len(records)
    first = last + 1 - max([MIN_STEPS, *(2 * turn for turn in turns if come_back)])
    earlier = [record for record, successor in pairwise(records) if successor.step > first]
    return [*earlier, records[-1]]


def find_unused_needless(evidence: Evidence) -> Judgement:
    """Report that `find_unused_parameters` is on, although every parameter was always used."""
    if not evidence.settings.get("find_unused_parameters"):
        return []
    if reason := _not_judged_reason(evidence):
        return [NotJudged("find-unused-needless", reason)]
    if any(record.locally for _, record in evidence.unused):
        return []
    steps = evidence.step_count
    return [
        Finding(
            code="find-unused-needless",
            severity="info",
            verdict="find_unused_parameters is on without need",
            measure=f"every parameter took part in all {steps} steps",
            remedy="Leave find_unused_parameters out: it costs an all-reduce a step, and torch's reducer a graph walk.",
            steps=evidence.step_range,
            evidence=FindUnusedNeedlessFacts(steps),
        )
    ]


def _not_judged_reason(evidence: Evidence) -> str:
    if evidence.step_count < MIN_STEPS:
        return f"fewer than {MIN_STEPS} steps"
    if any(evidence.dropped.values()) or evidence.has_gaps:
        return "records were dropped or have not arrived; an unused set may be among them"
    if evidence.absent_ranks:
        return f"no steps of {format_ranks(evidence.absent_ranks)} can be compared"
    return ""
