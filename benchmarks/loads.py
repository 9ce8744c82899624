"""Synthetic batches for measurements, with times as in a training."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import numpy as np

from ddpobs import wire

FLOOD_STEPS, FLOOD_BUCKETS = 250, 20
JOB_STEPS_A_SECOND, JOB_BUCKETS, JOB_FLUSH_S = 2, 40, 2.0
_ATTEMPT = "a" * 16


@dataclass(frozen=True)
class Load:
    """Size and rate of a load.

    Attributes:
        ranks: Number of sources.
        batches: Batches of each source.
        steps: Steps in a batch.
        buckets: Bucket spans in a step.
        every_s: Seconds between a rank's batches; 0 sends each batch when the previous batch is acknowledged.
        clients: Sending processes.
        runs: The runs, which take the ranks in turn.
    """

    ranks: int
    batches: int
    steps: int
    buckets: int
    every_s: float
    clients: int
    runs: tuple[str, ...] = ("benchmark",)

    def run_of(self, rank: int) -> str:
        """The run of a rank."""
        return self.runs[rank % len(self.runs)]

    @property
    def spans(self) -> int:
        """Spans in all batches."""
        return self.ranks * self.batches * self.steps * self.buckets


def flood(clients: int, batches: int) -> Load:
    """A load in which every client is a rank that sends without a pause."""
    return Load(clients, batches, FLOOD_STEPS, FLOOD_BUCKETS, 0.0, clients)


def job(ranks: int, seconds: float, clients: int) -> Load:
    """The load of a training with that many ranks: two steps a second, 40 buckets, a flush every two seconds."""
    steps = int(JOB_STEPS_A_SECOND * JOB_FLUSH_S)
    return Load(ranks, max(1, round(seconds / JOB_FLUSH_S)), steps, JOB_BUCKETS, JOB_FLUSH_S, clients)


def batch(load: Load, rank: int, seq: int) -> wire.Batch:
    """A batch as a training sends it: each bucket's compute and communication vary, to the microsecond."""
    random = np.random.default_rng([rank, seq])
    step = np.arange(seq * load.steps, (seq + 1) * load.steps)
    shape = (load.steps, load.buckets)
    compute = random.gamma(20.0, 150.0, shape).astype(np.int64) * 1000
    comm = random.gamma(4.0, 500.0, shape).astype(np.int64) * 1000
    start = step * 500_000_000 + random.integers(0, 1000, load.steps) * 1000
    ready = start[:, None] + 30_000_000 + compute.cumsum(axis=1)
    launched = ready + random.integers(5, 60, shape) * 1000
    return wire.Batch(
        version=wire.VERSION,
        run=load.run_of(rank),
        attempt=_ATTEMPT,
        source=f"{rank:016x}",
        seq=seq,
        rank=rank,
        world_size=load.ranks,
        emitted=ready.size * (seq + 1),
        dropped=0,
        anchor=wire.Anchor(wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns()),
        steps=_steps(step, start, ready[:, -1] - start, random),
        spans=_spans(step, ready, launched, launched + comm),
        pulse=wire.Pulse(at_ns=time.monotonic_ns(), phase="backward", step=int(step[-1]), module=0, bucket=1),
    )


def later(batch: wire.Batch, seq: int) -> wire.Batch:
    """The same batch under another number, with the steps after those of `seq` such batches: a step is sent once."""
    assert batch.steps is not None
    assert batch.spans is not None
    moved = seq * len(batch.steps)
    steps = batch.steps.by_name() | {"step": batch.steps.step + moved, "collective": batch.steps.collective + moved}
    spans = batch.spans.by_name() | {"step": batch.spans.step + moved}
    return msgspec.structs.replace(batch, seq=seq, steps=wire.Steps(**steps), spans=wire.Spans(**spans))


def _steps(step: wire.Ints, start: wire.Ints, backward: wire.Ints, random: np.random.Generator) -> wire.Steps:
    phases = {f"{phase}_ns": random.integers(1000, 20_000, len(step)) * 1000 for phase in wire.PHASES}
    phases["backward_ns"] = backward
    own = {f"own_{phase}_ns": phases[f"{phase}_ns"] for phase in wire.OWN_PHASES}
    columns = {
        "step": step,
        "collective": step,
        "start_ns": start,
        "end_ns": start + sum(phases.values()),
        "own_ns": np.sum(list(own.values()), axis=0),
        "comm_ns": phases["exposed_comm_ns"],
        "micro_steps": np.ones(len(step), np.int64),
        "samples": np.full(len(step), 32),
        "flags": np.full(len(step), wire.SYNCHRONISED),
    }
    return wire.Steps.of_older(columns | phases | own)


def _spans(step: wire.Ints, ready: wire.Ints, launched: wire.Ints, done: wire.Ints) -> wire.Spans:
    """Spans of a model with a single module; times have shape [steps, buckets]."""
    steps, buckets = ready.shape
    zeros = np.zeros(ready.size, np.int64)
    return wire.Spans(
        step=np.repeat(step, buckets),
        module=zeros,
        revision=zeros,
        bucket=np.tile(np.arange(buckets), steps),
        ready_ns=ready.reshape(-1),
        launched_ns=launched.reshape(-1),
        started_ns=zeros + wire.UNKNOWN,
        done_ns=done.reshape(-1),
        waited_ns=zeros + wire.UNKNOWN,
    )
