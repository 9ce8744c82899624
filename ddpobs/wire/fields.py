"""Kinds of fields and columns, with their ranges, and the constants of the wire."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ddpobs.wire import columns
from ddpobs.wire.columns import Range
from ddpobs.wire.text import NONCE, STRICT_RUN_ID

PHASES = ("data", "forward", "backward", "exposed_comm", "optimizer", "other")
OWN_PHASES = ("data", "forward", "backward", "optimizer", "other")
"""Phases in which a rank does its own work; in exposed communication it waits or moves bytes."""
COMM_KINDS = ("buffers", "unused_map", "user", "send", "receive")
"""Values that `Comms.kind` indexes: communication other than gradient buckets.

Older collectors know the first three, and refuse batches with others.
"""
UNIT_KINDS = (
    *("all_gather", "all_gather_again", "reduce_scatter", "all_reduce"),
    *("all_gather_updated", "reduce", "broadcast", "all_to_all"),
)
"""Values of `Bucket.kind` for the collectives of a fully sharded unit, and further ones of DeepSpeed's.

A unit's parameters are gathered in forward and again in backward. Its gradients are scattered, and reduced over
replicas. DeepSpeed gathers parameters that the optimizer has updated.
"""
OUTSIDE_KINDS = ("evaluation", "checkpoint", "after_checkpoint", "waiting", "resting")
"""Kinds of time outside of steps: `after_checkpoint` is work between a save and the next event of training, `waiting`
collectives between steps, `resting` steps in which telemetry rested."""

SYNCHRONISED, NO_ORIGIN = 1, 2
"""Bits of `Steps.flags`: gradients were reduced; no clean start to measure own time from."""

UNKNOWN = -1
LONGEST_NS = 30 * 86_400 * 10**9
"""Longest duration in a batch, and largest distance of its times from its anchor: 30 days."""
STRAGGLER_SHARE = 0.1
"""Excess over the other ranks' median own time, as a share of the step, above which a rank straggles in that step.

Ranks (`Peers.straggler_<phase>`) and collector (the finding `straggler`) use the same definition. It is a convention of
this project, written down with its false alarms in docs/methods/slow-ranks.md.
"""
_MAX_COUNT = 2**48
MAX_INDEX, MAX_STEP = 2**20 - 1, 2**40 - 1
"""Maximum number of a rank, module or bucket, and of a step: rank and step together fit into 64 bits."""
FIRST_REPLICAS = 2**19
"""Modules of fingerprints from this number on are groups of ranks that hold the same shards; see `replicas_module`."""

Ints = columns.Ints
RunId = Annotated[str, msgspec.Meta(pattern=STRICT_RUN_ID)]
Nonce = Annotated[str, msgspec.Meta(pattern=rf"^{NONCE}\Z")]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
CountOrUnknown = Annotated[int, msgspec.Meta(ge=UNKNOWN, le=2**62)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_INDEX)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
Total = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A sum of nanoseconds."""
Index = Annotated[int, msgspec.Meta(ge=UNKNOWN, le=MAX_INDEX)]
Scalar = str | int | float | bool | None

# Kinds of column. `checks` refuses values outside of the range.
Times = Annotated[Ints, Range(-LONGEST_NS, LONGEST_NS, is_time=True)]
TimesBetween = Annotated[Ints, Range(-(2**63), 2**63 - 1)]
"""Times that `checks` bounds by the columns beside them."""
Durations = Annotated[Ints, Range(0, LONGEST_NS)]
DurationsOrUnknown = Annotated[Ints, Range(UNKNOWN, LONGEST_NS)]
SignedDurations = Annotated[Ints, Range(-LONGEST_NS, LONGEST_NS)]
Counts = Annotated[Ints, Range(0, _MAX_COUNT)]
CountsOrUnknown = Annotated[Ints, Range(UNKNOWN, _MAX_COUNT)]
StepNumbers = Annotated[Ints, Range(0, MAX_STEP)]
StepNumbersOrUnknown = Annotated[Ints, Range(UNKNOWN, MAX_STEP)]
Indexes = Annotated[Ints, Range(0, MAX_INDEX)]
CommKinds = Annotated[Ints, Range(0, len(COMM_KINDS) - 1)]


def replicas_module(module: int, lowest_rank: int, world_size: int) -> int:
    """Number under which ranks with the same shards of a module send fingerprints: other ranks are not compared."""
    return FIRST_REPLICAS + module * world_size + lowest_rank


def module_of_replicas(number: int, world_size: int) -> int:
    """The module of a fingerprint's number, which is the module's own or one of `replicas_module`."""
    return number if number < FIRST_REPLICAS else (number - FIRST_REPLICAS) // max(1, world_size)


class Record(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Skips unknown fields, so that an older collector reads a newer client. Compares by identity."""
