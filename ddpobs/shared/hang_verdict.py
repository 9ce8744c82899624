"""The verdict on a hang, from the ranks' latest pulses: which rank the others wait for, and in which collective.

The collector and a surviving rank share this file, so that both report the same words. A run hangs when no rank
makes progress. A rank makes progress while it records events, runs new lines of Python, compiles, or writes a
checkpoint; each pulse carries the time since the rank's last progress and the patience that its own steps justify.

| kind | ranks without a wait | remark |
|---|---|---|
| `absent` | some, while others wait in a collective | in data, in its own code, in a lock: the place is in the pulse |
| `stopped`, `dead` | some send no pulses, or their process is stopped or gone | |
| `input` | all, each in the data phase | |
| `mismatch` | none, and the ranks wait in different collectives | one rank skipped a batch or a branch |
| `link` | none, and all wait in the same collective | the connection between them is cut |
| `code` | all, outside of data | |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ddpobs.shared.judged_rank import JudgedRank, awaits_look
from ddpobs.shared.words import bucket_phrase, format_bucket, format_ranks
from ddpobs.wire.fields import UNKNOWN
from ddpobs.wire.pulse import Pulse
from ddpobs.wire.schema import Bucket

BUFFERS = "the broadcast of buffers"
"""Name of the collective in which a DDP module's forward waits."""
_IN_BACKWARD = ("backward", "exposed_comm")
_NAMED = 2
"""Maximum number of ranks that the headline of twelve words names."""
_ENDED = {"failed": "failed", "interrupted": "been interrupted"}

Kind = Literal["absent", "stopped", "dead", "input", "mismatch", "link", "code"]
BucketLookup = Callable[[int, int], Bucket | None]
"""Returns a bucket by module and index; None where the layout is not known."""


@dataclass(frozen=True)
class Hang:
    """A hang.

    Attributes:
        kind: As the table of this module.
        ranks: The ranks that the others wait for; all ranks where each waits for the others.
        waiting: Ranks that wait in a collective, without `ranks` unless each waits for the others.
        since_ns: Time since the run's last progress.
        step: Step in which the waiting ranks are, `UNKNOWN` where none waits.
        module: Module of the bucket in which they wait, `UNKNOWN` where it is no bucket.
        bucket: That bucket.
        phase: Phase of the first of `ranks`, None where it is not known.
        verdict: What happens, in which step, and for which ranks the others wait.
        measure: Time without progress.
        cause: What each rank does.
        where: The bucket in which ranks wait, with its first parameters; empty where it is no bucket.
        remedy: The next thing to do.
    """

    kind: Kind
    ranks: list[int]
    waiting: list[int]
    since_ns: int
    step: int
    module: int
    bucket: int
    phase: str | None
    verdict: str
    measure: str
    cause: str
    where: str
    remedy: str

    @property
    def line(self) -> str:
        """All parts in one line, for a log."""
        where = f" ({self.where})" if self.where else ""
        return f"{self.verdict}: {self.measure}; cause: {self.cause}{where}. {self.remedy}"


def judge(states: Sequence[JudgedRank], buckets: BucketLookup = lambda _module, _bucket: None) -> Hang | None:
    """Return the hang that the ranks' states show, or None where the run goes on or has ended.

    Args:
        states: One per rank of the attempt, in any order.
        buckets: Finds a bucket.
    """
    states = sorted(states, key=lambda state: state.rank)
    running = [state for state in states if not state.ended]
    if not running or any(state.progresses for state in states) or awaits_look(running):
        return None
    if all(state.is_silent for state in running):
        return None  # The whole run is lost, not hung: no process is left that could wait.
    if all(state.activity_is_own for state in running) and all(_synchronised(state) == 0 for state in running):
        return None  # No rank has trained: the model may only serve.
    return verdict_on(states, buckets)


