"""Finding `compression-pays`: gradients in half precision are predicted to make the steps faster."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs.shared.quantities import duration
from ddpobs.whatif.model import Change, Fitted
from ddpobs_server.analysis.communication.predicted_gain import exposes_communication, gain_of, steady_fit_of
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, advice_severity

CODES = ("compression-pays",)
UNCOMPRESSED = "all_reduce"
_STRATEGY = "fp16"
"""The slower one of the two: a gain with it is a gain with bf16."""
_WIDE = ("float32", "float64")


@dataclass(frozen=True)
class CompressionPaysFacts(Facts):
    """The gradients, and the replayed step.

    Attributes:
        bytes_a_step: Bytes of the gradients.
        bytes_per_s: Bytes a second while they moved.
        exposed_ns: Exposed communication of a step.
        replay_error_ns: Error of the replay.
    """

    bytes_a_step: int
    bytes_per_s: int
    exposed_ns: int
    replay_error_ns: int


FACTS = (CompressionPaysFacts,)


def compression_pays(evidence: Evidence) -> Judgement:
    """Judge the time that a step would save with half of the bytes, less the casts."""
    if evidence.columns is None or not exposes_communication(evidence):
        return []
    layouts = evidence.columns.layouts()
    is_wide = all(bucket.dtype in _WIDE for layout in layouts for bucket in layout.buckets)
    if not layouts or not is_wide or any(layout.comm != UNCOMPRESSED for layout in layouts):
        return []
    fitted = steady_fit_of(evidence)
    if isinstance(fitted, str):
        return [NotJudged("compression-pays", fitted)]
    gain = gain_of(fitted, Change(strategy=_STRATEGY))
    return [] if gain is None else [_finding(evidence, fitted, gain)]


def _finding(evidence: Evidence, fitted: Fitted, gain: Gain) -> Finding:
    size_bytes = float(fitted.typical.sizes.sum())
    size_mb = size_bytes / 1e6
    return Finding(
        code="compression-pays",
        severity=advice_severity(gain),
        verdict="Gradients in half precision would make steps faster",
        measure=f"{size_mb / 2:.3g} instead of {size_mb:.3g} MB a step",
        cause=f"backward does not hide {duration(fitted.exposed_ns)} of communication a step",
        remedy=(
            "Pass comm='bf16', or register torch's bf16_compress_hook, and compare the loss of a short run: half "
            "precision rounds the gradients."
        ),
        steps=evidence.step_range,
        phase="exposed_comm",
        gain=gain,
        evidence=CompressionPaysFacts(
            bytes_a_step=round(size_bytes),
            bytes_per_s=round(1e9 * size_bytes / fitted.moving_ns),
            exposed_ns=round(fitted.exposed_ns),
            replay_error_ns=round(fitted.replay_error_ns),
        ),
    )
