"""Rows of sums over attempts, and what the metrics of some runs are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddpobs_server.store.rows import Run


@dataclass(frozen=True)
class Rollup:
    """Sums of a rank over an attempt, in ns; `own_ns` covers the `own_steps` with a known own time."""

    rank: int
    steps: int
    wall_ns: int
    phases_ns: dict[str, int]
    comm_ns: int
    samples: int
    own_ns: int
    own_steps: int


@dataclass(frozen=True)
class BucketRollup:
    """Sums of a bucket over all ranks of an attempt, in ns."""

    module: int
    revision: int
    bucket: int
    steps: int
    compute_ns: int
    comm_ns: int
    exposed_ns: int


class LastSeen(NamedTuple):
    """Progress of the ranks of a run, by rank: the last step, its arrival, both 0 without a step, and lost records."""

    rank: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    seen_ns: tuple[int, ...] = ()
    dropped: tuple[float, ...] = ()


class PeerTotals(NamedTuple):
    """Straggler statistics of the ranks of a run, by rank, summed over an attempt."""

    rank: tuple[int, ...] = ()
    steps: tuple[float, ...] = ()
    delay_ns: tuple[float, ...] = ()
    wait_ns: tuple[float, ...] = ()
    moving_ns: tuple[float, ...] = ()
    straggler_data: tuple[float, ...] = ()
    straggler_forward: tuple[float, ...] = ()
    straggler_backward: tuple[float, ...] = ()
    straggler_optimizer: tuple[float, ...] = ()
    straggler_other: tuple[float, ...] = ()


class PhaseSums(NamedTuple):
    """Steps, communication and phases of the ranks of a run, by rank, summed over an attempt."""

    rank: tuple[int, ...] = ()
    steps: tuple[float, ...] = ()
    comm_ns: tuple[float, ...] = ()
    data_ns: tuple[float, ...] = ()
    forward_ns: tuple[float, ...] = ()
    backward_ns: tuple[float, ...] = ()
    exposed_comm_ns: tuple[float, ...] = ()
    optimizer_ns: tuple[float, ...] = ()
    other_ns: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayoutOutline:
    """A layout without its parameters' names.

    Attributes:
        module: Index of the DDP module.
        revision: Number of the layout within the module.
        name: The module's name.
        size_bytes: Of each bucket, shape [buckets].
        dtypes: Of each bucket.
        parameters: Number in each bucket, shape [buckets].
        titles: Names of a fully sharded model's rows; empty for buckets.
    """

    module: int
    revision: int
    name: str
    size_bytes: npt.NDArray[np.float64]
    dtypes: tuple[str, ...]
    parameters: npt.NDArray[np.int32]
    titles: tuple[str, ...]


@dataclass(frozen=True)
class Aggregates:
    """Data for the metrics of some runs' latest attempts, by run. Tuples in lists begin with the run.

    Attributes:
        runs: All active runs.
        changed: Keys of the runs that the other attributes cover: those without an entry in `known`.
        phases: Sums of the ranks with a step.
        last_seen: Progress of the ranks.
        facts: Backend, device and version of torch.
        histograms: Steps under each of `schema.STEP_BOUNDS_S` and above the last.
        buckets: Sums of each bucket that a layout names.
        outlines: Layouts by run, module and revision.
        reduced_bytes: Bytes of the buckets that each rank reduced.
        peers: Straggler statistics.
        unused: Number of parameters without a gradient.
    """

    runs: list[Run]
    changed: frozenset[str]
    phases: dict[str, PhaseSums]
    last_seen: dict[str, LastSeen]
    facts: dict[str, tuple[str, str, str]]
    histograms: dict[str, list[int]]
    buckets: list[tuple[str, BucketRollup]]
    outlines: dict[tuple[str, int, int], LayoutOutline]
    reduced_bytes: dict[str, dict[int, float]]
    peers: dict[str, PeerTotals]
    unused: dict[str, int]
