"""One rank as the judge of a hang sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddpobs.shared.silence import PULSE_SILENCE_NS
from ddpobs.wire.pulse import Pulse

_LONG_NS = 600_000_000_000
"""A checkpoint or a compilation counts as progress for at most this long."""
_LOOK_NS = 4_000_000_000
"""A rank that stands still looks up its host's processes at each pulse, and sends what it saw with the next one."""
_WAITS = ("bucket", "collective")
_BUSY = ("checkpoint", "compile")


@dataclass(frozen=True)
class JudgedRank:
    """One rank as seen by the judge.

    Attributes:
        rank: Its number.
        pulse: Its latest pulse, or None before the first one.
        silent_ns: Time since that pulse arrived, on the judge's clock.
        ended: How its process ended: `finished`, `interrupted`, `failed`, or empty while it runs.
        process: State of its process as a rank of the same host sees it: `stopped`, `gone`, or empty where not known.
        host: Its host, empty where not known.
        is_past: Whether this was its state in a hang that has ended.
    """

    rank: int
    pulse: Pulse | None
    silent_ns: int = 0
    ended: str = ""
    process: str = ""
    host: str = ""
    is_past: bool = False

    @property
    def idle_ns(self) -> int:
        """Time without progress, until now."""
        return self.silent_ns + (self.pulse.idle_ns if self.pulse else 0)

    @property
    def is_silent(self) -> bool:
        """Whether the process sends no pulses any more."""
        return self.process != "" or self.silent_ns > PULSE_SILENCE_NS

    @property
    def waits(self) -> bool:
        """Whether the training thread waits in a collective."""
        return self.pulse is not None and not self.is_silent and not self.ended and self.pulse.activity in _WAITS

    @property
    def activity_is_own(self) -> bool:
        """Whether the rank runs its own code, neither a loader's nor a wait."""
        return self.pulse is not None and not self.is_silent and self.pulse.activity == "code"

    @property
    def progresses(self) -> bool:
        """Whether the rank may still bring the run forward by itself, or has just done so by its orderly end."""
        if self.ended:
            patience_ns = self.pulse.patience_ns if self.pulse else 0
            return self.ended == "finished" and self.silent_ns < patience_ns
        if self.is_silent:
            return False
        if self.pulse is None:
            return True
        if self.pulse.activity in _BUSY:
            return self.idle_ns < _LONG_NS
        return self.idle_ns < self.pulse.patience_ns


def awaits_look(running: Iterable[JudgedRank]) -> bool:
    """Whether a rank has only just become silent, and another one of its host may yet send why."""
    running = list(running)
    hosts = {state.host for state in running if state.host and not state.is_silent}
    return any(
        state.is_silent and not state.process and state.host in hosts and state.silent_ns < PULSE_SILENCE_NS + _LOOK_NS
        for state in running
    )