def verdict_on(states: Sequence[JudgedRank], buckets: BucketLookup = lambda _module, _bucket: None) -> Hang:
    """Return for which ranks the others wait, or waited when the first of them gave up.

    Args:
        states: One per rank of the attempt, in rising order; at least one has not ended.
        buckets: Finds a bucket.
    """
    running = [state for state in states if not state.ended]
    waiting = [state for state in running if state.waits]
    others = [state for state in states if not state.waits]
    since_ns = min(state.idle_ns for state in running if not state.is_silent)
    first = waiting[0].pulse if waiting else None
    culprit = others[0].pulse if others else None
    kind, ranks, cause, remedy = _verdict(states, waiting, others, buckets)
    in_bucket = first is not None and first.activity == "bucket"
    step = first.step if first else UNKNOWN
    latest_step = max((state.pulse.step for state in running if state.pulse), default=UNKNOWN)
    shown_step = step if step != UNKNOWN else latest_step
    return Hang(
        kind=kind,
        ranks=ranks,
        waiting=[state.rank for state in waiting],
        since_ns=since_ns,
        step=step,
        module=first.module if first and in_bucket else UNKNOWN,
        bucket=first.bucket if first and in_bucket else UNKNOWN,
        phase=culprit.phase if culprit and kind in {"absent", "input", "code"} else None,
        verdict=_headline(shown_step, ranks if waiting and others else []),
        measure=f"no progress for {_seconds(since_ns)}",
        cause=cause,
        where=_bucket(first, buckets) if first and in_bucket else "",
        remedy=remedy,
    )


def _headline(step: int, missing: list[int]) -> str:
    hangs = "The run hangs" + (f" in step {step}" if step >= 0 else "")
    if not missing:
        return hangs
    return f"{hangs}, waiting for {format_ranks(missing) if len(missing) <= _NAMED else f'{len(missing)} ranks'}"


def _verdict(
    states: Sequence[JudgedRank], waiting: Sequence[JudgedRank], others: Sequence[JudgedRank], buckets: BucketLookup
) -> tuple[Kind, list[int], str, str]:
    """The kind, the ranks that the others wait for, the cause, and the remedy."""
    silent = [state for state in others if state.is_silent and not state.ended]
    if silent:
        return _silent(silent, waiting, buckets)
    if not waiting:
        return _without_waits(states)
    if others:
        cause = f"{_absence(others)}; {_wait(waiting, buckets)}"
        doing = "ended" if others[0].ended else _activity(others[0])
        return "absent", _ranks(others), cause, _ABSENT_REMEDY.get(doing, _ABSENT_REMEDY["code"])
    groups = Counter(_collective(state) for state in waiting)
    if len(groups) == 1 or _is_one_sequence(waiting):
        cause = (
            f"each rank {_verb(waiting, 'waits', 'waited')} for the others {_in(min(waiting, key=_reached), buckets)}"
        )
        if threads := _other_threads(waiting):
            return "mismatch", _ranks(states), f"{cause}; {threads}", _THREADS_REMEDY
        shares_host = states[0].host and len({state.host for state in states}) == 1
        return "link", _ranks(states), cause, _ONE_HOST_REMEDY if shares_host else LINK_REMEDY
    return _mismatch(waiting, groups, buckets)


def _other_threads(waiting: Sequence[JudgedRank]) -> str:
    """What other threads of the ranks wait in, beside the training thread; empty where there are none."""
    groups: dict[str, list[JudgedRank]] = {}
    for state in waiting:
        if state.pulse and state.pulse.other_waits:
            groups.setdefault(", ".join(state.pulse.other_waits), []).append(state)
    return "; ".join(f"{format_ranks(_ranks(members))} also in {names}" for names, members in groups.items())


def _silent(
    silent: Sequence[JudgedRank], waiting: Sequence[JudgedRank], buckets: BucketLookup
) -> tuple[Kind, list[int], str, str]:
    gone = [state for state in silent if state.process == "gone"]
    stopped = [state for state in silent if state.process == "stopped"]
    kind: Kind = "dead" if gone else "stopped"
    if gone:
        cause, remedy = f"the process of {format_ranks(_ranks(gone))} {_verb(gone, 'is', 'was')} gone", _DEAD_REMEDY
    elif stopped:
        is_stopped = f"{_verb(stopped, 'is', 'was')} stopped"
        cause, remedy = f"the process of {format_ranks(_ranks(stopped))} {is_stopped}", _STOPPED_REMEDY
    else:
        silent_ns = min(state.silent_ns for state in silent)
        cause, remedy = f"{format_ranks(_ranks(silent))} sent nothing for {_seconds(silent_ns)}", _SILENT_REMEDY
    last = silent[0].pulse
    after = f" (last in {_phase(last.phase)} of step {last.step})" if last else ""
    tail = f"; {_wait(waiting, buckets)}" if waiting else ""
    return kind, _ranks(silent), f"{cause}{after}{tail}", remedy


