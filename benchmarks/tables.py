"""Markdown of what was measured, ready for the README."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.models import MODELS
from benchmarks.pairs import Ratio, Seconds, ratio
from benchmarks.variants import VARIANTS

CLAIMS = [("on", "torch", 1.00), ("on", "views", 1.02), ("on", "off", 1.01)]
"""The one's step time over the other's, and what it is at most."""


def tables(settings: dict[str, Any]) -> str:
    """A table for each set of variants, and what was missing, of all settings that hold launches."""
    parts = []
    for name, table in (("claims", _claims), ("unused", _unused), ("scale", _scale)):
        found = [setting for setting in settings.values() if setting["set"] == name and setting["launches"]]
        parts += [table(found), _conditions(found)] if found else []
    return "\n".join(parts)


def compare(setting: dict[str, Any], of: str, to: str, *, medians: bool = False) -> Ratio | None:
    """The ratio of two variants of a setting, over the launches that have both; None where there are none.

    `medians` as in `pairs.ratio`.
    """
    took = [launch["seconds"] for launch in setting["launches"]]
    both = [one for one in took if of in one and to in one]
    return ratio([one[of] for one in both], [one[to] for one in both], medians=medians) if both else None


def _claims(settings: Sequence[dict[str, Any]]) -> str:
    """Ratios to torch's default, then each claim with its verdict."""
    plain = ["again", "views", "off", "on"]
    head = ["model", "ranks", "torch, ms", *(VARIANTS[name].title for name in plain)]
    head += [f"{_short(of)} / {_short(to)}, at most {limit:.2f}" for of, to, limit in CLAIMS]
    rows = []
    for setting in settings:
        row = [*_name(setting), *(_shown(compare(setting, name, "torch")) for name in plain)]
        for of, to, limit in CLAIMS:
            totals, medians = (compare(setting, of, to, medians=way) for way in (False, True))
            row.append(f"{_judged(totals, limit)}; by medians {_judged(medians, limit)}" if totals else "")
        rows.append(row)
    return rows_of(head, rows)


def _unused(settings: Sequence[dict[str, Any]]) -> str:
    """What the flag costs: torch's step over torch's, and ours over ours."""
    pairs = [("again", "torch"), ("torch_finds", "torch"), ("finds", "off"), ("finds", "torch_finds")]
    head = ["model", "ranks", "torch, ms", *(f"{VARIANTS[of].title} / {VARIANTS[to].title}" for of, to in pairs)]
    rows = [[*_name(one), *(_shown(compare(one, of, to)) for of, to in pairs)] for one in settings]
    return rows_of(head, rows)


def _scale(settings: Sequence[dict[str, Any]]) -> str:
    """Every variant as a ratio to torch's default; a row each."""
    head = ["", *(f"{MODELS[setting['model']].title}, {setting['ranks']} ranks" for setting in settings)]
    names = [name for name in VARIANTS if any(name in one["launches"][0]["seconds"] for one in settings)]
    rows = [
        [VARIANTS[name].title, *(_shown(compare(setting, name, "torch")) for setting in settings)]
        for name in names
        if name != "torch"
    ]
    missing = {name: reason for one in settings for name, reason in one["launches"][-1]["missing"].items()}
    return rows_of(head, rows) + "".join(
        f"\nNot measured: {VARIANTS[name].title}: {reason}\n" for name, reason in missing.items()
    )


def _conditions(settings: Sequence[dict[str, Any]]) -> str:
    """Rounds and launches, and how much else the machine was doing: without that no figure can be judged."""
    lines = []
    for setting in settings:
        launches = setting["launches"]
        others = sum(one["others_cores"] for one in launches) / len(launches)
        stolen = sum(one["stolen_cores"] for one in launches) / len(launches)
        lines.append(
            f"{', '.join(_name(setting)[:2])} ranks: {sum(len(one['seconds']['torch']) for one in launches)} turns of "
            f"{launches[-1]['steps_a_turn']} steps in {len(launches)} launches; other processes took {others:.2f} of a "
            f"core, the hypervisor {stolen:.2f}"
        )
    return "\n" + "\n".join(f"- {line}" for line in lines) + "\n"


def _name(setting: dict[str, Any]) -> list[str]:
    seconds: Seconds = [launch["seconds"]["torch"] for launch in setting["launches"]]
    mean_s = sum(map(sum, seconds)) / sum(map(len, seconds))
    return [MODELS[setting["model"]].title, str(setting["ranks"]), f"{1e3 * mean_s:.1f}"]


def _short(name: str) -> str:
    return {"on": "telemetry on", "off": "off", "torch": "torch", "views": "torch with views"}[name]


def _judged(found: Ratio | None, limit: float) -> str:
    return "" if found is None else f"{found} {found.verdict(limit)}"


def _shown(found: Ratio | None) -> str:
    return "" if found is None else str(found)


def rows_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of these rows."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
