"""Finding `crash`: the rank that failed first, its exception and place, and the ranks that failed because of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from ddpobs import wire
from ddpobs.shared.hang_verdict import Hang
from ddpobs.shared.words import format_bucket, format_ranks
from ddpobs.wire.endings import delay_ns, end_of_event
from ddpobs.wire.facts import EndFacts, facts_of
from ddpobs_server.analysis.causes.waited_for import bucket_parameters, hang_at, waited_for
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding

CODES = ("crash",)
_CONSEQUENCE = re.compile(
    r"connection (closed|reset)|broken pipe|connect(ion)? refused|timed? ?out|gloo|nccl|socket|recvvector|"
    r"DistNetworkError|DistBackendError|DistStoreError|no result on any rank|peer",
    re.IGNORECASE,
)
"""Texts of errors that a rank raises because another one has gone."""
_OF_COMMUNICATION = re.compile(r"RuntimeError|Dist\w*Error|Horovod\w+|MpiError|\w*ReducerError")
"""Classes of such errors. A refused connection to a storage has another class, and is the rank's own failure."""
_OWN = "DataLoader"
"""First word of a RuntimeError of torch's loader, which may have timed out too."""
_DIED = (
    "Look at the kernel's log on that host (dmesg) for out of memory or a segmentation fault, and at the launcher's "
    "log."
)
_TERMINATED = "Look at the launcher's and the scheduler's log, or at the user who sent the signal."
_CONNECTION = "Look at ranks without telemetry, and at the launcher's log: one of them may have ended first."
_HOSTS = " If every rank was there, look at the connection between the hosts."
_NAMED = 2
"""Maximum number of ranks that a verdict names."""


@dataclass(frozen=True)
class CrashFacts(Facts):
    """The first failure, and the ranks that followed.

    Attributes:
        kind: `failed`, `died` or `terminated`.
        error: Class of its exception; None without one.
        signal: Signal that ended its process; None without one.
        exit_status: Exit status of its process; None if it is not known.
        traceback: Last lines of its traceback; None without one.
        host: Its host; None if it is not known.
        module: Module of the bucket launched last; -1 if it is not known.
        victims: Error or end of each rank that failed because of it.
    """

    kind: str
    error: str | None
    signal: str | None
    exit_status: int | None
    traceback: str | None
    host: str | None
    module: int
    victims: dict[int, str]


FACTS = (CrashFacts,)


@dataclass(frozen=True)
class End:
    """How one rank ended; `kind` is an end of `ddpobs.wire.endings`."""

    rank: int
    kind: str
    step: int
    facts: EndFacts
    delay_ns: int = 0

    @property
    def wall_ns(self) -> int:
        """Time of the end on the rank's wall clock."""
        return self.facts.wall_ns

    @property
    def reason(self) -> str:
        """The first line of its error, or how it ended without an error."""
        if self.kind == "failed":
            return _error(self)
        if self.kind == "terminated":
            return f"terminated by {self.facts.signal or 'a signal'}"
        if self.kind == "interrupted":
            return f"interrupted {_place(self)}"
        if self.facts.oom_kills:
            return "killed: its host ran out of memory"
        if self.exit_text:
            return self.exit_text
        return "ended without an error: killed, or crashed outside of Python"

    @property
    def exit_text(self) -> str:
        """How the process of a rank that died ended, if its parent recorded it; else empty."""
        if self.facts.signal:
            return f"killed by {self.facts.signal}"
        status = self.facts.exit_status
        return "" if status is None else f"ended with exit status {status} and without an error"

    @property
    def is_consequence(self) -> bool:
        """Whether the end only shows that another rank, or the launcher, ended first."""
        if self.kind == "terminated":
            return True
        error, message = self.facts.error, self.facts.message
        if self.kind != "failed" or not _OF_COMMUNICATION.fullmatch(error) or message.startswith(_OWN):
            return False
        return _CONSEQUENCE.search(f"{error} {message}") is not None

    @property
    def was_killed(self) -> bool:
        """Whether a person or a launcher killed the process: the kernel, for want of memory, did not."""
        return self.kind == "died" and self.facts.signal == "SIGKILL" and not self.facts.oom_kills

    @property
    def may_have_given_up(self) -> bool:
        """Whether the rank may have ended because another did not come: NCCL aborts a process after a timeout."""
        return self.is_consequence or (self.kind == "died" and self.facts.signal == "SIGABRT")


