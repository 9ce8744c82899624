"""Lines on rank 0's stderr, whatever the log level: the run's address at the start, and its verdict at the end.

The telemetry thread prints the start line. The verdict is read by a thread that waits from the start, because Python
3.12 starts no thread while the interpreter ends, and because no timeout ends a DNS look-up.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ddpobs.client.reader import page_address, read
from ddpobs.config import TelemetryConfig
from ddpobs.export.http_sender import Outcome, Response
from ddpobs.export.spool import folder_of
from ddpobs.terminal.verdict_box import box, in_ascii

_OTHERS_S = 3.0
"""Longest wait for the other ranks' last batches, so that the verdict covers them."""
_POLL_S = 0.1
_LIVE = ("running", "stalled", "hung")


class Announcer:
    """The lines of one run. Only rank 0 prints, and only without `config.quiet`.

    Args:
        config: Address, limits and whether to print.
        rank: This process's rank.
        world_size: Number of ranks.
        first_response: Returns the collector's response to the first batch; None until it arrives.
    """

    def __init__(
        self, config: TelemetryConfig, rank: int, world_size: int, first_response: Callable[[], Response | None]
    ) -> None:
        self._config, self._world_size, self._first_response = config, world_size, first_response
        self._prints = rank == 0 and not config.quiet
        self._pid = os.getpid()
        self._run = ""
        self._is_announced = False
        self._began = time.monotonic()
        self._deadline = 0.0
        self._is_wanted, self._is_read = threading.Event(), threading.Event()
        self._lines: list[str] = []

    def start(self) -> None:
        """Start the thread that waits until the verdict is wanted."""
        if self._prints:
            threading.Thread(target=self._read_verdict, name="ddpobs-verdict", daemon=True).start()

    def identify(self, run: str) -> None:
        """Set the run's name."""
        self._run = run

    def look(self) -> bool:
        """Print the start line once the collector has answered or let a request's time pass; never waits.

        Returns:
            Whether no more calls are needed.
        """
        if not self._prints or self._is_announced:
            return True
        if not self._run:
            return False
        response = self._first_response()
        if response is None and time.monotonic() - self._began < self._config.timeout_s:
            return False
        self._announce(response)
        return True

    def end(self, within_s: float, *, delivered: bool) -> None:
        """Print the start line if it was not printed yet, then the verdict; waits at most `within_s` seconds.

        Args:
            within_s: Longest wait for the collector.
            delivered: Whether the collector has every batch; else there is no verdict.
        """
        if not (self._prints and self._run) or os.getpid() != self._pid:
            return
        if not self._is_announced:
            self._announce(self._first_response())
        if not delivered or within_s <= 0:
            return
        self._deadline = time.monotonic() + within_s
        self._is_wanted.set()
        self._is_read.wait(within_s)
        late = f"ddpobs: the findings were not ready in time: {self._address}"
        _print(self._lines or ([late] if time.monotonic() >= self._deadline else []))

    @property
    def _address(self) -> str:
        return page_address(self._config.collector, self._run)

    def _announce(self, response: Response | None) -> None:
        self._is_announced = True
        _print([start_line(self._config, self._run, self._world_size, response)])

    def _read_verdict(self) -> None:
        self._is_wanted.wait()
        with suppress(Exception):  # Whatever another server answered.
            state = self._state_after_others()
            diagnosis = read(self._config, f"/runs/{self._run}/diagnostics", timeout_s=self._left_s()).document
            account = read(self._config, f"/runs/{self._run}/account", timeout_s=self._left_s()).document
            width = shutil.get_terminal_size((100, 24)).columns
            self._lines = box(diagnosis, account, self._address, width, colour=shows_colour(sys.stderr), state=state)
        self._is_read.set()

    def _state_after_others(self) -> str:
        """The run's state, once all ranks have ended or half of the time has passed.

        Without the last batches of the others, their latest pulses may show a wait for this rank.
        """
        until = time.monotonic() + min(_OTHERS_S, self._left_s() / 2)
        while True:
            state = read(self._config, f"/runs/{self._run}", timeout_s=self._left_s()).document["state"]
            if state not in _LIVE or self._world_size == 1 or time.monotonic() >= until:
                return str(state)
            time.sleep(_POLL_S)

    def _left_s(self) -> float:
        return max(0.01, self._deadline - time.monotonic())


def start_line(config: TelemetryConfig, run: str, world_size: int, response: Response | None) -> str:
    """The run's address, or the reason why the collector has no telemetry of it.

    Args:
        config: The settings.
        run: The run's name.
        world_size: Number of ranks.
        response: The collector's response to the first batch; None if there is none yet.
    """
    if response is not None and response.outcome in (Outcome.STORED, Outcome.REPEATED):
        alone = " (one process only: there are no ranks to compare)" if world_size == 1 else ""
        return f"ddpobs: {page_address(config.collector, run)}{alone}"
    collector = page_address(config.collector, run).removesuffix(f"/runs/{run}")
    if response is not None and response.outcome is Outcome.REFUSED:
        return f"ddpobs: no telemetry of run {run}: {collector} refuses it: {response.detail}"
    if response is None:
        reason = "has not answered"
    elif response.outcome is Outcome.FORBIDDEN:
        reason = f"rejects the token (DDPOBS_TOKEN): {response.detail}"
    else:
        reason = f"is not reachable ({response.detail})"
    return f"ddpobs: {collector} {reason}; the batches of run {run} wait in {folder_of(config.spool)}"


def shows_colour(stream: object) -> bool:
    """Whether a stream is a terminal that shows colours; NO_COLOR (no-color.org) switches them off."""
    is_terminal = getattr(stream, "isatty", lambda: False)()
    return bool(is_terminal) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _print(lines: list[str]) -> None:
    """Write lines to stderr in one call; a closed stream is ignored."""
    stream = sys.stderr
    if stream is None or not lines:
        return
    with suppress(OSError, ValueError):
        try:
            "\n".join(lines).encode(stream.encoding or "ascii")
        except UnicodeError:
            lines = in_ascii(lines)
        stream.write("\n".join(lines) + "\n")
        stream.flush()
