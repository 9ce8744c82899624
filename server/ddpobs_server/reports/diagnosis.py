"""A run's diagnosis: load the latest steps, join them over ranks, judge."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs.wire.endings import IMPORTED
from ddpobs.wire.facts import SettingFacts, read_facts
from ddpobs_server.analysis.account.run_account import RunAccount, account_of
from ddpobs_server.analysis.evidence import ColumnsTooLargeError, Evidence
from ddpobs_server.analysis.finding import Finding, Interval, NotJudged, by_severity
from ddpobs_server.analysis.findings.registry import FINDINGS
from ddpobs_server.analysis.slow_ranks.lateness_bins import LatenessBins, bins_of
from ddpobs_server.analysis.steps.joined_steps import join
from ddpobs_server.analysis.steps.step_levels import step_levels
from ddpobs_server.analysis.verdict import verdict_of
from ddpobs_server.reports.account_json import (
    attempts_of_training,
    attempts_within_limits,
    has_few_steps,
    launches_of,
    moving_ns_a_step,
    own_cost_json,
    processes_of,
)
from ddpobs_server.reports.host_totals import host_totals
from ddpobs_server.reports.judged_steps import JudgedSteps, read_judged_steps
from ddpobs_server.reports.liveness import all_silent, ends, silent_ns, world_size_of
from ddpobs_server.reports.read_bins import AttemptBins, read_lateness
from ddpobs_server.reports.run_state import is_lost
from ddpobs_server.reports.whatif import Modelled, modelled
from ddpobs_server.settings import Settings
from ddpobs_server.store import HostTotal, Source, Store, TooManyRowsError

_EDGE_ROWS = 40_000
"""Maximum number of rows of steps that are read around a change point."""
_ALL_SILENT = "no rank sends any more: the processes were killed, stand still all at once, or are cut off"
_OF_SILENCE = ("crash", "hang", "lost")
"""Codes of findings that state why no rank sends any more, or since when."""
_NO_BATCH = "no batch has arrived from {}"
_NO_STEP = "no step has ended on {}"
_OLD_STEPS = "no recent step has arrived from {}: its last ones are far behind those of the other ranks"


class Diagnosis:
    """Diagnoses runs.

    Args:
        store: Source of the columns.
        now_ns: The collector's wall clock.
        settings: Limits of a run's state; default: the default settings.
    """

    def __init__(
        self, store: Store, now_ns: Callable[[], int] = time.time_ns, settings: Settings | None = None
    ) -> None:
        self._store, self._now_ns, self._settings = store, now_ns, settings or Settings.model_validate({})

    def diagnose(
        self,
        run: str,
        attempt: str,
        first: int | None = None,
        last: int | None = None,
        keep: Callable[[list[HostTotal]], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Return the findings, the most severe first, and the questions that could not be judged.

        Args:
            run: The run.
            attempt: Its attempt.
            first: First step that is judged; None for the run's first.
            last: Last step that is judged; None for the run's last.
            keep: Called with the totals by host if all steps are judged.
        """
        sources = self._store.sources(run, attempt)
        evidence, judged, missing = self._gather(run, attempt, sources, (first, last))
        steps = judged.steps
        if first is None and last is None:  # The account is of the whole run, and not of some steps.
            evidence = replace(evidence, account=self._account(run, attempt, sources, judged))
            keep(host_totals(evidence, attempt))
        results = [result for judge in FINDINGS for result in judge(evidence)]
        findings = [result for result in results if isinstance(result, Finding)]
        missing += [result for result in results if isinstance(result, NotJudged)]
        if all_silent(sources, self._now_ns()) and not any(finding.code in _OF_SILENCE for finding in findings):
            missing.append(NotJudged("hang", _ALL_SILENT))
        is_imported = any(source.ended == IMPORTED for source in sources)
        begin = judged.first if is_imported else 0  # A file may begin in mid-training.
        steps_seen = int(steps.step.max()) + 1 - begin if len(steps.step) else 0
        is_over = all(source.ended for source in sources) or all_silent(sources, self._now_ns())
        verdict = verdict_of(evidence, findings, steps_seen, is_over=is_over)
        return {
            "run": run,
            "attempt": attempt,
            "steps_seen": steps_seen,
            "verdict": verdict.kind,
            "summary": verdict.text,
            "findings": [evidence.clock.timed_finding(finding).as_json() for finding in by_severity(findings)],
            "missing": [str(not_judged) for not_judged in missing],
            "step_levels": _step_levels(evidence, judged),
            "goodput": evidence.account.goodput if evidence.account else None,
            "time_shares": evidence.account.group_shares() if evidence.account else {},
            "telemetry": own_cost_json(evidence.processes),
        }

    def modelled(self, run: str, attempt: str) -> Modelled:
        """Return the what-if model of the latest steps, or why there is none."""
        evidence, _, missing = self._gather(run, attempt, self._store.sources(run, attempt), (None, None))
        return Modelled(missing[0].reason, None, ()) if missing else modelled(evidence)

    def _gather(
        self, run: str, attempt: str, sources: list[Source], bounds: tuple[int | None, int | None]
    ) -> tuple[Evidence, JudgedSteps, list[NotJudged]]:
        """Return the evidence on the steps within bounds; none, and a `NotJudged`, if they have too many rows."""
        settings = next((source.hello.settings for source in sources if source.hello), {})
        reason = _separate_groups_reason(sources, settings)
        judged, missing = self._load_steps(run, attempt, sources, bounds, keep_silent=bool(reason))
        evidence = self._evidence(run, attempt, sources, judged, settings, separate_groups_reason=reason)
        return evidence, judged, missing

    def _load_steps(
        self,
        run: str,
        attempt: str,
        sources: list[Source],
        bounds: tuple[int | None, int | None],
        *,
        keep_silent: bool,
    ) -> tuple[JudgedSteps, list[NotJudged]]:
        """Return the steps to judge; none, and a `NotJudged`, if they have too many rows."""
        try:
            judged = read_judged_steps(self._store, run, attempt, sources, bounds)
        except TooManyRowsError as error:
            return JudgedSteps.none(), [NotJudged("steps", str(error))]
        return judged if keep_silent else judged.without_silent_ranks(sources), []

    def _evidence(
        self,
        run: str,
        attempt: str,
        sources: list[Source],
        judged: JudgedSteps,
        settings: dict[str, wire.Scalar],
        *,
        separate_groups_reason: str,
    ) -> Evidence:
        store, joined, now_ns = self._store, join(judged.rank, judged.steps), self._now_ns()
        unused, unused_left_out = store.latest_unused(run, attempt)
        missing_batches = store.missing_batches(run, attempt)
        return Evidence(
            rank=judged.rank,
            steps=judged.steps,
            joined=joined,
            unused=unused,
            unused_left_out=unused_left_out,
            settings=settings,
            emitted={source.rank: source.emitted for source in sources},
            dropped={source.rank: source.dropped for source in sources},
            missing_batches={source.rank: missing_batches.get(source.source, (0, 0))[0] for source in sources},
            sent_batches=sum(count for _, count in missing_batches.values()),
            events=_credible(store.first_events(run, attempt), sources),
            earlier_ends=self._earlier_ends(run, attempt, sources),
            ahead_ns={source.rank: source.anchor.wall_ns - source.last_seen_ns for source in sources},
            hosts={source.rank: source.hello.host for source in sources if source.hello},
            absences=_absences(sources, joined.ranks),
            separate_groups_reason=separate_groups_reason,
            has_gaps=bool(settings.get("find_unused_parameters")) and store.has_gaps(run, attempt),
            columns=_StoreColumns(store, run, attempt, len(sources)),
            world_size=world_size_of(sources),
            pulses={source.rank: source.pulse for source in sources if source.pulse},
            stuck_pulses={source.rank: source.stuck_pulse for source in sources if source.stuck_pulse},
            silent_ns=silent_ns(sources, now_ns),
            last_batch_ns={source.rank: source.last_seen_ns for source in sources},
            is_lost=is_lost(sources, self._settings, now_ns),
            ended=ends(sources),
            fingerprints=store.differing_fingerprints(run, attempt),
            processes=processes_of(sources),
            hellos={source.rank: source.hello for source in sources if source.hello},
            now_ns=now_ns,
            whole=join(*judged.whole) if judged.whole is not None else None,
            earlier=judged.earlier,
            clock=judged.clock(sources),
        )

    def _earlier_ends(self, run: str, attempt: str, sources: list[Source]) -> list[list[tuple[int, wire.Event]]]:
        """Return the ends in each earlier attempt, if a rank of this one failed."""
        if not any(source.ended in ("failed", "died") for source in sources):
            return []
        known = [summary.attempt for summary in self._store.attempt_summaries(run)]
        ends: dict[str, list[tuple[int, wire.Event]]] = {each: [] for each in known[: known.index(attempt)]}
        for each, rank, event in self._store.end_events(run) if ends else ():
            if each in ends:
                ends[each].append((rank, event))
        return list(ends.values())

    def _account(self, run: str, attempt: str, sources: list[Source], judged: JudgedSteps) -> RunAccount:
        """Return the account of the attempt's training, if it is the latest of it, else of the attempt alone."""
        attempts = attempts_of_training(self._store.attempt_summaries(run), attempt)
        if attempts and attempts[-1].attempt != attempt:  # None are left of a run that is deleted meanwhile.
            attempts = [known for known in attempts if known.attempt == attempt]
        covered = attempts_within_limits(attempts, attempt)
        moving_ns = moving_ns_a_step(*judged.all_rows) if has_few_steps(sources) else {}
        return account_of(launches_of(self._store, run, covered, {attempt: sources}, {attempt: moving_ns}))


