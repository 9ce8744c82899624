"""Findings about settings that are wrong without an error, such as a sampler without `set_epoch`."""

from __future__ import annotations

from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Finding


def epoch_not_set(evidence: Evidence) -> Judgement:
    """A DistributedSampler that shuffles drew the same order again: `set_epoch` was forgotten."""
    told = [(rank, event) for rank, event in evidence.events if event.kind == "sampler_without_set_epoch"]
    if not told:
        return []
    first = min((event for _, event in told), key=lambda event: event.step)
    sampler, dataset = (first.detail.get(name, "unknown") for name in ("sampler", "dataset"))
    epoch = first.detail.get("epoch", 0)
    return [
        Finding(
            code="epoch-not-set",
            severity="warning",
            title=f"Every epoch sees the data in one and the same order: {sampler} of {dataset} stays at epoch {epoch}",
            remedy="Call sampler.set_epoch(epoch) before each epoch's loop over the loader.",
            steps=(first.step, max(first.step, evidence.seen[1])),
            ranks=sorted({rank for rank, _ in told}),
            evidence={"sampler": sampler, "dataset": dataset, "epoch": epoch},
        )
    ]
