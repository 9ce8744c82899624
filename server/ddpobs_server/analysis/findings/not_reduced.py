"""Finding `not-reduced`: an optimizer stepped on gradients that no collective reduced, or nothing ever synchronised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddpobs import wire
from ddpobs.shared.words import format_ranks
from ddpobs.wire import facts as wire_facts
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, first_names

CODES = ("not-reduced",)


@dataclass(frozen=True)
class NotReducedFacts(Facts):
    """Gradients that each rank applied by itself.

    Attributes:
        reason: `unsynchronised`, `bypassed`, `unfrozen`, `never`, or `exchanged` if the script reduces by itself.
        count: Number of parameters; None if no gradient was ever reduced.
        optimizer_steps: Steps of the optimizer without any reduction by DDP; None if some gradients were reduced.
        every: Steps of the optimizer from one exchange of the script's own to the next; None without any.
        exact: Whether these are all-reduces of just as many elements as the model has; None without any.
    """

    reason: str
    count: int | None = None
    optimizer_steps: int | None = None
    every: int | None = None
    exact: bool | None = None


FACTS = (NotReducedFacts,)


def not_reduced(evidence: Evidence) -> Judgement:
    """Report gradients that each rank applied by itself: the replicas train apart, without an error."""
    found = [(rank, event, _of(event)) for rank, event in evidence.events if event.kind == "not_reduced"]
    never = [(rank, _of(event)) for rank, event in evidence.events if event.kind == "never_synchronised"]
    exchanged = exchanges_of(evidence)
    found = [entry for entry in found if entry[2].reason == "unfrozen" or (entry[0], entry[2].module) not in exchanged]
    findings = _exchanged(evidence, exchanged)
    for reason in dict.fromkeys(facts.reason for _, _, facts in found):
        reported = [(rank, event, facts) for rank, event, facts in found if facts.reason == reason]
        names = [name for name in reported[0][2].parameters.split(", ") if name]
        count = max(facts.count for _, _, facts in reported)
        step = min(event.step for _, event, _ in reported)
        why = "unsharded" if reason == "unfrozen" and evidence.is_fully_shard else reason
        ranks = sorted({rank for rank, _, _ in reported})
        findings.append(
            Finding(
                code="not-reduced",
                severity="critical",
                verdict="The optimizer stepped on gradients that were never reduced",
                measure=f"{count} parameter{'s' * (count != 1)}",
                when=f"first in step {step}",
                cause=_WHY.get(why, _WHY["unsynchronised"]),
                where=evidence.where(ranks, first_names(names, count)),
                remedy=_REMEDY.get(why, _REMEDY["unsynchronised"]),
                steps=(step, max(event.step for _, event, _ in reported)),
                ranks=ranks,
                parameters=names,
                evidence=NotReducedFacts(reason, count=count),
            )
        )
    if never and not found:
        ranks = sorted({rank for rank, _ in never})
        steps = max(facts.optimizer_steps for _, facts in never)
        findings.append(
            Finding(
                code="not-reduced",
                severity="critical",
                verdict="No gradient was ever reduced",
                measure=f"{steps} optimizer steps, each rank for itself",
                cause="not known: the wrapped module was not called, or no_sync was always on",
                where=evidence.where(ranks, format_ranks(ranks)),
                remedy=_REMEDY["never"],
                steps=(0, 0),
                ranks=ranks,
                evidence=NotReducedFacts("never", optimizer_steps=steps),
            )
        )
    return findings


def exchanges_of(evidence: Evidence) -> dict[tuple[int, int], wire_facts.NotReducedFacts]:
    """Return the latest facts of each rank's module that the script keeps together by its own collectives."""
    own = [(rank, _of(event)) for rank, event in evidence.events if event.kind == "exchanged"]
    own.sort(key=lambda entry: entry[1].optimizer_steps)
    return {(rank, facts.module): facts for rank, facts in own}


def _exchanged(evidence: Evidence, exchanged: Mapping[tuple[int, int], wire_facts.NotReducedFacts]) -> list[Finding]:
    """State that the script exchanges by its own collectives; replicas that differ after it are `replicas-differ`."""
    apart = {sample.module for _, sample in evidence.fingerprints}
    kept = {key: facts for key, facts in exchanged.items() if key[1] not in apart}
    if not kept:
        return []
    facts = max(kept.values(), key=lambda facts: facts.optimizer_steps)
    ranks = sorted({rank for rank, _ in kept})
    is_exact, by_hand = 2 * facts.exact > facts.exchanges, facts.every <= 1
    often = "before each optimizer step" if by_hand else f"every {facts.every} optimizer steps"
    what = "The script's own collectives reduce the gradients" if by_hand else "The replicas are averaged"
    return [
        Finding(
            code="not-reduced",
            severity="info" if is_exact else "warning",
            verdict=f"{what} {often}" if is_exact else f"Own collectives may reduce or average {often}",
            measure=f"{facts.exchanges} exchanges in {facts.optimizer_steps} optimizer steps, none by DDP",
            cause="" if is_exact else "not known, because only their size is that of the model",
            where=evidence.where(ranks, format_ranks(ranks)),
            remedy="Nothing, if it is meant." if is_exact else _INEXACT,
            steps=(0, 0),
            ranks=ranks,
            evidence=NotReducedFacts(
                "exchanged", optimizer_steps=facts.optimizer_steps, every=facts.every, exact=is_exact
            ),
        )
    ]


def _of(event: wire.Event) -> wire_facts.NotReducedFacts:
    return wire_facts.facts_of(event, wire_facts.NotReducedFacts)


_INEXACT = (
    "Make sure that these collectives keep the replicas equal: compare a parameter over the ranks. All-reduces of all "
    "gradients or parameters are compared without that."
)
_WHY = {
    "unsynchronised": "the last backward before the step ran without synchronisation",
    "bypassed": "the forward did not go through the DistributedDataParallel module",
    "unfrozen": "these parameters required no gradient when the module was wrapped",
    "unsharded": "fully_shard was not applied to them: no unit holds these parameters",
}
_REMEDY = {
    "unsynchronised": "Leave no_sync for the last micro-batch before the optimizer's step: the condition is often off "
    "by one, or set after the forward.",
    "bypassed": "Call the wrapped module (model(...)), not model.module(...) or a method of it.",
    "unfrozen": "Unfreeze parameters before wrapping, or wrap the module again after it; ddpobs' own "
    "DistributedDataParallel takes them in by itself.",
    "unsharded": "Apply fully_shard to the root module too, after its blocks. Reduce the gradients of ignored_params "
    "by your own code.",
    "never": "Call the wrapped module, outside of no_sync: torch synchronises in the backward of its own forward only.",
}