class _StoreColumns:
    """The `ColumnReader` of one attempt."""

    def __init__(self, store: Store, run: str, attempt: str, ranks: int) -> None:
        self._store, self._run, self._attempt, self._ranks = store, run, attempt, ranks
        self._layouts: list[wire.Layout] | None = None

    def layouts(self) -> list[wire.Layout]:
        if self._layouts is None:  # Several findings need them.
            self._layouts = self._store.layouts(self._run, self._attempt)[0]
        return self._layouts

    def spans(self, ranks: list[int], first: int, last: int) -> tuple[wire.Ints, wire.Spans]:
        try:
            return self._store.spans(self._run, self._attempt, ranks, first, last)
        except TooManyRowsError as error:
            raise ColumnsTooLargeError(str(error)) from error

    def lateness(self, rank: int, first: int, last: int) -> LatenessBins | None:
        bins = AttemptBins(self._store, self._run, self._attempt)
        if not 0 < bins.column_rows(first, last) <= _EDGE_ROWS:
            return read_lateness(bins, (first, last), self._ranks, rank)
        try:
            joined = join(*self._store.steps(self._run, self._attempt, None, first, last))
        except TooManyRowsError as error:
            raise ColumnsTooLargeError(str(error)) from error
        return bins_of(joined, 1) if len(joined.ranks) > 1 else None

    def comms(self, rank: int, first: int, last: int) -> wire.Comms:
        try:
            return self._store.comms(self._run, self._attempt, rank, first, last)[1]
        except TooManyRowsError as error:
            raise ColumnsTooLargeError(str(error)) from error

    def readiness(self, ranks: list[int], first: int, last: int) -> list[tuple[int, wire.Readiness]]:
        return self._store.readiness(self._run, self._attempt, ranks, first, last)


