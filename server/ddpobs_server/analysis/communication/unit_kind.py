"""Why training waits for the collectives of a fully sharded model's units, and which change saves most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ddpobs.shared.quantities import counted, duration, size_text, three_digits
from ddpobs.whatif.link import Link
from ddpobs_server.analysis.communication.comm_kind import CommKind, disturbed_kind, unknown_kind
from ddpobs_server.analysis.communication.unit_changes import (
    LIMITS_MB,
    half_saving_ns,
    hidden_ns,
    kept_bytes,
    kept_saving_ns,
    links_of,
    merged_saving_ns,
)
from ddpobs_server.analysis.communication.unit_steps import UnitSteps, unit_steps, unsteady_reason
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Gain
from ddpobs_server.analysis.steps.joined_steps import Floats

_HALF = (
    "Gather and reduce in half precision, MixedPrecisionPolicy(param_dtype=torch.bfloat16), and compare the loss of a "
    "short run."
)
_MOST = 0.5
"""Share of the exposed time above which one cause explains it."""


def waiting_within_ns(evidence: Evidence) -> float:
    """Return the mean time that even the last rank of a step waits for others, at single collectives of its units.

    Ranks that are late in turn within a step each wait for the other, so the step's least exposed time holds waiting.
    It is 0 where units cannot be compared.
    """
    units = unit_steps(evidence)
    if isinstance(units, str):
        return 0.0
    return float((units.waited_ns.sum(axis=1).min(axis=1) - units.exposed_ns.sum(axis=1)).mean())


def unit_kind(evidence: Evidence, moving_ns: float) -> CommKind:
    """Return the cause: late launches, the disturbance of the collectives, their bytes, or their number.

    Args:
        evidence: A run whose model is sharded.
        moving_ns: Exposed communication of a step, without waiting.
    """
    units = unit_steps(evidence)
    if isinstance(units, str):
        return unknown_kind(units)
    if not evidence.is_fully_shard:
        return unknown_kind("it is not modelled for DeepSpeed")
    exposed_ns = units.exposed_ns.sum(axis=1)
    if float(exposed_ns.mean()) < _MOST * moving_ns:
        return CommKind(
            "outside",
            "most of it is in other collectives than the units'",
            "Look at the collectives of your own code: /trace shows them.",
        )
    if (disturbed := disturbed_kind(evidence, exposed_ns)) is not None:
        return disturbed
    late_ns = hidden_ns(units).sum(axis=1)
    if float(np.median(late_ns)) >= _MOST * float(np.median(exposed_ns)):
        return _launched_late(evidence, units, late_ns)
    links = links_of(units)
    bytes_ns = sum(links[row.kind].beta_ns * row.size_bytes for row in units.rows)
    latency_ns = sum(links[row.kind].alpha_ns for row in units.rows)
    return _bandwidth(units, links) if bytes_ns >= latency_ns else _latency(units, links, latency_ns)


def unit_facts(evidence: Evidence) -> dict[str, Any]:
    """Return sizes and bandwidth of the collectives, and the time that training waits for each kind of them."""
    units = unit_steps(evidence)
    if isinstance(units, str):
        return {}
    sizes = np.array([row.size_bytes for row in units.rows])
    typical_ns = np.median(units.exposed_ns, axis=0)
    by_kind: dict[str, float] = {}
    for row, exposed_ns in zip(units.rows, typical_ns.tolist(), strict=True):
        by_kind[row.kind] = by_kind.get(row.kind, 0.0) + exposed_ns
    return {
        "exposed_by_collective_ns": {kind: round(exposed_ns) for kind, exposed_ns in by_kind.items()},
        "bytes_a_step": int(sizes.sum()),
        "messages_a_step": float(len(sizes)),
        "message_bytes": [int(size) for size in np.quantile(sizes, [0.0, 0.5, 1.0])],
        "bytes_per_s": round(1e9 * _rate(units)),
    }


def _launched_late(evidence: Evidence, units: UnitSteps, late_ns: Floats) -> CommKind:
    late = duration(float(np.median(late_ns)))
    words = f"all-gathers that begin only after the computation before them, {late} a step"
    if reason := unsteady_reason(evidence, units):
        return unknown_kind(f"it may be {words}; but {reason}")
    return CommKind("launch", words, "Begin all-gathers earlier: see prefetch-missing.", units.gain(late_ns))


def _bandwidth(units: UnitSteps, links: Mapping[str, Link]) -> CommKind:
    total = size_text(sum(row.size_bytes for row in units.rows))
    words = f"the bytes of {total} a step at {three_digits(_rate(units))} GB/s"
    half = units.gain(half_saving_ns(units, links))
    return _best("bandwidth", words, [(half, _HALF), _kept(units)], " Or use a faster link.")


def _latency(units: UnitSteps, links: Mapping[str, Link], latency_ns: float) -> CommKind:
    words = f"the latency of {counted(len(units.rows), 'collective')}: {duration(latency_ns)} a step"
    merged = [units.gain(merged_saving_ns(units, links, 1e6 * limit)) for limit in LIMITS_MB]
    most = max((gain for gain in merged if gain), key=lambda gain: gain.step_ns, default=None)
    larger = "Make larger units of neighbouring modules: see unit-size."
    return _best("latency", words, [(most, larger), _kept(units)], " Or accumulate over several micro-batches.")


def _kept(units: UnitSteps) -> tuple[Gain | None, str]:
    remedy = (
        "Keep parameters gathered until backward: fully_shard(module, reshard_after_forward=False), if each rank has "
        f"room for {size_text(kept_bytes(units))} more."
    )
    return units.gain(kept_saving_ns(units)), remedy


def _best(name: str, words: str, changes: list[tuple[Gain | None, str]], otherwise: str) -> CommKind:
    """Return the kind with the change that saves most; with the first one if none is known to save."""
    gain, remedy = max(changes, key=lambda change: change[0].step_ns if change[0] else 0)
    return CommKind(name, words, remedy + otherwise, gain)


def _rate(units: UnitSteps) -> float:
    """Bytes a nanosecond while they moved, without waiting."""
    total = sum(row.size_bytes for row in units.rows)
    return total / max(1.0, float(np.median(units.moving_ns.sum(axis=1))))
