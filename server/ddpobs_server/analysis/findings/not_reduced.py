"""Finding `not-reduced`: an optimizer stepped on gradients that no collective reduced, or nothing ever synchronised."""

from __future__ import annotations

from ddpobs.shared.words import format_ranks
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Finding

CODES = ("not-reduced",)
_SHOWN = 3


def not_reduced(evidence: Evidence) -> Judgement:
    """Report gradients that each rank applied by itself: the replicas train apart, without an error."""
    found = [(rank, event) for rank, event in evidence.events if event.kind == "not_reduced"]
    never = [(rank, event) for rank, event in evidence.events if event.kind == "never_synchronised"]
    findings = []
    for reason in dict.fromkeys(str(event.detail.get("reason")) for _, event in found):
        reported = [(rank, event) for rank, event in found if event.detail.get("reason") == reason]
        names = [name for name in str(reported[0][1].detail.get("parameters") or "").split(", ") if name]
        count = max(int(event.detail.get("count") or 0) for _, event in reported)
        shown = ", ".join(names[:_SHOWN]) + (f" and {count - _SHOWN} more" if count > _SHOWN else "")
        step = min(event.step for _, event in reported)
        findings.append(
            Finding(
                code="not-reduced",
                severity="critical",
                verdict=f"The optimizer stepped on gradients that were never reduced, first in step {step}: {shown}. "
                f"{_WHY.get(reason, _WHY['unsynchronised'])}",
                remedy=_REMEDY.get(reason, _REMEDY["unsynchronised"]),
                steps=(step, max(event.step for _, event in reported)),
                ranks=sorted({rank for rank, _ in reported}),
                parameters=names,
                evidence={"reason": reason, "count": count},
            )
        )
    if never and not found:
        ranks = sorted({rank for rank, _ in never})
        steps = max(int(event.detail.get("optimizer_steps") or 0) for _, event in never)
        findings.append(
            Finding(
                code="not-reduced",
                severity="critical",
                verdict=f"No gradient was ever reduced: {format_ranks(ranks)} trained apart",
                measure=f"{steps} optimizer steps",
                remedy=_REMEDY["never"],
                steps=(0, 0),
                ranks=ranks,
                evidence={"reason": "never", "optimizer_steps": steps},
            )
        )
    return findings


_WHY = {
    "unsynchronised": "The last backward before the step ran without synchronisation.",
    "bypassed": "The forward did not go through the DistributedDataParallel module.",
    "unfrozen": "These parameters required no gradient when the module was wrapped.",
}
_REMEDY = {
    "unsynchronised": "Leave no_sync for the last micro-batch before the optimizer's step: the condition is often off "
    "by one, or set after the forward.",
    "bypassed": "Call the wrapped module (model(...)), not model.module(...) or a method of it.",
    "unfrozen": "Unfreeze parameters before wrapping, or wrap the module again after it; ddpobs' own "
    "DistributedDataParallel takes them in by itself.",
    "never": "Call the wrapped module, outside of no_sync: torch synchronises in the backward of its own forward only.",
}
