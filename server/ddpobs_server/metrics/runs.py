"""Lines of each run's metrics, from the store's rollups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddpobs.wire import OWN_PHASES, PHASES
from ddpobs.wire.states import RunState
from ddpobs_server.metrics.families import DURATIONS, FORMATS, Families
from ddpobs_server.store import Aggregates, BucketRollup, Run
from ddpobs_server.store.schema import STEP_BOUNDS_S

_EXPOSED = PHASES.index("exposed_comm")
_BOUNDS = (*map(str, STEP_BOUNDS_S), "+Inf")
_LABEL_LENGTH = 128
"""Characters of a label's value that a client chose."""
_PLACE_CHARACTERS, _RANKS = 160, 8
"""Longest place, and most ranks, in a label."""
_FINDINGS = 10
"""Findings of a run that have a series each: the most severe ones."""
_BUCKET = "bucket_ready_seconds", "bucket_comm_seconds", "bucket_exposed_seconds", "bucket_bytes"
_Lines = dict[str, list[str]]


def render_runs(totals: Aggregates) -> dict[str, Families]:
    """Lines of each changed run, by run and family."""
    names = {run.run: run.name for run in totals.runs if run.run in totals.changed}
    lines: dict[str, _Lines] = {key: {} for key in names}
    for run in totals.runs:
        if run.run in names:
            _add_run(lines[run.run], run, totals)
            _add_ranks(lines[run.run], run.name, totals.phases.get(run.run, {}))
    _add_last_steps(lines, names, totals)
    _add_delays(lines, names, totals)
    _add_buckets(lines, names, totals)
    return {key: _encode(families) for key, families in lines.items()}


def render_present(run: Run, state: RunState, diagnosis: Mapping[str, Any] | None) -> Families:
    """Lines that change without a commit: a run's state, its findings, its goodput, and the place of its hang."""
    lines: _Lines = {}
    _add(lines, "run_state", [(run.name, state, 1)])
    findings = diagnosis["findings"] if diagnosis else ()
    counts = Counter((finding["code"], finding["severity"]) for finding in findings)
    _add(lines, "findings", ((code, run.name, severity, count) for (code, severity), count in counts.items()))
    _add(lines, "finding_gain_ratio", _gains(run.name, findings[:_FINDINGS]))
    if diagnosis and diagnosis["goodput"] is not None:
        _add(lines, "goodput_ratio", [(run.name, diagnosis["goodput"])])
        _add(lines, "time_share_ratio", [(group, run.name, share) for group, share in diagnosis["time_shares"].items()])
    hang = next((f for f in findings if f["code"] == "hang" and f["evidence"]["places"]), None)  # Not one that ended.
    if hang is not None:
        _add(lines, "hang_info", [(_escape(_place(hang), _PLACE_CHARACTERS), _rank_list(hang), run.name, 1)])
    return _encode(lines)


def _gains(run: str, findings: Sequence[Any]) -> list[tuple[object, ...]]:
    """Labels and gain of each finding; of findings with the same labels, the largest gain."""
    gains: dict[tuple[object, ...], float] = {}
    for finding in findings:
        labels = (finding["code"], finding["phase"] or "", _rank_list(finding), run, finding["severity"])
        gain = finding["gain"]["ratio"] if finding["gain"] else 0.0
        gains[labels] = max(gain, gains.get(labels, 0.0))
    return [(*labels, gain) for labels, gain in gains.items()]


def _rank_list(finding: Any) -> str:
    """The ranks of a finding: `1`, `0, 2`; a long list is cut."""
    ranks = finding["ranks"]
    return ", ".join(map(str, ranks[:_RANKS])) + (f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else "")


def _place(hang: Any) -> str:
    """Place of the first of these ranks: lines of Python, else its phase, else the kind of hang."""
    locations = hang["evidence"]["places"]
    location = next((locations[rank] for rank in hang["ranks"] if locations.get(rank)), "")
    return str(location or hang["phase"] or hang["evidence"]["kind"])


def _encode(lines: _Lines) -> Families:
    return {name: "".join(family).encode() for name, family in lines.items()}


def _add(lines: _Lines, family: str, values: Iterable[tuple[object, ...]]) -> None:
    """Add lines to a family; each value holds the escaped labels in the family's order, and the sample."""
    lines.setdefault(family, []).extend(map(FORMATS[family].__mod__, values))