def _without_waits(states: Sequence[JudgedRank]) -> tuple[Kind, list[int], str, str]:
    running = [state for state in states if not state.ended]
    if all(_activity(state) == "data" for state in running):
        gets = _verb(running, "gets", "got")
        return "input", _ranks(running), f"no rank {gets} a batch; {_absence(running)}", _ABSENT_REMEDY["data"]
    return "code", _ranks(running), _absence(running), _ABSENT_REMEDY["code"]


def _mismatch(
    waiting: Sequence[JudgedRank], groups: Counter[tuple[object, ...]], buckets: BucketLookup
) -> tuple[Kind, list[int], str, str]:
    """Name the smaller group; of two equal ones the group with fewer synchronised backward passes."""
    fewest = min(groups.values())
    candidates = [state for state in waiting if groups[_collective(state)] == fewest]
    behind = min(_synchronised(state) for state in candidates)
    odd = [state for state in candidates if _synchronised(state) == behind]
    odd = [state for state in odd if _collective(state) == _collective(odd[-1])]
    ranks = _ranks(odd)
    members: dict[tuple[object, ...], list[JudgedRank]] = {}
    for state in waiting:
        members.setdefault(_collective(state), []).append(state)
    places = ", ".join(
        f"{format_ranks(_ranks(group))} {_in(group[0], buckets)}{_place(group[0])}" for group in members.values()
    )
    fewer = max(_synchronised(state) for state in waiting) - behind
    passes = "backward pass" if fewer == 1 else "backward passes"
    count = f"; {format_ranks(ranks)} ran {fewer} {passes} fewer than the others" if fewer else ""
    threads = _other_threads(waiting)
    cause = f"the ranks {_verb(waiting, 'wait', 'waited')} in different collectives: {places}{count}" + (
        f"; {threads}" if threads else ""
    )
    return "mismatch", ranks, cause, _THREADS_REMEDY if threads else MISMATCH_REMEDY


def _absence(states: Sequence[JudgedRank]) -> str:
    """Each distinct activity of the ranks that do not wait, with its place."""
    groups: dict[str, list[JudgedRank]] = {}
    for state in states:
        groups.setdefault(_doing(state), []).append(state)
    parts = []
    for doing, members in list(groups.items())[:3]:
        ranks = format_ranks(_ranks(members))
        verb = _verb(members, "have" if len(members) > 1 else "has", "had")
        if members[0].ended:
            parts.append(f"{ranks} {verb} {doing}")
        else:
            idle_ns = min(state.idle_ns for state in members)
            parts.append(f"{ranks} {verb} been {doing} for {_seconds(idle_ns)}{_place(members[0])}")
    return "; ".join(parts)


def _doing(state: JudgedRank) -> str:
    if state.ended in _ENDED:
        return _ENDED[state.ended]
    if state.ended:
        return "ended its training"
    return _DOING.get(_activity(state), _DOING["code"])


def _wait(waiting: Sequence[JudgedRank], buckets: BucketLookup) -> str:
    """The ranks that wait, by the collective of the first of them."""
    verb = _verb(waiting, "wait" if len(waiting) > 1 else "waits", "waited")
    return f"{format_ranks(_ranks(waiting))} {verb} {_in(waiting[0], buckets)}"


def _verb(states: Sequence[JudgedRank], present: str, past: str) -> str:
    return past if states[0].is_past else present


def _in(state: JudgedRank, buckets: BucketLookup) -> str:
    pulse = state.pulse
    assert pulse is not None
    if pulse.activity != "bucket":
        relation = "of" if pulse.waits_in == BUFFERS else "after"
        return f"in {pulse.waits_in or 'a collective'} {relation} step {pulse.step}"
    if pulse.bucket < 0:
        return f"in the backward of step {pulse.step}"
    bucket = buckets(pulse.module, pulse.bucket)
    return f"in {bucket_phrase(pulse.module, pulse.bucket, bucket)} of step {pulse.step}"


def _bucket(pulse: Pulse, buckets: BucketLookup) -> str:
    """The bucket with its first parameters; empty where these are not known."""
    bucket = buckets(pulse.module, pulse.bucket) if pulse.bucket >= 0 else None
    return "" if bucket is None else format_bucket(pulse.module, pulse.bucket, bucket)


def _place(state: JudgedRank) -> str:
    return f" ({state.pulse.place})" if state.pulse and state.pulse.place else ""


