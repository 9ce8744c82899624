"""Markdown tables of the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.models import MODELS
from benchmarks.pairs import Ratio, Seconds, ratio
from benchmarks.variants import VARIANTS

CLAIMS = [("on", "torch", 1.00), ("on", "views", 1.02), ("on", "off", 1.01)]
"""Two variants, and the largest allowed ratio of their step times."""


def tables(settings: dict[str, Any]) -> str:
    """Return a table for each set of variants with launches, and the reasons for missing variants."""
    parts = []
    for name, table in (("claims", _claims), ("unused", _unused), ("scale", _scale)):
        measured = [setting for setting in settings.values() if setting["set"] == name and setting["launches"]]
        parts += [table(measured), _conditions(measured)] if measured else []
    return "\n".join(parts)


def compare(setting: dict[str, Any], numerator: str, denominator: str, *, medians: bool = False) -> Ratio | None:
    """Return the ratio of two variants over the launches that have both; None without such launches.

    `medians` as in `pairs.ratio`.
    """
    by_launch = [launch["seconds"] for launch in setting["launches"]]
    complete = [seconds for seconds in by_launch if numerator in seconds and denominator in seconds]
    return (
        ratio(
            [seconds[numerator] for seconds in complete],
            [seconds[denominator] for seconds in complete],
            medians=medians,
        )
        if complete
        else None
    )


def _claims(settings: Sequence[dict[str, Any]]) -> str:
    """Return ratios to torch's default, then each claim with its verdict."""
    names = ["again", "views", "off", "on"]
    head = ["model", "ranks", "torch, ms", *(VARIANTS[name].title for name in names)]
    head += [f"{_short(name)} / {_short(reference)}, at most {limit:.2f}" for name, reference, limit in CLAIMS]
    rows = []
    for setting in settings:
        row = [*_name(setting), *(_format(compare(setting, name, "torch")) for name in names)]
        for name, reference, limit in CLAIMS:
            totals, medians = (compare(setting, name, reference, medians=by_medians) for by_medians in (False, True))
            row.append(
                f"{_format_verdict(totals, limit)}; by medians {_format_verdict(medians, limit)}" if totals else ""
            )
        rows.append(row)
    return rows_of(head, rows)


def _unused(settings: Sequence[dict[str, Any]]) -> str:
    """Return the cost of the flag: torch's step over torch's, and ours over ours."""
    pairs = [("again", "torch"), ("torch_finds", "torch"), ("finds", "off"), ("finds", "torch_finds")]
    head = [
        "model",
        "ranks",
        "torch, ms",
        *(f"{VARIANTS[name].title} / {VARIANTS[reference].title}" for name, reference in pairs),
    ]
    rows = [
        [*_name(setting), *(_format(compare(setting, name, reference)) for name, reference in pairs)]
        for setting in settings
    ]
    return rows_of(head, rows)


def _scale(settings: Sequence[dict[str, Any]]) -> str:
    """Return a row for every variant, with its ratio to torch's default."""
    head = ["", *(f"{MODELS[setting['model']].title}, {setting['ranks']} ranks" for setting in settings)]
    names = [name for name in VARIANTS if any(name in setting["launches"][0]["seconds"] for setting in settings)]
    rows = [
        [VARIANTS[name].title, *(_format(compare(setting, name, "torch")) for setting in settings)]
        for name in names
        if name != "torch"
    ]
    missing = {name: reason for setting in settings for name, reason in setting["launches"][-1]["missing"].items()}
    return rows_of(head, rows) + "".join(
        f"\nNot measured: {VARIANTS[name].title}: {reason}\n" for name, reason in missing.items()
    )


def _conditions(settings: Sequence[dict[str, Any]]) -> str:
    """Return the number of turns and launches, and the load of other processes during the measurement."""
    lines = []
    for setting in settings:
        launches = setting["launches"]
        turns = sum(len(launch["seconds"]["torch"]) for launch in launches)
        other_cores = sum(launch["others_cores"] for launch in launches) / len(launches)
        stolen_cores = sum(launch["stolen_cores"] for launch in launches) / len(launches)
        lines.append(
            f"{', '.join(_name(setting)[:2])} ranks: {turns} turns of "
            f"{launches[-1]['steps_a_turn']} steps in {len(launches)} launches; other processes took {other_cores:.2f} "
            f"of a core, the hypervisor {stolen_cores:.2f}"
        )
    return "\n" + "\n".join(f"- {line}" for line in lines) + "\n"


def _name(setting: dict[str, Any]) -> list[str]:
    seconds: Seconds = [launch["seconds"]["torch"] for launch in setting["launches"]]
    mean_s = sum(map(sum, seconds)) / sum(map(len, seconds))
    return [MODELS[setting["model"]].title, str(setting["ranks"]), f"{1e3 * mean_s:.1f}"]


def _short(name: str) -> str:
    return {"on": "telemetry on", "off": "off", "torch": "torch", "views": "torch with views"}[name]


def _format_verdict(value: Ratio | None, limit: float) -> str:
    return "" if value is None else f"{value} {value.verdict(limit)}"


def _format(value: Ratio | None) -> str:
    return "" if value is None else str(value)


def rows_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of these rows."""
    title, *lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([title, "|" + "---|" * len(head), *lines]) + "\n"


def change(ratio: Ratio | None) -> str:
    """Return a ratio in per cent with its 95 % interval, such as "-3.2 (-5.2 to -1.2)"; negative is less."""
    if ratio is None:
        return ""
    middle, low, high = (100 * (value - 1) for value in (ratio.middle, ratio.low, ratio.high))
    return f"{middle:z.1f}" + (" (one launch)" if ratio.high == float("inf") else f" ({low:z.1f} to {high:z.1f})")