def _add_run(lines: _Lines, run: Run, totals: Aggregates) -> None:
    backend, device, torch = map(_escape, totals.facts.get(run.run, ("", "", "")))
    _add(lines, "run_info", [(run.attempt, backend, device, run.name, torch, run.world_size, 1)])
    _add(lines, "unused_parameters", [(run.name, totals.unused.get(run.run, 0))])
    counts = totals.histograms.get(run.run, [0] * len(_BOUNDS))
    wall_ns = sum(sum(phases_ns) for _, _, *phases_ns in totals.phases.get(run.run, {}).values())
    family = lines.setdefault(DURATIONS, [])
    steps = 0
    for bound, count in zip(_BOUNDS, counts, strict=True):
        steps += count
        family.append(f'ddpobs_{DURATIONS}_bucket{{le="{bound}",run="{run.name}"}} {float(steps)!r}\n')
    family.append(f'ddpobs_{DURATIONS}_count{{run="{run.name}"}} {float(steps)!r}\n')
    family.append(f'ddpobs_{DURATIONS}_sum{{run="{run.name}"}} {wall_ns / 1e9!r}\n')


def _add_ranks(lines: _Lines, name: str, phases: Mapping[int, tuple[int, ...]]) -> None:
    rows = phases.items()
    _add(lines, "steps", ((rank, name, row[0]) for rank, row in rows))
    _add(lines, "comm_seconds", ((rank, name, row[1] / 1e9) for rank, row in rows))
    _add(lines, "comm_exposed_seconds", ((rank, name, row[2 + _EXPOSED] / 1e9) for rank, row in rows))
    for index, phase in enumerate(PHASES):
        _add(lines, "phase_seconds", ((phase, rank, name, row[2 + index] / 1e9) for rank, row in rows))


def _add_last_steps(lines: dict[str, _Lines], names: dict[str, str], totals: Aggregates) -> None:
    for key, rank, step, at_ns, dropped in totals.last_seen:
        if key in names:
            labels, families = (rank, names[key]), lines[key]
            if at_ns:  # Zero until the first step.
                _add(families, "last_step", [(*labels, step)])
                _add(families, "last_step_timestamp_seconds", [(*labels, at_ns / 1e9)])
            _add(families, "telemetry_dropped", [(*labels, dropped)])
    for key, rank, total_bytes in totals.reduced_bytes:
        if key in names:
            _add(lines[key], "allreduce_bytes", [(rank, names[key], total_bytes)])


def _add_delays(lines: dict[str, _Lines], names: dict[str, str], totals: Aggregates) -> None:
    for key, total in totals.peers:
        if key in names:
            labels, families = (total.rank, names[key]), lines[key]
            _add(families, "compared_steps", [(*labels, total.steps)])
            _add(families, "rank_delay_seconds", [(*labels, total.delay_ns / 1e9)])
            _add(families, "comm_wait_seconds", [(*labels, total.wait_ns / 1e9)])
            steps = total.straggler_steps
            _add(families, "straggler_steps", ((phase, *labels, steps[phase]) for phase in OWN_PHASES))


def _add_buckets(lines: dict[str, _Lines], names: dict[str, str], totals: Aggregates) -> None:
    by_run: dict[str, dict[str, list[float]]] = {key: {} for key in names}
    for key, row in totals.buckets:
        if key in names:
            values = by_run[key].setdefault(_bucket_label(row), [0.0, 0.0, 0.0, 0])
            values[0] += row.compute_ns / 1e9
            values[1] += row.comm_ns / 1e9
            values[2] += row.exposed_ns / 1e9
            # Rows are ordered by revision, so the latest layout's size remains.
            values[3] = int(totals.sizes[key, row.module, row.revision][row.bucket])
    for key, buckets in by_run.items():
        if buckets:
            for index, family in enumerate(_BUCKET):
                _add(lines[key], family, ((label, names[key], values[index]) for label, values in buckets.items()))


def _bucket_label(row: BucketRollup) -> str:
    return str(row.bucket) if row.module == 0 else f"{row.module}.{row.bucket}"


def _escape(text: str, length: int = _LABEL_LENGTH) -> str:
    """Shorten and escape a label's value for the exposition formats."""
    return text[:length].replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
