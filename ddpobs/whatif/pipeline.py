"""Replay the computation of a pipeline's step, and what slow ranks of it cost."""

from __future__ import annotations

from collections import deque

import numpy as np

from ddpobs.whatif.link import Floats
from ddpobs.whatif.repair import Slowdown

_Operation = tuple[bool, int]
"""Whether it is a backward, and its micro-batch."""


def replay_pipeline_ns(
    forward_ns: Floats, backward_ns: Floats, micro_batches: int, *, forwards_first: bool = False
) -> Floats:
    """Return the time of one step of a schedule, without the time in which messages move.

    A stage computes one operation at a time. A forward needs that of the stage before it, a backward that of the stage
    behind it.

    Source: the order of 1F1B is that of Megatron-LM (arXiv 2104.04473, section 2.2), that of GPipe is arXiv 1811.06965.

    Args:
        forward_ns: Forward of one micro-batch on each stage, shape [..., stages].
        backward_ns: Backward of one, same shape.
        micro_batches: Micro-batches of a step.
        forwards_first: GPipe: all forwards, then all backwards. Otherwise 1F1B.

    Returns:
        Shape [...].
    """
    stages = forward_ns.shape[-1]
    waiting = [deque(_order(stages, stage, micro_batches, forwards_first=forwards_first)) for stage in range(stages)]
    now_ns = [np.zeros(forward_ns.shape[:-1]) for _ in range(stages)]
    sent_ns: dict[tuple[int, _Operation], Floats] = {}
    """When an operation ended whose result its neighbour has not used, by the neighbour's stage."""
    while any(waiting):
        for stage, operations in enumerate(waiting):
            while operations:
                operation = is_backward, _ = operations[0]
                has_source = stage < stages - 1 if is_backward else stage > 0
                if has_source and (stage, operation) not in sent_ns:
                    break
                begun_ns = np.maximum(now_ns[stage], sent_ns.pop((stage, operation))) if has_source else now_ns[stage]
                now_ns[stage] = begun_ns + (backward_ns if is_backward else forward_ns)[..., stage]
                sent_ns[stage + (-1 if is_backward else 1), operation] = now_ns[stage]
                operations.popleft()
    return np.asarray(np.max(now_ns, axis=0))


def _order(stages: int, stage: int, micro_batches: int, *, forwards_first: bool) -> list[_Operation]:
    """Return a stage's operations in order."""
    ahead = micro_batches if forwards_first else min(micro_batches, stages - 1 - stage)
    order = [(False, number) for number in range(ahead)]
    for number in range(micro_batches):
        order += [(False, ahead + number)] if ahead + number < micro_batches else []
        order.append((True, number))
    return order


def pipeline_slowdown(
    forward_ns: Floats, backward_ns: Floats, micro_batches: int, *, forwards_first: bool = False
) -> Slowdown:
    """Return S = T / T_ideal of a pipeline's computation. In T_ideal every rank computes for the ranks' mean time.

    T and T_ideal are replays. The step waits for its slowest pipeline.

    Source: equation 1 of arXiv 2505.05713, which replays messages too. Its steps are those without delays of launches.

    Args:
        forward_ns: Forward of each rank in a step, shape [steps, replicas, stages].
        backward_ns: Backward, same shape.
        micro_batches: Micro-batches of a step.
        forwards_first: As for `replay_pipeline_ns`.

    Returns:
        `by_rank` has shape [replicas, stages], `by_phase` the forward's and the backward's.
    """
    stages = forward_ns.shape[-1]
    usual = np.full(forward_ns.shape, forward_ns.mean()), np.full(forward_ns.shape, backward_ns.mean())

    def replayed_ns(forward: Floats, backward: Floats) -> Floats:
        return replay_pipeline_ns(
            forward / micro_batches, backward / micro_batches, micro_batches, forwards_first=forwards_first
        )

    ideal_ns = float(replayed_ns(*usual).max(axis=1).sum())
    one_slow = [
        np.where(np.eye(stages, dtype=bool), own[..., None], mean[..., None])
        for own, mean in zip((forward_ns, backward_ns), usual, strict=True)
    ]
    with_rank_ns = np.maximum(replayed_ns(*one_slow), ideal_ns / len(forward_ns))
    with_phase_ns = [replayed_ns(forward_ns, usual[1]), replayed_ns(usual[0], backward_ns)]
    return Slowdown(
        total=float(replayed_ns(forward_ns, backward_ns).max(axis=1).sum()) / ideal_ns,
        by_rank=with_rank_ns.sum(axis=0) / ideal_ns,
        by_phase=np.array([phase_ns.max(axis=1).sum() for phase_ns in with_phase_ns]) / ideal_ns,
    )