def crash(evidence: Evidence) -> Judgement:
    """Report the first failure; without one, the connections that broke."""
    ends = ends_of(evidence.events)
    if not _has_crashed(ends):
        return []
    first = ends[0]
    if (hang := hang_before(evidence)) is not None:
        return [_gave_up(evidence, ends, hang)]
    if first.was_killed and hang_at(evidence, first.wall_ns) is not None:
        return []  # Somebody killed a run that hung: the hang is the finding.
    victims = sorted({end.rank for end in ends if end.rank != first.rank})
    module, bucket = first.facts.module, first.facts.bucket
    return [
        Finding(
            code="crash",
            severity="critical",
            verdict=f"Rank {first.rank} {_end(first)} {_place(first)}",
            measure=f"{format_ranks(victims)} failed because of it" if victims else "",
            cause=_cause(first),
            where=evidence.where([first.rank], _bucket(module, bucket)),
            remedy=_remedy(first, is_one_host=len(set(evidence.hosts.values())) == 1),
            steps=(first.step, first.step),
            ranks=[first.rank],
            buckets=[bucket] if bucket != wire.UNKNOWN else [],
            phase=first.facts.phase if first.facts.phase in wire.PHASES else None,
            evidence=_facts(evidence, first, victims, ends),
        )
    ]


def hang_before(evidence: Evidence) -> Hang | None:
    """Return the hang that the crash ended: the first rank gave up waiting for others; None if it did not."""
    ends = ends_of(evidence.events)
    if not _has_crashed(ends) or not ends[0].may_have_given_up:
        return None
    return waited_for(evidence, ends[0].rank, ends[0].wall_ns, {end.rank for end in ends if end.may_have_given_up})


def _has_crashed(ends: list[End]) -> bool:
    return any(end.kind != "terminated" for end in ends) and ends[0].kind != "interrupted"


def _gave_up(evidence: Evidence, ends: list[End], hang: Hang) -> Finding:
    """Name the ranks that did not come to a collective, until the others ended by its timeout or by its end."""
    first = ends[0]
    awaited = [rank for rank in hang.ranks if rank != first.rank] or [
        rank for rank in range(evidence.world_size) if rank not in hang.ranks
    ]
    victims = sorted({end.rank for end in ends} - set(awaited))
    in_bucket = hang.bucket != wire.UNKNOWN
    return Finding(
        code="crash",
        severity="critical",
        verdict=f"Rank {first.rank} ended in step {first.step}, waiting for {_few(awaited)}",
        measure=first.reason,
        cause=hang.cause,
        where=evidence.where(awaited, hang.where),
        remedy=hang.remedy,
        steps=(first.step, first.step),
        ranks=awaited,
        buckets=[hang.bucket] if in_bucket else [],
        parameters=list(bucket_parameters(evidence, hang.module, hang.bucket)) if in_bucket else [],
        evidence=_facts(evidence, first, victims, ends),
    )


def _few(ranks: list[int]) -> str:
    return format_ranks(ranks) if len(ranks) <= _NAMED else f"{len(ranks)} ranks"


def interrupt_of(events: Iterable[tuple[int, wire.Event]]) -> End | None:
    """The interrupt that ended the run; None if none did, or a rank failed or died before."""
    first = next(iter(ends_of(events)), None)
    return first if first is not None and first.kind == "interrupted" else None


