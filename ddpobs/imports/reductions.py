"""Traces that have collectives only: each step is what a rank launched between two optimizer steps.

The begin of a backward is not recorded, so all time between two steps' collectives is the phase `other`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpobs.imports.rank_trace import Call, Collective, RankTrace


def trace_of(
    source: str, rank: int, world_size: int, steps: Sequence[Sequence[Collective]], *, backend: str, wall_ns: int = 0
) -> RankTrace:
    """Return the trace of a rank from the reductions of each of its steps."""
    trace = RankTrace(
        source=source, rank=rank, world_size=world_size, host="", backend=backend, device="", wall_ns=wall_ns
    )
    for number, reduced in enumerate(steps):
        began_ns = min(one.launched_ns for one in reduced)
        trace.steps.append((number, began_ns))
        trace.calls.append(Call("forward", began_ns, began_ns))
        trace.calls.append(Call("backward", began_ns, max(one.done_ns for one in reduced)))
        trace.collectives.extend(sorted(reduced, key=lambda one: one.launched_ns))
    return trace
