"""The hangs of `hanging.py`, with their verdicts, and trainings that only look as if they hung."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.launch import HANGING, Ranks, ranks_of
from benchmarks.links import INTERFACE, MANAGEMENT, address, links

_PULSES_S = 5
"""Time in which each rank publishes a pulse; a rank that stops earlier is not known to the others."""


@dataclass(frozen=True)
class Case:
    """A hang and its verdict.

    Attributes:
        name: Argument of `hanging.py`.
        kind: Kind of the hang.
        sentence: Part of the finding's title; a star stands for any text.
        environ: Environment of the ranks.
        ranks: Ranks that the others wait for; None for all.
        cuts: Links of rank 1 that the fault takes down.
    """

    name: str
    kind: str
    sentence: str
    environ: dict[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] | None = (1,)
    cuts: tuple[str, ...] = ()

    def pattern(self, world_size: int) -> re.Pattern[str]:
        """The sentence for a number of ranks: 2 or 4."""
        two = world_size == 2
        text = self.sentence.format(
            others="rank 0 waits" if two else "ranks 0, 2 and 3 wait",
            all="ranks 0 and 1" if two else "ranks 0, 1, 2 and 3",
        )
        return re.compile(".*".join(map(re.escape, text.split("*"))))

    def culprits(self, world_size: int) -> list[int]:
        """Ranks that the verdict names."""
        return list(range(world_size) if self.ranks is None else self.ranks)

    @contextmanager
    def training(self, folder: Path, world_size: int, environ: dict[str, str]) -> Iterator[tuple[Ranks, float]]:
        """Train until the fault; yields the ranks and the time of the fault (`time.time`).

        Raises:
            LinkError: The case needs links of its own, which cannot be made here.
        """
        with ExitStack() as stack:
            environ = environ | self.environ
            network = stack.enter_context(links(world_size, "1gbit")) if self.cuts else None
            if network:
                environ |= {"GLOO_SOCKET_IFNAME": INTERFACE}
            ranks = stack.enter_context(
                ranks_of(
                    HANGING,
                    self.name,
                    ranks=world_size,
                    folder=folder,
                    environ=environ,
                    namespaces=network.namespaces if network else None,
                    master=address(0, MANAGEMENT) if network else "127.0.0.1",
                )
            )
            began = ranks.wait_for_fault()
            if self.cuts or self.name == "stop":
                time.sleep(_PULSES_S)
                began = time.time()
            if network:
                network.cut(1, *self.cuts)
            elif self.name == "stop":
                os.kill(ranks.processes[1].pid, signal.SIGSTOP)
            yield ranks, began


CASES = {
    "loader": Case(
        "loader",
        "absent",
        "rank 1 has been in the data loader for * s (*hanging.py:* __getitem__); {others} in bucket 0.0",
    ),
    "loader-worker": Case(
        "loader",
        "absent",
        "rank 1 has been in the data loader for * s (*hanging.py:*); {others} in bucket 0.0 of step",
        {"WORKERS": "1"},
    ),
    "fewer-batches": Case(
        "fewer-batches",
        "absent",
        "rank 1 has been in its own code for * s (*hanging.py:* main); {others} in bucket 0.0 of step 40",
    ),
    "skip-batch": Case(
        "skip-batch",
        "absent",
        "rank 1 has been in its own code for * s (*hanging.py:* main); {others} in bucket 0.0 of step 59",
        {"STEPS": "60"},
    ),
    "evaluate-alone": Case(
        "evaluate-alone",
        "mismatch",
        "different collectives: *rank 1 in the broadcast of buffers of step 40 (*evaluate); rank 1 ran",
    ),
    "extra-all-reduce": Case(
        "extra-all-reduce", "mismatch", "different collectives: *rank 1 in all_reduce after step 40 (*at_fault)"
    ),
    "lock": Case(
        "lock",
        "absent",
        "rank 1 has been in its own code for * s (*hanging.py:* wait_for_a_lock); {others} in bucket 0.0 of step 40",
    ),
    "stop": Case("stop", "stopped", "the process of rank 1 is stopped (last in * of step *); {others} in bucket"),
    "two-threads": Case(
        "two-threads",
        "mismatch",
        "each rank waits for the others in barrier*; {all} also in all_reduce of the default group in thread writer",
        ranks=None,
    ),
    "cut-link": Case(
        "cut-link",
        "link",
        "no progress for * s; cause: each rank waits for the others in bucket",
        ranks=None,
        cuts=(INTERFACE,),
    ),
    "cut-host": Case(
        "cut-host",
        "stopped",
        "rank 1 sent nothing for * s (last in * of step *); {others} in bucket",
        cuts=(INTERFACE, MANAGEMENT),
    ),
    "all-in-data": Case(
        "all-in-data",
        "input",
        "no rank gets a batch; {all} have been in the data loader for * s (*__getitem__)",
        ranks=None,
    ),
}
"""`cut-host` also cuts the rank off from the store, so that the other ranks see only its silence."""
HEALTHY = ["first-step", "checkpoint", "evaluation", "slow"]
"""Arguments of `hanging.py` for trainings that take long and end well."""
