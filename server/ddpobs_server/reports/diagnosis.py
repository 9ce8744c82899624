"""A run's diagnosis: the latest steps of its ranks are read, judged, and the slow bucket is looked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Finding, NotJudged, by_severity, format_ranks
from ddpobs_server.analysis.findings import straggler
from ddpobs_server.analysis.findings.registry import CATALOGUE
from ddpobs_server.analysis.joined_steps import Joined, join, ranks_of, silent_ranks
from ddpobs_server.store import Source, Store, TooManyRowsError

_STEPS, _FEWEST_STEPS, _ROWS = 2048, 512, 500_000
"""A diagnosis looks at the latest steps: so many, or as many as make so many rows, but not fewer than the fewest."""
_MOST_ROWS = 1_000_000
"""Fewer even than these, where they have more rows."""
_SILENT_NS = 15 * 10**9
"""A rank whose latest steps came so much earlier than others' is silent: more than two flushes."""
_PARTINGS = 16
"""Ranks whose step numbers have parted are read apart, in so many reads at most."""
_USER = wire.COMM_KINDS.index("user")
_BUCKET_STEPS, _BUCKET_RANKS = 200, 8
"""The bucket at which a slow backward shows is sought in the latest steps of the slow rank and some others."""


class Diagnosis:
    """Diagnoses runs.

    Args:
        store: Where columns come from.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def of(self, run: str, attempt: str) -> dict[str, Any]:
        """Findings, the most severe first, and what could not be judged."""
        sources = self._store.sources(run, attempt)
        settings = next((s.hello.settings for s in sources if s.hello), {})
        apart = _separate_groups_reason(sources, settings)
        missing = []
        try:
            rank, steps = self.recent_steps(run, attempt, sources)
            rank, steps = (rank, steps) if apart else drop_silent_ranks(rank, steps, sources)
        except TooManyRowsError as error:
            rank, steps = np.zeros(0, np.int64), wire.Steps.from_table(np.zeros((len(wire.Steps.names), 0), np.int64))
            missing.append(NotJudged("steps", str(error)))
        joined = join(rank, steps)
        absent = _absent(sources, joined.ranks)
        gaps = self._store.missing_batches(run, attempt)
        missing += _not_judged(absent, apart)
        evidence = Evidence(
            rank=rank,
            steps=steps,
            joined=joined,
            unused=self._store.latest_unused(run, attempt),
            settings=settings,
            emitted={s.rank: s.emitted for s in sources},
            dropped={s.rank: s.dropped for s in sources},
            missing_batches={s.rank: gaps.get(s.source, (0, 0))[0] for s in sources},
            sent_batches=sum(sent for _, sent in gaps.values()),
            events=self._store.first_events(run, attempt),
            ahead_ns={s.rank: s.anchor.wall_ns - s.last_seen_ns for s in sources},
            absent=sorted(one for ranks in absent.values() for one in ranks),
            apart=apart,
            gaps=bool(settings.get("find_unused_parameters")) and self._store.has_gaps(run, attempt),
        )
        hosts = {s.rank: s.hello.host for s in sources if s.hello}
        slow = NotJudged("straggler", apart) if apart else straggler.straggler_findings(joined, hosts)
        judged = [slow, *(find(evidence) for find in CATALOGUE)]
        findings = [f for found in judged if not isinstance(found, NotJudged) for f in found]
        try:
            findings = self._with_buckets(findings, run, attempt, (rank, steps), joined)
        except TooManyRowsError as error:
            missing.append(NotJudged("buckets", str(error)))
        return {
            "run": run,
            "attempt": attempt,
            "steps_seen": int(steps.step.max()) + 1 if len(steps.step) else 0,
            "findings": [finding.as_json() for finding in by_severity(findings)],
            "missing": [str(found) for found in [*judged, *missing] if isinstance(found, NotJudged)],
        }

    def _with_buckets(
        self, findings: list[Finding], run: str, attempt: str, steps: tuple[wire.Ints, wire.Steps], joined: Joined
    ) -> list[Finding]:
        """Name the bucket where most of a slow backward arises, and its parameters; of the first few that are slow."""
        slow = [f for f in findings if f.code == "straggler" and f.phase == "backward"][:_BUCKET_RANKS]
        told = self._store.layouts(run, attempt) if slow else []
        layouts = {(layout.module, layout.revision): layout for layout in told}
        found = {}
        for finding in slow if layouts else []:
            rank, evidence = finding.ranks[0], finding.evidence
            ranks, spans = self._late_spans(finding, run, attempt, steps, joined)
            if len(ranks) and not self._waits_between(run, attempt, rank, spans.select(ranks == rank)):
                began = straggler.backward_began_ns(steps, (ranks, spans))
                excess_ns = min(evidence["excess_ns"], evidence["phase_excess_ns"]["backward"])
                late = straggler.late_bucket(rank, ranks, spans, began, excess_ns)
                found[rank] = _with_bucket(finding, late, layouts)
        return [found.get(f.ranks[0], f) if f.code == "straggler" else f for f in findings]

    def _waits_between(self, run: str, attempt: str, rank: int, spans: wire.Spans) -> bool:
        """Whether a rank waits for a collective of the user's between a step's buckets, as SyncBatchNorm has it do.

        The others' waits for a late rank are then part of their spans, and no bucket stands out for what it is.
        """
        steps, place = np.unique(spans.step, return_inverse=True)
        if not len(steps):
            return False
        first, last = np.full(len(steps), spans.ready_ns.max()), np.full(len(steps), spans.ready_ns.min())
        np.minimum.at(first, place, spans.ready_ns)
        np.maximum.at(last, place, spans.ready_ns)
        _, comms = self._store.comms(run, attempt, rank, int(steps[0]), int(steps[-1]))
        comms = comms.select((comms.kind == _USER) & np.isin(comms.step, steps))
        of = np.searchsorted(steps, comms.step)
        return bool(((comms.launched_ns > first[of]) & (comms.launched_ns < last[of])).any())

    def _late_spans(
        self, finding: Finding, run: str, attempt: str, steps: tuple[wire.Ints, wire.Steps], joined: Joined
    ) -> tuple[wire.Ints, wire.Spans]:
        """Spans of a slow rank and some others, of the steps in which it was late among the latest."""
        slow, (of, rows) = finding.ranks[0], steps
        typical_ns = finding.evidence["excess_ns"]
        late = straggler.late_collectives(joined.latest(_BUCKET_STEPS), slow, finding.steps[0], typical_ns)
        wanted = np.isin(of, _comparison_ranks(slow, joined.ranks)) & np.isin(rows.collective, late)
        of, number = of[wanted], rows.step[wanted]
        together: dict[tuple[int, int], list[int]] = {}  # With uneven inputs the ranks' step numbers part.
        for rank in np.unique(of).tolist():
            own = number[of == rank]
            together.setdefault((int(own.min()), int(own.max())), []).append(rank)
        read = [self._store.spans(run, attempt, ranks, *ends) for ends, ranks in together.items()]
        if not read:
            return of, wire.Spans.from_table(np.zeros((len(wire.Spans.names), 0), np.int64))
        ranks, spans = np.concatenate([part for part, _ in read]), wire.Spans.concat([part for _, part in read])
        width = int(joined.ranks.max()) + 1
        kept = np.isin(spans.step * width + ranks, number * width + of)
        return ranks[kept], spans.select(kept)

    def recent_steps(self, run: str, attempt: str, sources: list[Source]) -> tuple[wire.Ints, wire.Steps]:
        """Each rank's latest steps by its own numbers: with uneven inputs these part."""
        last = {one.rank: one.last_step for one in sorted(sources, key=lambda one: one.last_step)} or {0: 0}
        window = max(_FEWEST_STEPS, min(_STEPS, _ROWS // max(1, len(sources))))
        while window > 1 and (rows := self._rows_of(run, attempt, last, window)) > _MOST_ROWS:
            window = max(1, int(0.9 * window * _MOST_ROWS / rows))
        parts = _side_by_side(last, window)
        whole = min(first for _, first, _ in parts), parts[0][2]
        few = min(_MOST_ROWS, 2 * self._rows_of(run, attempt, last, window))
        if len(parts) == 1 or self._store.estimate_rows("steps", run, attempt, *whole) <= few:
            rank, steps = self._store.steps(run, attempt, None, *whole)
        else:  # Each is read by itself, from chunks that hold all of them.
            read = [self._store.steps(run, attempt, *part) for part in parts]
            rank, steps = np.concatenate([ranks for ranks, _ in read]), wire.Steps.concat([rows for _, rows in read])
            order = np.lexsort((rank, steps.step))
            rank, steps = rank[order], steps.select(order)
        ranks, place = ranks_of(rank)
        begins = np.array([last.get(one, 0) - window for one in ranks.tolist()], np.int64)
        within = steps.step > begins[place]
        return (rank, steps) if within.all() else (rank[within], steps.select(within))

    def _rows_of(self, run: str, attempt: str, last: dict[int, int], window: int) -> int:
        """About how many rows that window has, as if each rank had as many in the same steps."""
        held = self._store.estimate_rows
        parts = _side_by_side(last, window)
        return sum(held("steps", run, attempt, first, final) * len(ranks) // len(last) for ranks, first, final in parts)


def _with_bucket(
    finding: Finding, place: tuple[int, int, int] | None, layouts: dict[tuple[int, int], wire.Layout]
) -> Finding:
    """The finding with this bucket of a module's layout, where it is known."""
    layout = layouts.get(place[:2]) if place else None
    if place is None or layout is None or place[2] >= len(layout.buckets):
        return finding
    names = [parameter.name for parameter in layout.buckets[place[2]].parameters]
    evidence = finding.evidence | {"module": layout.module}
    return replace(finding, buckets=[place[2]], parameters=names[:50], evidence=evidence)


def _comparison_ranks(slow: int, ranks: wire.Ints) -> list[int]:
    """A rank and others to compare it with, from all over the world."""
    others = ranks[ranks != slow]
    few = np.linspace(0, len(others) - 1, min(len(others), _BUCKET_RANKS - 1)).astype(np.int64)
    return [slow, *others[few].tolist()]


def _side_by_side(last: dict[int, int], window: int) -> list[tuple[list[int], int, int]]:
    """Ranks whose last steps lie close together, and the steps that hold the window of each; the latest first.

    Args:
        last: Each rank's last step, by its own numbers.
        window: How many steps of each rank are looked at.
    """
    parts: list[tuple[list[int], int, int]] = []
    for rank, step in sorted(last.items(), key=lambda item: -item[1]):
        if not parts or step < parts[-1][2] - window // 4:
            parts.append(([], 0, step))
        ranks, _, final = parts[-1]
        ranks.append(rank)
        parts[-1] = ranks, max(0, step - window + 1), final
    return parts[:_PARTINGS]


def drop_silent_ranks(rank: wire.Ints, steps: wire.Steps, sources: list[Source]) -> tuple[wire.Ints, wire.Steps]:
    """Without the ranks that fell silent: with them no late step could be compared."""
    newest_ns = max((source.last_step_seen_ns for source in sources), default=0)
    silent = {source.rank for source in sources if newest_ns - source.last_step_seen_ns > _SILENT_NS}
    gone = [one for one in silent_ranks(rank, steps).tolist() if one in silent]
    rows = ~np.isin(rank, gone)
    return (rank, steps) if rows.all() else (rank[rows], steps.select(rows))


def _absent(sources: list[Source], compared: wire.Ints) -> dict[str, list[int]]:
    """Ranks of the world that are not among those compared, by what is known of them."""
    world = max((source.world_size for source in sources), default=0)
    stepped = {source.rank: source.last_step_seen_ns > 0 for source in sources}
    return {
        "nothing was heard of rank {}": sorted(set(range(world)) - stepped.keys()),
        "no step has ended on rank {}": sorted(rank for rank, has in stepped.items() if not has),
        "nothing was heard lately of rank {}: the steps told end far behind those of the others": sorted(
            {rank for rank, has in stepped.items() if has} - set(compared.tolist()) if len(compared) else []
        ),
    }


def _separate_groups_reason(sources: list[Source], settings: dict[str, wire.Scalar]) -> str:
    """Why ranks do not wait for each other: the module's process group is a part of the world."""
    world, ranks = max((source.world_size for source in sources), default=0), settings.get("group_ranks")
    if type(ranks) is not int or not 0 < ranks < world:
        return ""
    return f"DDP over {ranks} of {world} ranks: ranks of different process groups do not wait for each other"


def _not_judged(absent: dict[str, list[int]], apart: str) -> list[NotJudged]:
    """What cannot be said without these ranks: the slow one may be among them."""
    missing = [NotJudged("straggler", why.format(format_ranks(ranks))) for why, ranks in absent.items() if ranks]
    without = sorted(one for ranks in absent.values() for one in ranks)
    if apart:
        missing.append(NotJudged("comm-bound", f"waiting cannot be told from moving: {apart}"))
    elif without:
        missing.append(
            NotJudged("comm-bound", f"waiting cannot be told from moving without rank {format_ranks(without)}")
        )
    return missing
