"""Order of work on many runs: workspaces take turns, so that none waits for all runs of another."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, zip_longest

from ddpobs_server.store.schema import DEFAULT_WORKSPACE


def workspace_of(run: str) -> str:
    """Workspace of a run, by its key."""
    return run.rpartition("/")[0] or DEFAULT_WORKSPACE


def by_workspace(runs: Iterable[str]) -> dict[str, list[str]]:
    """Runs by workspace, in the order given."""
    result: dict[str, list[str]] = {}
    for run in runs:
        result.setdefault(workspace_of(run), []).append(run)
    return result


def in_turns(runs: Iterable[str]) -> list[str]:
    """The first run of each workspace, then the second of each, and so on."""
    rounds = zip_longest(*by_workspace(runs).values())
    return [run for run in chain.from_iterable(rounds) if run is not None]
