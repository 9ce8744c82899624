"""The parts of an account, their groups and titles, and sums of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

START_UP = ("import", "model", "prepare", "start_waiting", "first_batch", "compile")
WAITING = "waiting_for_ranks"
"""The part of exposed communication in which a rank waits for later ranks; in the rest data moves."""
STEPS = ("data", "forward", "backward", WAITING, "exposed_comm", "optimizer", "other")
COMPILING = ("recompile", "waiting_for_compile")
OUTSIDE = ("evaluation", "checkpoint", "waiting", "waiting_in_steps", "unexplained")
RESTARTS = ("restart", "repeated_steps")
REST = ("resting", "open_step", "stuck", "unfinished_step", "finish", "idle", "unrecorded", "not_known")
PARTS = (*STEPS, *COMPILING, *OUTSIDE, *START_UP, *RESTARTS, *REST)
"""All parts of the wall time."""
_GROUPS = {
    **dict.fromkeys((*STEPS, *COMPILING), "steps"),
    "resting": "steps",
    "open_step": "steps",
    **dict.fromkeys(OUTSIDE, "outside"),
    **dict.fromkeys(START_UP, "start_up"),
    **dict.fromkeys(RESTARTS, "restarts"),
    **dict.fromkeys(("stuck", "unfinished_step", "finish", "idle"), "idle"),
    **dict.fromkeys(("unrecorded", "not_known"), "not_known"),
}
GROUP_TITLES = {
    "start_up": "start-up",
    "steps": "steps",
    "outside": "outside of steps",
    "restarts": "restarts",
    "idle": "idle or stuck",
    "not_known": "not known",
}
TITLES = {
    "data": "steps: waiting for data",
    "forward": "steps: forward",
    "backward": "steps: backward",
    WAITING: "steps: waiting for ranks",
    "exposed_comm": "steps: moving data",
    "optimizer": "steps: optimizer",
    "other": "steps: other",
    "recompile": "steps: torch.compile in mid-run",
    "waiting_for_compile": "steps: waiting for a rank that compiles in mid-run",
    "resting": "steps: without telemetry, to measure its cost",
    "open_step": "the step under way",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "waiting": "waiting at collectives between steps",
    "waiting_in_steps": "waiting in steps for a rank that is outside of its own",
    "unexplained": "between steps, not explained",
    "import": "start-up: interpreter and imports",
    "model": "start-up: process group, data sets and model",
    "prepare": "start-up: from the model to the first step",
    "start_waiting": "start-up: waiting for other ranks",
    "first_batch": "start-up: first batch",
    "compile": "start-up: torch.compile",
    "restart": "between attempts",
    "repeated_steps": "steps that a restart repeated",
    "stuck": "stuck",
    "unfinished_step": "a step that did not end",
    "finish": "after the last step",
    "idle": "other ranks' start or end",
    "unrecorded": "dropped steps",
    "not_known": "not known",
}
_PRODUCTIVE = {*STEPS, "resting", "open_step"}
_LOST_IN_STEPS = {WAITING, "exposed_comm"}
Parts = dict[str, int]
"""Nanoseconds by part; parts without time are left out."""


def group_of(part: str) -> str:
    """Return the group of a part: `steps`, `outside`, `start_up`, `restarts`, `idle` or `not_known`."""
    return _GROUPS[part]


def is_productive(part: str) -> bool:
    """Whether the part counts as goodput."""
    return part in _PRODUCTIVE


def is_lost(part: str) -> bool:
    """Whether the part counts as lost: all time outside of steps, and waiting and moving in steps."""
    return part not in _PRODUCTIVE or part in _LOST_IN_STEPS


def added(all_parts: Iterable[Mapping[str, int]]) -> Parts:
    """Return sums by part, in the order of `PARTS`."""
    sums: Parts = dict.fromkeys(PARTS, 0)
    for parts in all_parts:
        for part, ns in parts.items():
            sums[part] += ns
    return {part: ns for part, ns in sums.items() if ns}
