"""Renders a workspace's runs. A run without a commit since the last scrape is not read or rendered again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ddpobs_server.metrics.fleet_metrics import render_fleet
from ddpobs_server.metrics.metric import Families, Render
from ddpobs_server.metrics.run_metrics import RunText, headers, render_present, render_runs
from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.run_state import LAST_SCRAPES_NS, state_of_run
from ddpobs_server.settings import Settings
from ddpobs_server.store import Run, RunVersion, Store, UnavailableError

SCRAPE_BYTES = 64_000_000
"""Maximum bytes of a response; further runs are left out and counted."""
_CACHED_BYTES = 192_000_000
"""Maximum bytes of rendered runs of all workspaces that are kept."""


@dataclass(frozen=True)
class _Rendered:
    version: RunVersion
    text: RunText
    size_bytes: int


class Scrape(NamedTuple):
    """A response without its end, and the number of runs that did not fit."""

    text: bytes
    left_out: int


class RunRenderer:
    """Renders the active runs; a finished, quiet or imported run has no series.

    Args:
        settings: `quiet_after_s`.
        store: Source of the rollups.
        reports: Source of the findings.
    """

    def __init__(self, settings: Settings, store: Store, reports: Reports) -> None:
        self._settings, self._store, self._reports = settings, store, reports
        self._faults = reports.faults
        self._cache: OrderedDict[str, _Rendered] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def render(self, workspace: str, render: Render) -> Scrape:
        """Render a workspace's runs.

        Args:
            workspace: Workspace of the runs.
            render: Writes a registry in the requested format.
        """
        now_ns = time.time_ns()
        quiet_ns = int(self._settings.quiet_after_s * 1e9)
        with self._reports.undisturbed():
            # The wall clock may be set back, so a run may have been seen in the future.
            runs, fresh = self._read((now_ns - quiet_ns, now_ns + quiet_ns), workspace)
        current = [run for run in runs if not run.is_over or abs(now_ns - run.last_seen_ns) < LAST_SCRAPES_NS]
        active = [run for run in current if not run.imported]
        families = self._keep(active, fresh)
        fitting = _fitting(active, families)
        diagnostics = self._reports.recent_diagnostics(fitting)
        texts: list[Families] = []
        for run, diagnosis in zip(fitting, diagnostics, strict=True):
            with self._faults.contained("findings", run.run):
                present = render_present(run, state_of_run(run, self._settings, now_ns), diagnosis)
                texts.append(families[run.run] | present)
        fleet = render_fleet(self._reports.fleet_figures.latest(workspace), render)
        return Scrape(_join(render, texts) + fleet, len(active) - len(fitting))

    def _read(self, times: tuple[int, int], workspace: str) -> tuple[list[Run], dict[str, RunText]]:
        """Read the runs with their last batch between two times, and render those that have changed.

        All are read together, without those that failed lately. If that fails, they are read apart.
        """
        with self._lock:
            known = {key: rendered.version for key, rendered in self._cache.items()}
            blocks = {key: rendered.text.blocks for key, rendered in self._cache.items()}

        def read(
            only: Sequence[str] | None = None, without: Sequence[str] = ()
        ) -> tuple[list[Run], dict[str, RunText]]:
            totals = self._store.aggregates(*times, workspace, known, only=only, without=without)
            return totals.runs, render_runs(totals, blocks)

        failing = self._faults.recent("metrics")
        try:
            return read(without=failing)
        except UnavailableError:
            raise
        except Exception:
            runs = [run.run for run in self._store.active_runs(*times, workspace) if run.run not in failing]
        parts = self._faults.apart("metrics", runs, lambda group: read(only=group))
        return [run for part, _ in parts for run in part], dict(chain(*(fresh.items() for _, fresh in parts)))

    def _keep(self, active: Sequence[Run], fresh: Mapping[str, RunText]) -> dict[str, Families]:
        """Cache fresh texts, and return the texts of all active runs that are cached."""
        by_run = {}
        with self._lock:
            for run in active:
                if run.run in fresh:
                    self._put(run, fresh[run.run])
                    by_run[run.run] = fresh[run.run].families
                elif (rendered := self._cache.get(run.run)) is not None:
                    self._cache.move_to_end(run.run)
                    by_run[run.run] = rendered.text.families
            while self._bytes > _CACHED_BYTES:
                self._bytes -= self._cache.popitem(last=False)[1].size_bytes
        return by_run

    def _put(self, run: Run, text: RunText) -> None:
        if (previous := self._cache.pop(run.run, None)) is not None:
            self._bytes -= previous.size_bytes
        rendered = _Rendered(run.version, text, _size(text.families) + _size_of_blocks(text))
        self._cache[run.run] = rendered
        self._bytes += rendered.size_bytes


def _size(families: Families) -> int:
    return sum(map(len, families.values())) + 1000  # Each entry occupies memory itself.


def _size_of_blocks(text: RunText) -> int:
    return 2 * sum(map(len, text.blocks.values()))  # The values of a block take about as much as its text.


def _fitting(active: Sequence[Run], families: Mapping[str, Families]) -> list[Run]:
    """The runs whose texts fit into a response, in order."""
    fitting, remaining = [], SCRAPE_BYTES
    for run in active:
        if run.run in families:
            remaining -= _size(families[run.run])
            if remaining < 0:
                break
            fitting.append(run)
    return fitting


def _join(render: Render, texts: Sequence[Families]) -> bytes:
    """All families, empty ones too, so that their names are known from the first scrape on."""
    blocks: list[bytes] = []
    for name, header in headers(render).items():
        blocks.append(header)
        blocks += [families[name] for families in texts if name in families]
    return b"".join(blocks)
