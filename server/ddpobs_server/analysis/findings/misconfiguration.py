"""Findings about wrong settings that raise no error, such as a sampler without `set_epoch`."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs.wire.facts import SamplerFacts, facts_of
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding

CODES = ("epoch-not-set",)


@dataclass(frozen=True)
class EpochNotSetFacts(Facts):
    """The sampler that repeats its order.

    Attributes:
        sampler: Class of the sampler; `unknown` if it is not known.
        dataset: Class of its dataset; `unknown` if it is not known.
        epoch: Epoch at which it stays; 0 if it is not known.
    """

    sampler: str
    dataset: str
    epoch: int


FACTS = (EpochNotSetFacts,)


def epoch_not_set(evidence: Evidence) -> Judgement:
    """Report a shuffling DistributedSampler that repeated the order of an epoch: `set_epoch` was not called."""
    records = [(rank, event) for rank, event in evidence.events if event.kind == "sampler_without_set_epoch"]
    if not records:
        return []
    first = min((event for _, event in records), key=lambda event: event.step)
    facts = facts_of(first, SamplerFacts)
    sampler, dataset, epoch = facts.sampler, facts.dataset, facts.epoch
    return [
        Finding(
            code="epoch-not-set",
            severity="warning",
            verdict="Every epoch reads the data in the same order",
            cause=f"{sampler} of {dataset} stays at epoch {epoch}",
            remedy="Call sampler.set_epoch(epoch) before each epoch's loop over the loader.",
            steps=(first.step, max(first.step, evidence.step_range[1])),
            ranks=sorted({rank for rank, _ in records}),
            evidence=EpochNotSetFacts(sampler, dataset, epoch),
        )
    ]