def ends_of(events: Iterable[tuple[int, wire.Event]]) -> list[End]:
    """The ranks that did not end in order, the first cause first: an interrupt if no rank failed or died before it.

    Args:
        events: (rank, event); events of other kinds are left out.
    """
    events = list(events)
    kinds = {id(event): kind for _, event in events if (kind := end_of_event(event)) not in (None, "finished")}
    events = [(rank, event) for rank, event in events if id(event) in kinds]
    exits = {rank: known for rank, event in events if event.kind == "died" and (known := _exit(event))}
    ends = []
    for rank, event in events:
        # Several processes may report a death, and only some of them after the parent has seen its end.
        seen = exits.get(rank, {}) if event.kind == "died" else {}
        facts = msgspec.structs.replace(facts_of(event, EndFacts), **seen)
        ends.append(End(rank, kinds[id(event)], event.step, facts, delay_ns(event)))
    ends.sort(key=lambda end: (end.is_consequence, end.wall_ns, end.rank))
    failures = [end.wall_ns + end.delay_ns for end in ends if end.kind in ("failed", "died")]
    causes = [end for end in ends if end.kind == "interrupted" and end.wall_ns <= min(failures, default=end.wall_ns)]
    if causes or not failures:
        return causes + [end for end in ends if end not in causes]
    return [end for end in ends if end.kind != "interrupted"] + [end for end in ends if end.kind == "interrupted"]


def _exit(event: wire.Event) -> dict[str, str | int]:
    facts = facts_of(event, EndFacts)
    known = {"signal": facts.signal or None, "exit_status": facts.exit_status}
    return {name: value for name, value in known.items() if value is not None}


def _bucket(module: int, bucket: int) -> str:
    if bucket == wire.UNKNOWN:
        return ""
    return format_bucket(module, bucket) if module != wire.UNKNOWN else f"bucket {bucket} of a module that is not known"


def _end(first: End) -> str:
    if first.kind == "terminated":
        return "was terminated"
    if first.kind == "died":
        is_killed = first.facts.signal or first.facts.oom_kills
        return "was killed" if is_killed else "ended without an error"
    return "lost its connection" if first.is_consequence else "failed"


def _cause(first: End) -> str:
    if first.kind == "terminated":
        return first.facts.signal or "a signal"
    if first.kind != "died":
        unknown = "not known: no rank reported an error of its own, this one " if first.is_consequence else ""
        return f"{unknown}{_error(first)}"
    if first.facts.oom_kills:
        return "its host ran out of memory"
    if first.facts.signal:
        return first.facts.signal
    status = first.facts.exit_status
    return f"exit status {status}" if status is not None else "not known: it was killed, or crashed outside of Python"


def _place(end: End) -> str:
    phase = end.facts.phase.replace("exposed_comm", "exposed communication")
    return f"in {phase} of step {end.step}" if phase else f"in step {end.step}"


def _error(end: End) -> str:
    error, message = end.facts.error or "an error", end.facts.message
    message = message.splitlines()[0] if message else ""
    return f"{error}: {message}"[:300] if message else error


def _remedy(first: End, *, is_one_host: bool) -> str:
    if first.kind == "died":
        return _DIED
    if first.kind == "terminated":
        return _TERMINATED
    if first.is_consequence:
        return _CONNECTION if is_one_host else _CONNECTION + _HOSTS
    return "Correct the error that the traceback shows. The other ranks' errors are consequences of it."


def _facts(evidence: Evidence, first: End, victims: list[int], ends: list[End]) -> CrashFacts:
    return CrashFacts(
        kind=first.kind,
        error=first.facts.error or None,
        signal=first.facts.signal or None,
        exit_status=first.facts.exit_status,
        traceback=first.facts.traceback or None,
        host=evidence.hosts.get(first.rank),
        module=first.facts.module,
        victims={end.rank: _error(end) if end.kind == "failed" else end.kind for end in ends if end.rank in victims},
    )
