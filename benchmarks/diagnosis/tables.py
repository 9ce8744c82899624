"""The tables of the truth set."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from benchmarks.diagnosis.judge import alarms

Result = dict[str, Any]
_QUESTIONS = ("named", "phase", "bucket", "interval", "cause", "kind")


def is_right(result: Result) -> bool:
    """Whether a run's fault was named with its rank and phase, or without a phase with its cause or kind."""
    fault = result["fault"]
    return bool(fault["named"] and fault.get("phase", True) and (fault.get("cause", True) or "phase" in fault))


def table(results: list[Result]) -> str:
    """Return Markdown: a row for each case, sums by the size of the delay, and false alarms."""
    return "\n\n".join([_cases(results), _sums(results), _alarms(results)])


def _cases(results: list[Result]) -> str:
    lines = [
        "| fault | runs | rank | phase | bucket | interval | cause | kind | other alarms | steps until named, median | "
        "stated / injected delay, median (10th to 90th percentile) |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(result["case"] for result in results):
        runs = [result["fault"] for result in results if result["case"] == case]
        cells = [_share(runs, question) for question in _QUESTIONS]
        other = sum(bool(run["other_alarms"]) for run in runs)
        steps = [run["steps_until_named"] for run in runs if run.get("steps_until_named")]
        named_after = f"{statistics.median(steps):.0f}" if steps else ""
        lines.append(f"| {case} | {len(runs)} | {' | '.join(cells)} | {other} | {named_after} | {_ratios(runs)} |")
    return "\n".join(lines)


def _share(runs: list[Result], question: str) -> str:
    answers = [run[question] for run in runs if question in run]
    return f"{sum(answers)} of {len(answers)}" if answers else ""


def _ratios(runs: list[Result]) -> str:
    ratios = sorted(run["stated_ratio"] for run in runs if "stated_ratio" in run)
    if not ratios:
        return ""
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def _sums(results: list[Result]) -> str:
    lines = [
        "| background | delay | runs | right rank and phase | stated delay within 10 % |",
        "|---|---|---|---|---|",
    ]
    backgrounds = [None, *dict.fromkeys(result["background"] for result in results)]
    for background in backgrounds:
        of_mode = [result for result in results if background in (None, result["background"])]
        for name, chosen in (
            ("5 % of the step", [result for result in of_mode if result["share"] == 0.05]),
            ("10 % and more", [result for result in of_mode if (result["share"] or 0) >= 0.1]),
            ("not set beforehand", [result for result in of_mode if result["share"] is None]),
        ):
            if chosen:
                right = sum(map(is_right, chosen))
                ratios = [result["fault"]["stated_ratio"] for result in chosen if "stated_ratio" in result["fault"]]
                within = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
                cells = [background or "all", name, str(len(chosen)), f"{right} ({right / len(chosen):.0%})"]
                lines.append(f"| {' | '.join(cells)} | {f'{within} of {len(ratios)}' if ratios else ''} |")
    return "\n".join(lines)


def _alarms(results: list[Result]) -> str:
    lines = ["| background | balanced twins | with a warning or above | by code | a rank named, as information |"]
    lines.append("|---|---|---|---|---|")
    for background in (None, *dict.fromkeys(result["background"] for result in results)):
        twins = [result["twin"] for result in results if background in (None, result["background"])]
        codes = Counter(finding["code"] for twin in twins for finding in alarms(twin))
        text = ", ".join(f"{code} {count}" for code, count in codes.most_common())
        named = sum(any(f["ranks"] and f["severity"] == "info" for f in twin) for twin in twins)
        count = sum(bool(alarms(twin)) for twin in twins)
        lines.append(f"| {background or 'all'} | {len(twins)} | {count} | {text} | {named} |")
    return "\n".join(lines)
