"""Predicted steps after a change, in the form of the REST API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpobs.shared.quantities import duration
from ddpobs.whatif.model import Change, Fitted, Prediction
from ddpobs.whatif.predict import best_caps, of_a_launch, predict
from ddpobs.whatif.repair import Slowdown
from ddpobs_server.analysis.communication.fitted_steps import fitted_steps
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.steps.pipeline import slowdown_of


@dataclass(frozen=True)
class Question:
    """A change to predict.

    Attributes:
        change: What differs.
        seeks_caps: Whether the best limits of buckets are sought beside it.
    """

    change: Change
    seeks_caps: bool = False


_MIN_PERCENT = 0.05
"""A smaller saving would be written as 0.0 %."""


@dataclass(frozen=True)
class Modelled:
    """What is known of an attempt's steps.

    Attributes:
        fitted: The model, or why there is none.
        slowdown: What slow ranks cost; None if it is not known.
        phases: The phases of `slowdown`.
    """

    fitted: Fitted | str
    slowdown: Slowdown | None
    phases: tuple[str, ...]


def modelled(evidence: Evidence) -> Modelled:
    """Return the model of the latest steps; of a pipeline, what its slow ranks cost."""
    fitted = fitted_steps(evidence)
    if isinstance(fitted, str):
        return Modelled(fitted, slowdown_of(evidence.stages, evidence.joined), ("forward", "backward"))
    return Modelled(fitted, fitted.slowdown, fitted.phases)


def whatif_json(known: Modelled, questions: Sequence[Question]) -> dict[str, Any]:
    """Return the model, the present step, and an answer to each question."""
    fitted, slow_ranks = known.fitted, _slow_ranks(known)
    if isinstance(fitted, str):
        return {"model": None, "now": None, "slow_ranks": slow_ranks, "answers": [], "missing": [fitted]}
    now = predict(fitted, Change())
    return {
        "model": _model(fitted),
        "now": _step(now) if isinstance(now, Prediction) else None,
        "slow_ranks": slow_ranks,
        "answers": [_answer(fitted, question) for question in questions],
        "missing": [now] if isinstance(now, str) else [],
    }


def _model(fitted: Fitted) -> dict[str, Any]:
    link = fitted.typical.link
    return {
        "alpha_ns": round(link.alpha_ns) if link.is_separated or not link.beta_ns else None,
        "beta_bytes_per_s": round(1e9 / link.beta_ns) if link.is_separated and link.beta_ns else None,
        "slowdown_ratio": round(fitted.typical.slowdown(link), 4) if fitted.slowdown_is_known else None,
        "noise_ns": round(fitted.noise_ns),
        "replay_error_ns": round(fitted.replay_error_ns),
        "splits_buckets": fitted.parameters_known,
        "strategy": fitted.strategy,
        "batches": fitted.batches,
        "world_size": fitted.world_size,
    }


def _slow_ranks(known: Modelled) -> dict[str, Any] | None:
    if (cost := known.slowdown) is None:
        return None
    return {
        "slowdown": round(cost.total, 4),
        "lost_ratio": round(cost.lost_share, 4),
        "by_rank": [round(each, 4) for each in cost.by_rank.tolist()],
        "by_phase": dict(zip(known.phases, (round(each, 4) for each in cost.by_phase.tolist()), strict=True)),
    }


def _step(prediction: Prediction) -> dict[str, Any]:
    """Return one batch's time, and its buckets."""
    return {
        "step_ns": round(prediction.step_ns),
        "exposed_ns": round(prediction.exposed_ns),
        "batches": prediction.batches,
        "bucket_bytes": [round(size) for size in prediction.bucket_bytes.tolist()],
        "ready_ns": [round(at) for at in prediction.ready_ns.tolist()],
        "begun_ns": [round(at) for at in prediction.begun_ns.tolist()],
        "done_ns": [round(at) for at in prediction.done_ns.tolist()],
    }


def _answer(fitted: Fitted, question: Question) -> dict[str, Any]:
    change = question.change
    answer: Prediction | str
    if question.seeks_caps:
        found = best_caps(fitted, change)
        change, answer = (change, found) if isinstance(found, str) else found
    else:
        answer = predict(fitted, change)
    described: dict[str, Any] = {"change": words(change) or "as it is", "caps_mb": list(change.caps_mb or ())}
    if isinstance(answer, str):
        return described | {"refused": answer, "prediction": None}
    low_ns, high_ns = of_a_launch(answer)
    return described | {
        "refused": "",
        "prediction": _step(answer)
        | {
            "low_ns": round(low_ns),
            "high_ns": round(high_ns),
            "saved_ns": round(answer.saved_ns),
            "saved_ratio": round(answer.saved_ratio, 4),
            "error_ratio": round(answer.error_ns / answer.now_ns, 4),
            "words": saving_in_words(answer),
        },
    }


def saving_in_words(prediction: Prediction) -> str:
    """Return the saving with its direction and its error: `saves 3.1 ms of 24 ms a step (13 ± 2 %)`.

    Of a step with several batches it is that of a batch.
    """
    saved, share = prediction.saved_ns, 100 * prediction.saved_ratio
    error = 100 * prediction.error_ns / prediction.now_ns
    if abs(saved) <= prediction.error_ns:
        size = "" if abs(share) < _MIN_PERCENT else f"{abs(share):.1f} % {'less' if saved > 0 else 'more'}, "
        return f"no difference seen: {size}± {error:.1f} %"
    verb = "saves" if saved > 0 else "costs"
    unit = "a step" if prediction.batches == 1 else "a batch"
    return f"{verb} {duration(abs(saved))} of {duration(prediction.now_ns)} {unit} ({abs(share):.1f} ± {error:.1f} %)"


def words(change: Change) -> str:
    """Return a change in words: `bucket_cap_mb=5, comm='fp16'`; empty for none."""
    return ", ".join(_words(change))


def _words(change: Change) -> Iterator[str]:
    if change.caps_mb is not None:
        caps = ", ".join(f"{cap:.4g}" for cap in change.caps_mb)
        yield f"bucket_cap_mb_list=[{caps}]" if len(change.caps_mb) > 1 else f"bucket_cap_mb={caps}"
    if change.strategy is not None:
        yield f"comm={change.strategy!r}"
    if change.batches is not None:
        yield f"{change.batches} batches a step"
    if change.groups is not None:
        yield f"{change.groups} process groups"
    if change.world_size is not None:
        yield f"{change.world_size} ranks"
    if change.link_gbps is not None:
        yield f"a link of {change.link_gbps:g} Gbit/s"
    if change.link_factor is not None:
        yield f"a link {change.link_factor:g} times as fast"
    if change.repaired_rank is not None:
        half = "" if change.repaired_phase is None else f" half as slow in {change.repaired_phase}"
        yield f"rank {change.repaired_rank}{half or ' repaired'}"
    if change.find_unused is False:
        yield "find_unused_parameters=False"
