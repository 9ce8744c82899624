"""Processes of a benchmark's ranks: started together, and ended together."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def run_ranks(commands: Sequence[Sequence[str]], environs: Sequence[Mapping[str, str]]) -> None:
    """Run one command per rank in the checkout until all have ended; whatever ends this, no rank stays.

    Args:
        commands: By rank.
        environs: Variables in addition to those of this process, by rank.

    Raises:
        SystemExit: A rank ended with another status than 0.
    """
    ranks = [
        subprocess.Popen(command, env=os.environ | dict(environ), cwd=_ROOT)
        for command, environ in zip(commands, environs, strict=True)
    ]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
