"""How the ranks of an attempt ended: which one was the first, with its error and place, and which are consequences."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from ddpobs import wire
from ddpobs.wire.endings import delay_ns, end_of_event
from ddpobs.wire.facts import EndFacts, facts_of

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
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^a-z])")
_SOURCE = re.compile(r"\[/\S+:\d+\] ")
"""Line of C++ in messages of torch's."""
_NUMBER = re.compile(r"\d+")
_ERROR_CHARACTERS = 300
_STAGES = {
    "start": "before its model was built",
    "init_process_group": "in init_process_group",
    "command": "before any rank joined",
}
_SHELL_STATUS = 128
"""A shell returns this and the signal's number for a command that a signal ended."""


@dataclass(frozen=True)
class End:
    """How one rank ended; `kind` is an end of `ddpobs.wire.endings`."""

    rank: int
    kind: str
    step: int
    facts: EndFacts
    delay_ns: int = 0

    @property
    def error(self) -> str:
        """Class and first sentence of its error, such as `ValueError: loss is nan`."""
        lines = self.facts.message.strip().splitlines()
        sentence = _SENTENCE_END.split(_SOURCE.sub("", lines[0]), 1)[0] if lines else ""
        return f"{self.facts.error or 'an error'}{': ' * bool(sentence)}{sentence}"[:_ERROR_CHARACTERS].rstrip(". ")

    @property
    def line(self) -> str:
        """Innermost of the user's lines in its traceback, such as `train.py:9`; empty if it is not known."""
        return self.facts.place.rpartition(" → ")[2].partition(" ")[0]

    @property
    def caller(self) -> str:
        """The user's line that called it: `called at train.py:31`; empty without one."""
        outer, arrow, _ = self.facts.place.rpartition(" → ")
        return f"called at {outer}" if arrow else ""

    @property
    def place(self) -> str:
        """Where it ended: `in your loop after backward of step 5 (train.py:9)`, `in forward of step 6`."""
        line = f" ({self.line})" if self.line else ""
        if self.facts.stage == "start" and self.kind != "failed":
            return "before its training began"
        if self.facts.stage:
            return f"{_STAGES.get(self.facts.stage, _STAGES['start'])}{line}"
        return f"{place_in_step(self.facts.phase, self.step, self.facts.synchronised)}{line}"

    @property
    def wall_ns(self) -> int:
        """Time of the end on the rank's wall clock."""
        return self.facts.wall_ns

    @property
    def reason(self) -> str:
        """Its error with the place, or how it ended without an error."""
        if self.is_of_command:
            return f"the {self.of_command}"
        if self.kind == "failed":
            return f"{self.error}, {self.place}"
        if self.kind == "terminated":
            return f"ended by {self.facts.signal or 'a signal'}"
        if self.kind == "interrupted":
            return f"interrupted {self.place}"
        if self.facts.oom_kills:
            return "killed: its host ran out of memory"
        return self.exit_text or "ended without an error: killed, or crashed outside of Python"

    @property
    def exit_text(self) -> str:
        """How the process of a rank that died ended, if its parent recorded it; else empty."""
        if self.facts.signal:
            return f"killed by {self.facts.signal}"
        status = self.facts.exit_status
        return "" if status is None else f"ended with exit status {status} and without an error"

    @property
    def is_of_command(self) -> bool:
        """Whether it is the end of the command under `ddpobs run`, and of no rank."""
        return self.facts.stage == "command"

    @property
    def of_command(self) -> str:
        """How the command ended: `command was killed by SIGSEGV before any rank joined`."""
        facts = self.facts
        how = f"was killed by {facts.signal}" if facts.signal else f"ended with exit status {facts.exit_status}"
        return f"command {how} {self.place}"

    @property
    def of_shell(self) -> str:
        """What an exit status means if a shell returned it: `a shell returns 137 after SIGKILL`; empty if nothing."""
        with suppress(ValueError):
            status = self.facts.exit_status or 0
            return f"a shell returns {status} after {signal.Signals(status - _SHELL_STATUS).name}"
        return ""

    @property
    def last_line(self) -> str:
        """Last line that the command wrote to stderr; empty if it is not known."""
        lines = self.facts.output.strip().splitlines()
        return lines[-1].strip()[:_ERROR_CHARACTERS] if lines else ""

    @property
    def is_consequence(self) -> bool:
        """Whether the end only shows that another rank, or the launcher, ended first."""
        if self.kind == "terminated":
            return True
        error, message = self.facts.error, self.facts.message
        if self.kind != "failed" or not _OF_COMMUNICATION.fullmatch(error) or message.startswith(_OWN):
            return False
        return _CONSEQUENCE.search(f"{error} {message}") is not None

    def is_same_error(self, other: End) -> bool:
        """Whether both ranks failed by one error at one place; numbers in its text may differ."""
        return self.kind == other.kind == "failed" and self._kind_of_error == other._kind_of_error

    @property
    def _kind_of_error(self) -> tuple[str, str]:
        return _NUMBER.sub("0", self.error), self.line

    @property
    def was_killed(self) -> bool:
        """Whether a person or a launcher killed the process: the kernel, for want of memory, did not."""
        return self.kind == "died" and self.facts.signal == "SIGKILL" and not self.facts.oom_kills

    @property
    def may_have_given_up(self) -> bool:
        """Whether the rank may have ended because another did not come: NCCL aborts a process after a timeout."""
        return self.is_consequence or (self.kind == "died" and self.facts.signal == "SIGABRT")


def place_in_step(phase: str, step: int, synchronised: int) -> str:
    """Where in its training a rank is: `in your loop after backward of step 5`, `in forward of step 6`.

    Args:
        phase: One of `wire.PHASES`; empty if it is not known.
        step: The rank's step.
        synchronised: Number of synchronised backward passes that it has begun.
    """
    if phase == "other" and step == synchronised == 0:
        return "before its first backward"
    if phase == "other":  # After its backward, the rank may be on its way to the next step.
        return f"in your loop {'after backward of' if synchronised > step else 'in'} step {step}"
    phase = phase.replace("exposed_comm", "exposed communication")
    return f"in {phase} of step {step}" if phase else f"in step {step}"


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
