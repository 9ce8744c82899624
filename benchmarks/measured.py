"""Fill the tables of the measurements' pages from the newest results of each benchmark.

A page marks the place of a table by `<!-- table: NAME -->`; the table follows the mark up to a blank line.

    .venv/bin/python -m benchmarks.measured
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import causes, crashes, hangs, switched
from benchmarks.broken import FAULTS
from benchmarks.diagnosis.tables import table as diagnosis_table
from benchmarks.models import MODELS
from benchmarks.pairs import Ratio, ratio
from benchmarks.tables import compare, rows_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "measurements.md", ROOT / "docs" / "methods" / "diagnosis-truth.md")
_MARK = re.compile(r"<!-- table: ([\w-]+) -->\n(?:.+\n)*")


def files(benchmark: str) -> list[Path]:
    """Results of a benchmark, the newest last."""
    return sorted(RESULTS.glob(f"{benchmark}-20*.json"))


def newest(benchmark: str) -> Any:
    """Content of a benchmark's newest result."""
    return json.loads(files(benchmark)[-1].read_text())


def change(ratio: Ratio | None) -> str:
    """Return a ratio as a percentage with its direction and its 95 % interval, such as "3.2 % less (1.2 to 5.2 %)"."""
    if ratio is None:
        return ""
    middle, low, high = (100 * (value - 1) for value in (ratio.middle, ratio.low, ratio.high))
    if low < 0 < high or ratio.high == float("inf"):
        sign = "less" if middle < 0 else "more"
        return f"{abs(middle):.1f} % {sign}" + ("" if ratio.high == float("inf") else f" ({low:+.1f} to {high:+.1f} %)")
    low, high = sorted((abs(low), abs(high)))
    return f"{abs(middle):.1f} % {'less' if middle < 0 else 'more'} ({low:.1f} to {high:.1f} %)"


def _steps(ranks: int) -> str:
    settings: dict[str, Any] = {}
    for path in files("overhead"):
        if not path.name.endswith("-h200.json"):
            settings |= json.loads(path.read_text())["settings"]
    return _rows(settings, ranks, "claims", _CLAIMS)


def _rows(settings: dict[str, Any], ranks: int, set_: str, pairs: tuple[tuple[str, str, str], ...]) -> str:
    rows = []
    for model in MODELS:
        setting = settings.get(f"{model}, {ranks} ranks, {set_}")
        if setting is None:
            continue
        turns = [turn for launch in setting["launches"] for turn in launch["seconds"]["torch"]]
        cells = [change(compare(setting, one, other)) for one, other, _ in pairs]
        launches = str(len(setting["launches"]))
        rows.append([MODELS[model].title, f"{1e3 * sum(turns) / len(turns):.1f}", *cells, launches])
    return rows_of(["model", "torch, ms a step", *(title for _, _, title in pairs), "launches"], rows)


_CLAIMS = (
    ("again", "torch", "torch once more (the noise)"),
    ("on", "torch", "ours with telemetry, than torch"),
    ("on", "views", "ours with telemetry, than torch with `gradient_as_bucket_view`"),
    ("on", "off", "with telemetry, than without"),
)
_UNUSED = (
    ("again", "torch", "torch once more (the noise)"),
    ("torch_finds", "torch", "torch with the flag, than without"),
    ("finds", "off", "ours with the flag, than without"),
)


def _gpu() -> str:
    path = sorted(RESULTS.glob("overhead-20*-h200.json"))[-1]
    return _rows(json.loads(path.read_text())["settings"], 1, "claims", _CLAIMS)


def _telemetry() -> str:
    found: dict[str, Any] = {}
    for path in files("switched"):
        found |= json.loads(path.read_text())["found"]
    rows = []
    for title, launches in found.items():
        off = [turn for launch in launches for turn in launch["seconds"]["off"]]
        cells = [
            change(switched.compare(launches, "again")),
            change(switched.compare(launches, "on")),
            change(switched.compare(launches, "on", "processor_s")),
        ]
        rows.append([title, f"{1e3 * sum(off) / len(off):.1f}", *cells, str(len(launches))])
    head = ["", "off, ms a step", "off once more (the noise)", "telemetry on: step", "processor time", "launches"]
    return rows_of(head, rows)


def _broken() -> str:
    (launches,) = newest("harm")["models"].values()
    broken = [launch for name, group in launches.items() if name in FAULTS for launch in group]
    rows = [
        [title, change(switched.compare(group, "on")), change(switched.compare(group, "again")), str(len(group))]
        for title, group in (("thirteen broken collectors", broken), ("a healthy collector", launches["collector"]))
    ]
    return rows_of(["", "step with telemetry, than without", "without, once more (the noise)", "launches"], rows)


def _endurance() -> str:
    rows = [
        [name, f"{100 * (row['resident_ratio'] - 1):.2f} % of {row['resident_mb']:.0f} MB", *_grown(row)]
        for name, row in newest("endurance").items()
    ]
    return rows_of(["", "growth of memory", "threads", "open files"], rows)