def _step_levels(evidence: Evidence, judged: JudgedSteps) -> list[dict[str, Any]]:
    """Return the levels of the step time over the judged steps, with their times."""
    joined = evidence.joined if evidence.whole is None else evidence.whole
    if not len(joined):
        return []
    first, last, step_ns = joined.step, joined.step, joined.step_ns
    if (bins := judged.earlier_times) is not None:
        bins = bins.select(np.flatnonzero(bins.column("last") < joined.step[0]))
        first, last = (np.concatenate([bins.column(n), joined.step]) for n in ("first", "last"))
        step_ns = np.concatenate([bins.column("wall_median_ns"), joined.step_ns])
    return [
        evidence.clock.timed(Interval(level.first, level.last)).as_json() | {"step_ns": round(level.step_ns)}
        for level in step_levels(first, last, step_ns)
    ]


def _credible(events: list[tuple[int, wire.Event]], sources: list[Source]) -> list[tuple[int, wire.Event]]:
    """Leave out reports of a death of ranks that sent their own end: a neighbour may look before that end arrives."""
    ended = {source.rank for source in sources if source.ended not in ("", "died")}
    return [(rank, event) for rank, event in events if event.kind != "died" or rank not in ended]


def _absences(sources: list[Source], compared: wire.Ints) -> dict[str, list[int]]:
    """Return the ranks of the world that are not compared, by reason."""
    has_stepped = {source.rank: source.last_step_seen_ns > 0 for source in sources}
    stepped = {rank for rank, has_step in has_stepped.items() if has_step}
    return {
        _NO_BATCH: sorted(set(range(world_size_of(sources))) - has_stepped.keys()),
        _NO_STEP: sorted(has_stepped.keys() - stepped),
        _OLD_STEPS: sorted(stepped - set(compared.tolist())) if len(compared) else [],
    }


def _separate_groups_reason(sources: list[Source], settings: dict[str, wire.Scalar]) -> str:
    """Return the reason if ranks do not wait for each other, or may not: a process group is a part of the world."""
    facts, world_size = read_facts(settings, SettingFacts), world_size_of(sources)
    ranks = facts.group_ranks
    if facts.not_compared or ranks is None or ranks >= world_size:
        return facts.not_compared
    return f"gradients are reduced over {ranks} of {world_size} ranks: ranks of other process groups are not compared"
