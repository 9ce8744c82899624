"""The order to check the hosts, which the ranks get in their environment; with the standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpobs.recording.place.place_file import LAUNCH, PLACES, hosts_file

VARIABLE = "DDPOBS_CHECK_HOSTS"
"""Variable with the order, in a rank and in the supervisor."""
SLOW_HOST = 75
"""Exit status if a host is slow: `EX_TEMPFAIL` of sysexits.h, which asks the caller to try again."""
MEASURES = ("matrix products", "memory copies", "disk writes", "exchange", "all-reduce")
"""Each has one window of time in a repetition."""
MATRIX, MEMORY, DISK, EXCHANGE, ALL_REDUCE = range(len(MEASURES))
MIN_REPETITIONS, _MAX_REPETITIONS = 5, 20
_MIN_WINDOW_S = 0.04


@dataclass(frozen=True)
class Order:
    """What to check.

    Attributes:
        seconds: Duration of all measures together.
        limit: Ratio from which on a rank is slower.
        folder: Folder for the disk writes.
    """

    seconds: float
    limit: float
    folder: str

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Order:
        """Return the order in an environment that has one."""
        seconds, limit, folder = environ[VARIABLE].split(" ", 2)
        return cls(float(seconds), float(limit), folder)

    def text(self) -> str:
        """Return the variable's value."""
        return f"{self.seconds} {self.limit} {self.folder}"

    @property
    def repetitions(self) -> int:
        """Repetitions of each measure that fit into the time."""
        return min(_MAX_REPETITIONS, int(self.seconds / (len(MEASURES) * _MIN_WINDOW_S)))

    @property
    def window_s(self) -> float:
        """Duration of one measure in one repetition."""
        return self.seconds / (len(MEASURES) * self.repetitions)


def note(environ: Mapping[str, str], *, is_slow: bool) -> bool:
    """Note for the supervisor on this host that ranks were checked; returns whether there is one to read it."""
    folder, launch = environ.get(PLACES), environ.get(LAUNCH)
    if not folder or not launch:
        return False
    file = hosts_file(Path(folder), launch)
    with suppress(OSError):
        if is_slow or not file.exists():  # What another rank noted of a slow host stays.
            file.write_text(str(SLOW_HOST if is_slow else 0))
        return True
    return False


def noted(folder: Path, launch: str) -> int | None:
    """Return `SLOW_HOST` or 0 as a rank noted it; None if no rank on this host was checked."""
    with suppress(OSError, ValueError):
        return int(hosts_file(folder, launch).read_text())
    return None