def _grown(row: dict[str, Any]) -> list[str]:
    return [" → ".join(map(str, row[name])) for name in ("threads", "open_files")]


_PART = "figures/"
"""In the name of a value that is a part of another."""


def _medians(benchmark: str, begin: str = "") -> Callable[[], str]:
    """A table of the medians whose names begin with `begin`, without parts and compressed responses."""

    def table() -> str:
        found = newest(benchmark)
        if "median_ms" in found:
            values = {name: value for name, value in found["median_ms"].items() if _PART not in name}
            chosen = [name for name in values if name.startswith(begin) and not name.endswith((", kB", ", gzip"))]
            rows = [[name, f"{values[name]:,.0f}"] for name in chosen]
        else:
            values = {name: value["median_ms"] for name, value in found.items() if "median_ms" in value}
            rows = [[name, f"{value:,.0f}"] for name, value in values.items() if not name.endswith(", gzip")]
        return rows_of(["", "median, ms"], rows)

    return table


_INGEST = {"spans_per_s": "bucket spans a second", "ack_p99_ms": "99 % acknowledged within, ms"}
_JOB = {"spans": "bucket spans", "ack_p50_ms": "half acknowledged within, ms"}
_JOB |= {"ack_p99_ms": "99 % acknowledged within, ms", "cpu_cores": "processor cores"}
_INGEST |= {
    "cpu_ns_per_span": "processor time a span, ns",
    "bare_spans_per_s": "a collector that only keeps the bodies",
}


def _figures(benchmark: str, names: dict[str, str]) -> Callable[[], str]:
    def table() -> str:
        found = newest(benchmark)
        return rows_of(
            ["", ""],
            [
                [title, f"{found[name]:,.0f}" if found[name] > 10 else f"{found[name]:.2f}"]
                for name, title in names.items()
            ],
        )

    return table


_PLAIN = "plain all-reduce"


def _communication() -> str:
    found = newest("communication")
    plain = [found["seconds"][_PLAIN]]
    rows = [
        [
            re.sub("^cap (.+)", r"`bucket_cap_mb`: \1", name),
            change(ratio([seconds], plain)),
            f"{100 * found['busiest_link'][name]:.0f} %",
        ]
        for name, seconds in found["seconds"].items()
        if name != _PLAIN and not name.startswith("torch")
    ]
    return rows_of(["variant", "step, than plain", "bytes on the busiest link, of the gradients"], rows)


def _accuracy() -> str:
    found = newest("accuracy")["found"]
    rows = []
    for name in found:
        if name == _PLAIN:
            continue
        pairs = list(zip(found[name], found[_PLAIN], strict=True))
        steps = _range([100 * (one[0] / plain[0] - 1) for one, plain in pairs])
        rows.append([name, steps, _range([100 * (one[1] - plain[1]) for one, plain in pairs])])
    head = ["strategy", "steps, % more than plain", "test digits read, percentage points more than plain"]
    return rows_of(head, rows)


def _range(values: list[float]) -> str:
    """Return median, minimum and maximum, such as "56.0 (9.1 to 60.0)"."""
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})" if any(values) else "0"


def _compare() -> str:
    names = ("judged", "step_differs", "fails", "smallest")
    rows = [
        [f"{row['steps']:,}", *(f"{100 * row[name]:.1f} %" for name in names)] for row in newest("compare")["drawn"]
    ]
    head = ["steps", "judged", "equal runs: step differs", "equal runs: fails over 3 %", "smallest change that is seen"]
    return rows_of(head, rows)


def _diagnosis(part: int) -> str:
    path = sorted(RESULTS.glob("diagnosis-*.jsonl"))[-1]
    results = [json.loads(line) for line in path.read_text().splitlines()]
    return diagnosis_table(results).split("\n\n")[part] + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "step": lambda: _steps(2),
    "four-ranks": lambda: _steps(4),
    "unused": lambda: _rows(newest("overhead-unused")["settings"], 2, "unused", _UNUSED),
    "gpu": _gpu,
    "telemetry": _telemetry,
    "broken": _broken,
    "endurance": _endurance,
    "hangs": lambda: hangs.table(newest("hangs")["ranks"]["2"]) + "\n",
    "crashes": lambda: crashes.table([crashes.Crash(**row) for row in newest("crashes")]) + "\n",
    "causes": lambda: causes.table(newest("causes")) + "\n",
    "compare": _compare,
    "ingest": _figures("ingest", _INGEST),
    "job": _figures("job", _JOB),
    "reads": _medians("reads"),
    "scrapes": _medians("scrapes"),
    "whole-run": _medians("whole-run"),
    "run-page": _medians("run-page", "until"),
    "communication": _communication,
    "accuracy": _accuracy,
    "diagnosis-cases": lambda: _diagnosis(0),
    "diagnosis-sums": lambda: _diagnosis(1),
    "diagnosis-alarms": lambda: _diagnosis(2),
}


def filled(page: str) -> str:
    """Return a page's text with its tables made anew."""
    return _MARK.sub(lambda match: f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}", page)


def main() -> None:
    """Fill all tables."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
