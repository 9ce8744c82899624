"""The tables of the truth set."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from benchmarks.diagnosis.judge import alarms

Result = dict[str, Any]
_DISTURBANCES = (0.0, 0.1, 0.2, 0.4, 99.0)
"""Ranges of the ranks' time in the run queue over their time on a processor."""
_WRONG = {"named": "not named", **{each: each for each in ("phase", "bucket", "interval", "cause", "kind")}}
"""What may be wrong in a diagnosis, and its words in a table, the most important first."""


def is_right(result: Result) -> bool:
    """Whether a run's fault was named with its rank and phase, or without a phase with its cause or kind."""
    fault = result["fault"]
    return bool(fault["named"] and fault.get("phase", True) and (fault.get("cause", True) or "phase" in fault))


def table(results: list[Result]) -> str:
    """Return Markdown: a row for each kind of fault, sums by the size of the delay, and false alarms."""
    return "\n\n".join([_cases(results), _sums(results), _alarms(results)])


def _cases(results: list[Result]) -> str:
    lines = [
        "| fault | runs | right | wrong, or beside it | steps until named | stated / injected delay |",
        "|---|---|---|---|---|---|",
    ]
    plain: dict[str, int] = {}
    for case in sorted(set(map(_kind, results))):
        runs = [result["fault"] for result in results if _kind(result) == case]
        wrong = Counter(first for run in runs if (first := _first_wrong(run)))
        other = sum(bool(run["other_alarms"]) for run in runs)
        counts = {_WRONG[question]: count for question, count in wrong.items()}
        counts |= {"other alarm": other} if other else {}
        text = ", ".join(f"{name} {count}" for name, count in counts.items())
        steps = [run["steps_until_named"] for run in runs if run.get("steps_until_named")]
        named_after = f"{statistics.median(steps):.0f}" if steps else ""
        right = len(runs) - wrong.total()
        if not (text or named_after or _ratios(runs)):
            plain[case] = right
            continue
        lines.append(f"| {case} | {len(runs)} | {right} | {text} | {named_after} | {_ratios(runs)} |")
    if plain:
        lines.append(f"| {', '.join(plain)} | {sum(plain.values())} | {sum(plain.values())} | | | |")
    return "\n".join(lines)


def _kind(result: Result) -> str:
    """The fault; delays of 10 % and more of one phase are one kind, such as "data 10 % and more"."""
    phase, _, size = result["case"].rpartition(" ")
    return f"{phase} 10 % and more" if size in ("10%", "20%", "50%") else result["case"]


def _first_wrong(run: dict[str, Any]) -> str:
    """The first question that the run's diagnosis answers wrongly; empty without one."""
    return next((question for question in _WRONG if not run.get(question, True)), "")


def _ratios(runs: list[Result]) -> str:
    ratios = sorted(run["stated_ratio"] for run in runs if "stated_ratio" in run)
    if not ratios:
        return ""
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def _sums(results: list[Result]) -> str:
    lines = [
        "| runs | delay | count | right rank and phase | stated delay within 10 % |",
        "|---|---|---|---|---|",
    ]
    for name, part in _parts(results, "fault"):
        for delay, chosen in (
            ("5 % of the step", [result for result in part if result["share"] == 0.05]),
            ("10 % and more", [result for result in part if (result["share"] or 0) >= 0.1]),
            ("not set beforehand", [result for result in part if result["share"] is None and part is results]),
        ):
            if chosen:
                right = sum(map(is_right, chosen))
                ratios = [result["fault"]["stated_ratio"] for result in chosen if "stated_ratio" in result["fault"]]
                within = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
                cells = [name, delay, str(len(chosen)), f"{right} ({right / len(chosen):.0%})"]
                lines.append(f"| {' | '.join(cells)} | {f'{within} of {len(ratios)}' if ratios else ''} |")
    return "\n".join(lines)


def _alarms(results: list[Result]) -> str:
    lines = ["| balanced twins | count | with a warning or above | by code and cause | a rank named as information |"]
    lines.append("|---|---|---|---|---|")
    for name, part in _parts(results, "twin"):
        twins = [result["twin"] for result in part]
        kinds = Counter((f["code"], f["evidence"].get("cause")) for twin in twins for f in alarms(twin))
        text = ", ".join(f"{code} ({cause}) {count}" for (code, cause), count in kinds.most_common())
        named = sum(any(f["ranks"] and f["severity"] == "info" for f in twin) for twin in twins)
        lines.append(f"| {name} | {len(twins)} | {sum(bool(alarms(twin)) for twin in twins)} | {text} | {named} |")
    return "\n".join(lines)


def _parts(results: list[Result], run: str) -> Iterator[tuple[str, list[Result]]]:
    """Yield all results, then those of each range of disturbance that have any."""
    yield "all", results
    for low, high in pairwise(_DISTURBANCES):
        part = [result for result in results if low <= result["disturbance"][run] < high]
        if part:
            name = f"{low:.0%} to {high:.0%}" if high < _DISTURBANCES[-1] else f"above {low:.0%}"
            yield f"disturbed {name}", part
