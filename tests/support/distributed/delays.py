"""A slow rank's delay in recorded steps, on a machine that may be busy.

A delay that was slept is in the slow rank's steps, whatever the load. The other rank's steps may have another delay, of
the machine: the time in which that rank was ready to run and had no processor. The recorded steps hold it, too.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class Steps(TypedDict):
    """Durations of one rank's recorded steps, by step."""

    phases: list[dict[str, int]]
    own: list[dict[str, int]]
    no_processor: list[int]


def durations(capture: Any) -> Steps:
    """Return a training's durations, by step: phases, own phases, and time without a processor."""
    return {
        "phases": capture.phases(),
        "own": capture.own(),
        "no_processor": [max(0, waited) for waited in capture.steps("run_delay_ns")],
    }


def phase_ns(steps: Steps, table: Literal["phases", "own"], *phases: str) -> list[int]:
    """Sum these phases of `phases` or `own`, by step after the first."""
    return [sum(step[phase] for phase in phases) for step in steps[table][1:]]


def excess_ns(slow: Steps, fast: Steps, *phases: str, since: int = 1) -> int:
    """Return by how much the slow rank's own phases exceed the other's, in all steps since that one."""
    own_ns = [sum(step[phase] for step in rank["own"][since:] for phase in phases) for rank in (slow, fast)]
    return own_ns[0] - own_ns[1] + sum(fast["no_processor"][since:])


def waited_ns(fast: Steps, since: int = 1) -> int:
    """Return how long a rank waited for the other or for a processor, in all steps since that one."""
    return sum(step["exposed_comm"] for step in fast["phases"][since:]) + sum(fast["no_processor"][since:])
