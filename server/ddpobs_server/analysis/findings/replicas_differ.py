"""Finding `replicas-differ`: parameters, gradients or buffers differ over the ranks, by their fingerprints."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs.shared.words import format_ranks
from ddpobs_server.analysis.evidence import MAX_LISTED, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, first_names
from ddpobs_server.analysis.findings.not_reduced import exchanges_of

CODES = ("replicas-differ",)
_PARTS = ("gradients", "parameters", "buffers")


@dataclass(frozen=True)
class ReplicasDifferFacts(Facts):
    """What differs between the replicas of a module.

    Attributes:
        module: Number of the module.
        equal_until: Last sampled step in which all agreed; -1 without one.
        parts: Parts that differ: gradients, parameters or buffers.
        differing_gradients: Names of gradients that differ; None if none do.
        differing_parameters: Names of parameters that differ; None if none do.
        differing_buffers: Names of buffers that differ; None if none do.
    """

    module: int
    equal_until: int
    parts: list[str]
    differing_gradients: list[str] | None = None
    differing_parameters: list[str] | None = None
    differing_buffers: list[str] | None = None


FACTS = (ReplicasDifferFacts,)


@dataclass(frozen=True)
class _Difference:
    """A part of the replicas that differs in one sampled step."""

    part: str
    names: list[str]
    ranks: list[int]


def replicas_differ(evidence: Evidence) -> Judgement:
    """Report the first sampled step in which a module's replicas differ, or those of one of its shards."""
    samples: dict[int, dict[int, dict[int, wire.Fingerprint]]] = defaultdict(lambda: defaultdict(dict))
    for rank, sample in evidence.fingerprints:
        samples[sample.module][sample.synchronised][rank] = sample
    by_module: dict[int, list[tuple[int, int, list[_Difference]]]] = defaultdict(list)
    for number, steps in sorted(samples.items()):
        if (first := _first_difference(steps)) is not None:
            by_module[wire.module_of_replicas(number, evidence.world_size)].append(first)
    findings = []
    for module, differing in sorted(by_module.items()):
        step = min(step for _, step, _ in differing)
        earliest = [each for each in differing if each[1] == step]
        equal_until = min(equal_until for equal_until, _, _ in earliest)
        differences = _merged([difference for _, _, found in earliest for difference in found])
        findings.append(_finding(evidence, module, (equal_until, step), differences))
    return findings


def _first_difference(steps: dict[int, dict[int, wire.Fingerprint]]) -> tuple[int, int, list[_Difference]] | None:
    """Last sampled step in which all agreed, the first in which ranks differ, and what differs; None if none does."""
    equal_until = wire.UNKNOWN
    for step, ranks in sorted(steps.items()):
        if len(ranks) < 2:
            continue
        differences = [d for part in _PARTS if (d := _difference(ranks, part)) is not None]
        if differences:
            return equal_until, step, differences
        equal_until = step
    return None


def _merged(differences: list[_Difference]) -> list[_Difference]:
    """One difference for each part, of all shards."""
    return [
        _Difference(
            part,
            list(dict.fromkeys(name for each in of_part for name in each.names)),
            sorted({rank for each in of_part for rank in each.ranks}),
        )
        for part in _PARTS
        if (of_part := [each for each in differences if each.part == part])
    ]


def _difference(ranks: dict[int, wire.Fingerprint], part: str) -> _Difference | None:
    """Names and ranks whose hash is not the most frequent one; None where all agree or the shapes do not fit."""
    numbers = sorted(ranks)
    columns = [getattr(ranks[rank], part) for rank in numbers]
    if len({len(column) for column in columns}) != 1 or not len(columns[0]):
        return None
    hashes: npt.NDArray[np.int64] = np.stack(columns)
    odd = hashes != _majority(hashes)
    if not odd.any():
        return None
    first = ranks[numbers[0]]
    names = first.buffer_names if part == "buffers" else first.names
    differing = [names[index] for index in np.flatnonzero(odd.any(axis=0)) if index < len(names)]
    return _Difference(part, differing, [rank for rank, is_odd in zip(numbers, odd.any(axis=1), strict=True) if is_odd])


def _majority(hashes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The most frequent hash per column; of equally frequent ones the lowest rank's."""
    columns = [max(Counter(column.tolist()).items(), key=lambda item: item[1])[0] for column in hashes.T]
    return np.array(columns, np.int64)


def _finding(evidence: Evidence, module: int, steps: tuple[int, int], differences: list[_Difference]) -> Finding:
    equal_until, step = steps
    names = list(dict.fromkeys(name for difference in differences for name in difference.names))
    ranks = sorted({rank for difference in differences for rank in difference.ranks})
    parts = {difference.part for difference in differences}
    if module in {exchanged for _, exchanged in exchanges_of(evidence)}:
        cause, remedy = "the script's own collectives did not make the parameters equal", _EXCHANGE
    elif "gradients" in parts:
        cause, remedy = "the reduced gradients differ, before the optimizer", _REDUCTION
    elif "parameters" in parts:
        cause, remedy = "after the reduction: gradients agree, parameters differ", _OPTIMIZER
    else:
        cause, remedy = "the buffers alone differ", _BUFFERS
    return Finding(
        code="replicas-differ",
        severity="critical",
        verdict="The ranks' replicas of the model differ",
        measure=f"{len(names)} tensor{'s' * (len(names) != 1)} on {format_ranks(ranks)}",
        when=_since(equal_until, step),
        cause=cause,
        where=evidence.where(ranks, first_names(names)),
        remedy=remedy,
        steps=(max(0, equal_until), step),
        ranks=ranks,
        parameters=names[:MAX_LISTED],
        evidence=ReplicasDifferFacts(
            module=module,
            equal_until=equal_until,
            parts=sorted(parts),
            **{f"differing_{difference.part}": difference.names[:MAX_LISTED] for difference in differences},
        ),
    )


_EXCHANGE = (
    "Average every parameter on every rank, and change none on one rank after it. Look for a rank that skips its "
    "optimizer's step, or a gradient that is left out."
)
_REDUCTION = (
    "Look for gradients that are changed on one rank after the reduction, a communication hook whose result differs, a "
    "parameter outside of the reduction, or memory errors on that host."
)
_OPTIMIZER = (
    "Look for an optimizer step that one rank skips, optimizer state that was loaded on one rank, different "
    "hyperparameters, code that writes parameters on one rank, or memory errors on that host."
)
_BUFFERS = (
    "Look for code that writes buffers on one rank. If the buffers are meant to differ, set broadcast_buffers=False."
)


def _since(equal_until: int, step: int) -> str:
    if equal_until < 0:
        return f"since step {step} or before"
    return f"since step {step}" if step == equal_until + 1 else f"since a step from {equal_until + 1} to {step}"