def _collective(state: JudgedRank) -> tuple[object, ...]:
    """Identity of the collective in which a rank waits: equal on ranks that wait in the same one."""
    pulse = state.pulse
    assert pulse is not None
    if pulse.activity == "bucket":
        return "bucket", pulse.module, pulse.bucket, pulse.synchronised
    return "collective", pulse.waits_in, pulse.collectives, pulse.synchronised


def _reached(state: JudgedRank) -> tuple[int, bool, int]:
    """Position of a rank that waits in the run's sequence of collectives."""
    pulse = state.pulse
    assert pulse is not None
    return pulse.synchronised, pulse.activity != "bucket", pulse.bucket if pulse.activity == "bucket" else UNKNOWN


def _is_one_sequence(waiting: Sequence[JudgedRank]) -> bool:
    """Whether some ranks wait for the end of a collective that the other ranks have passed.

    No rank passes a collective before all ranks have entered it. So a rank that has left it proves that the slower
    ranks take part in it: only its end does not reach them.
    """
    first = min(waiting, key=_reached)
    return all(_has_passed(state, first) for state in waiting if _collective(state) != _collective(first))


def _has_passed(state: JudgedRank, first: JudgedRank) -> bool:
    """Whether a rank has left the collective in which `first` waits."""
    ahead, behind = state.pulse, first.pulse
    assert ahead is not None
    assert behind is not None
    if behind.activity == "bucket":
        if ahead.activity == "bucket":  # All buckets of a backward are launched before the wait.
            is_next = ahead.synchronised == behind.synchronised + 1 and ahead.collectives == behind.collectives
            return ahead.module == behind.module and (is_next or ahead.synchronised == behind.synchronised)
        return ahead.synchronised == behind.synchronised and ahead.phase not in _IN_BACKWARD
    if behind.waits_in == BUFFERS:
        entered = ahead.buffer_broadcasts == behind.buffer_broadcasts
    else:
        entered = ahead.collectives == behind.collectives
    return entered and ahead.activity == "bucket" and ahead.synchronised == behind.synchronised + 1


def _synchronised(state: JudgedRank) -> int:
    return state.pulse.synchronised if state.pulse else UNKNOWN


def _activity(state: JudgedRank) -> str:
    return state.pulse.activity if state.pulse else ""


def _phase(phase: str) -> str:
    return phase.replace("exposed_comm", "exposed communication")


def _ranks(states: Iterable[JudgedRank]) -> list[int]:
    return [state.rank for state in states]


def _seconds(ns: int) -> str:
    seconds = ns / 1e9
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


_DOING = {
    "data": "in the data loader",
    "checkpoint": "in a checkpoint",
    "compile": "in a compilation",
    "evaluation": "in an evaluation",
    "code": "in its own code",
}
_ABSENT_REMEDY = {
    "ended": "Let every rank run the same number of steps: as many batches each, or `with model.join()`. If the rank "
    "should go on, see why its process ended.",
    "data": "Look at the data loader of that rank: a worker that waits for storage, a sample that never ends, a dead "
    "worker. The stack shows the line.",
    "evaluation": "Run the evaluation on every rank, or evaluate the wrapped module (model.module) on that rank alone.",
    "code": "Look at the line above: a lock, an endless loop, or code that the other ranks do not run. `ddpobs stacks` "
    "shows every rank's stack.",
}
_DEAD_REMEDY = (
    "Look for the reason of its end: the kernel's out-of-memory log (dmesg), the launcher's log, the exit status. Then "
    "restart the job; the other ranks cannot go on."
)
_STOPPED_REMEDY = "Continue the process (kill -CONT), or find out whether a scheduler or a debugger stopped it."
_SILENT_REMEDY = "Look at that rank's host: its process is dead or stopped, or the host is off or cut off."
LINK_REMEDY = (
    "Look at the connections between the hosts: a cut link, a firewall, a dropped route. The ranks agree on the "
    "collective; tensors of different sizes in it are the other cause."
)
_ONE_HOST_REMEDY = (
    "All ranks share a host: no network between hosts is involved. Compare the sizes of the tensors in that "
    "collective, and the collectives of other threads and processes: `ddpobs stacks` shows every rank's stack."
)
_THREADS_REMEDY = (
    "Give each thread that calls collectives a process group of its own (dist.new_group), or call them on one thread: "
    "in one group their order must be the same on every rank."
)
MISMATCH_REMEDY = (
    "Make every rank call the same collectives in the same order: the usual causes are a batch or a branch that one "
    "rank skips, fewer batches on one rank (use join), and a collective inside `if rank == 0`."
)
