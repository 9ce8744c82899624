"""Fill the tables of the measurements' pages from the newest results of each benchmark.

A page marks the place of a table by `<!-- table: NAME -->`; the table follows the mark up to a blank line.

    .venv/bin/python -m benchmarks.measured
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import auto_cap, causes, communication, crashes, hangs, ingest_parts, switched, unit_advice
from benchmarks.broken import FAULTS
from benchmarks.diagnosis.tables import table as diagnosis_table
from benchmarks.models import MODELS
from benchmarks.pairs import Ratio, ratio
from benchmarks.paper import half_bytes, losses, operations, order, readiness, scaling
from benchmarks.paper.experiments import EXPERIMENTS
from benchmarks.paper.tables import CLAIMS_HEAD, claims
from benchmarks.tables import change, compare, rows_of
from benchmarks.whatif import __main__ as whatif

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = tuple(ROOT / "docs" / name for name in ("measurements.md", "paper.md", "whatif.md", "auto-buckets.md"))
_MARK = re.compile(r"<!-- table: ([\w-]+) -->\n(?:.+\n)*")


def files(benchmark: str) -> list[Path]:
    """Results of a benchmark, the newest last."""
    return sorted(RESULTS.glob(f"{benchmark}-20*.json"))


NOT_MEASURED = "Not measured yet.\n"
"""In place of a table without a result."""


def newest(benchmark: str) -> Any:
    """Content of a benchmark's newest result."""
    return json.loads(files(benchmark)[-1].read_text())


def _steps() -> str:
    settings: dict[str, Any] = {}
    for path in files("overhead"):
        if not path.name.endswith("-h200.json"):
            settings |= json.loads(path.read_text())["settings"]
    return _rows(settings, (2, 4), "claims", _CLAIMS)


def _rows(settings: dict[str, Any], worlds: Sequence[int], set_: str, pairs: tuple[tuple[str, str, str], ...]) -> str:
    rows = []
    for ranks, model in product(worlds, MODELS):
        setting = settings.get(f"{model}, {ranks} ranks, {set_}")
        if setting is None:
            continue
        title = MODELS[model].title + (f", {ranks} ranks" if ranks != worlds[0] else "")
        turns = [turn for launch in setting["launches"] for turn in launch["seconds"]["torch"]]
        cells = [change(compare(setting, one, other)) for one, other, _ in pairs]
        rows.append([title, f"{1e3 * sum(turns) / len(turns):.1f}", *cells])
    return rows_of(["model", "torch, ms a step", *(title for _, _, title in pairs)], rows)


_CLAIMS = (
    ("again", "torch", "torch once more (the noise), %"),
    ("on", "torch", "ours with telemetry over torch, %"),
    ("on", "views", "over torch with `gradient_as_bucket_view`, %"),
    ("on", "off", "over ours without telemetry, %"),
)
_UNUSED = (
    ("again", "torch", "torch once more (the noise), %"),
    ("torch_finds", "torch", "torch with the flag, %"),
    ("finds", "off", "ours with the flag, %"),
)


def _gpu() -> str:
    path = sorted(RESULTS.glob("overhead-20*-h200.json"))[-1]
    return _rows(json.loads(path.read_text())["settings"], (1,), "claims", _CLAIMS)


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
        rows.append([title, f"{1e3 * sum(off) / len(off):.1f}", *cells])
    head = ["", "off, ms a step", "off once more (the noise), %", "telemetry on: step, %", "processor time, %"]
    return rows_of(head, rows)


def _broken() -> str:
    (launches,) = newest("harm")["models"].values()
    broken = [launch for name, group in launches.items() if name in FAULTS for launch in group]
    rows = [
        [title, change(switched.compare(group, "on")), change(switched.compare(group, "again"))]
        for title, group in (("thirteen broken collectors", broken), ("a healthy collector", launches["collector"]))
    ]
    return rows_of(["", "step with telemetry, %", "without, once more (the noise), %"], rows)


def _endurance() -> str:
    rows = [
        [name, f"{100 * (row['resident_ratio'] - 1):.2f} % of {row['resident_mb']:.0f} MB", *_grown(row)]
        for name, row in newest("endurance").items()
    ]
    return rows_of(["", "growth of memory", "threads", "open files"], rows)


def _grown(row: dict[str, Any]) -> list[str]:
    return [" → ".join(map(str, row[name])) for name in ("threads", "open_files")]


_READS = {
    "reads": {
        "large: diagnostics, first ask": "diagnosis of 10 million spans",
        "large: diagnostics, again": "the same again",
        "wide: diagnostics, first ask": "diagnosis of 1,024 ranks, 82 million spans",
        "wide: a step's spans": "a step's spans of 1,024 ranks",
        "large: a step's trace": "a step's trace of 64 ranks",
        "both: the list of runs": "the list of runs",
    },
    "scrapes": {
        "wide: one rank sent": "`/metrics` with a run of 1,024 ranks",
        "many: every run sent": "`/metrics` with 1,000 runs of 4 ranks",
    },
    "many-runs": {
        "the first page of the list": "the list of 5,000 runs, first page",
        "the whole list": "the whole list of 5,000 runs",
        "a scrape without news": "`/metrics` with 5,000 runs",
    },
    "whole-run": {
        "diagnostics": "diagnosis of a million steps by 1,024 ranks",
        "points of all ranks together": "their step times in 1,000 points",
    },
    "run-page": {
        "until the findings": "their page in Chromium, until the findings",
        "until all figures": "the same, until all figures",
    },
}
"""The reads in the table, with their titles, by benchmark."""


def _reads() -> str:
    rows = []
    for benchmark, titles in _READS.items():
        found = newest(benchmark)
        medians = found.get("median_ms") or {name: _milliseconds(found, name) for name in titles}
        rows += [[title, f"{medians[name]:,.0f}"] for name, title in titles.items()]
    return rows_of(["", "median, ms"], rows)


def _milliseconds(found: dict[str, Any], name: str) -> float:
    return float(found[name]["median_ms"] if name in found else found[f"{name}, ms"])


_PEAKS = {
    "wide": "1,024 ranks, 2,000 steps",
    "buckets": "1,024 ranks with 1,000 buckets",
    "many": "16,384 ranks",
    "long": "16 ranks, 50,000 steps",
}
"""The runs in the table of peaks, with their titles."""


def _peaks() -> str:
    rows = []
    for run, reads in newest("read-peaks").items():
        growth_mb = {path: row["growth_mb"] for path, row in reads.items() if row["status"] == 200}
        path = max(growth_mb, key=growth_mb.__getitem__)
        rows.append([_PEAKS[run], f"`{path.partition('?with=')[0]}`", f"{growth_mb[path]:,.0f}"])
    return rows_of(["run", "the read that takes most", "MB"], rows)


def _auto_caps() -> str:
    rows = []
    for rate, measured in newest("auto-cap").items():
        seconds, tried = measured["seconds"], measured["tried"]
        best = min((name for name in seconds if name != auto_cap.AUTO), key=lambda name: sum(seconds[name]))
        gains = [change(ratio([seconds[auto_cap.AUTO]], [seconds[name]])) for name in (auto_cap.DEFAULT, best)]
        lost = tried["took_s"] / tried["default_s"] - tried["steps"]
        rows.append([rate, gains[0], best, gains[1], str(tried["steps"]), f"{lost:.0f}"])
    head = ["link", "over the default, %", "best cap of the sweep, MB", "over it, %", "steps of the search", "its cost"]
    return rows_of(head, rows)


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


def _strategies() -> str:
    speed, learned = newest("communication"), newest("accuracy")["found"]
    plain = [speed["seconds"][_PLAIN]]
    rows = []
    for name in dict.fromkeys([*speed["seconds"], *learned]):
        if name == _PLAIN or name.startswith("torch"):
            continue
        cells = [re.sub("^cap (.+)", r"`bucket_cap_mb`: \1", name), "", "", "", ""]
        if name in speed["seconds"]:
            cells[1:3] = [change(ratio([speed["seconds"][name]], plain)), f"{100 * speed['busiest_link'][name]:.0f} %"]
        if name in learned:
            pairs = list(zip(learned[name], learned[_PLAIN], strict=True))
            cells[3] = _range([100 * (one[0] / plain[0] - 1) for one, plain in pairs])
            cells[4] = _range([100 * (one[1] - plain[1]) for one, plain in pairs])
        rows.append(cells)
    head = [
        "variant",
        "step, %",
        "bytes on the busiest link, of the gradients",
        "steps to the loss, % more",
        "digits read, points more",
    ]
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


def _soak() -> str:
    columns = [_soak_column(newest(name)) for name in ("soak", "apart")]
    rows = [[row, *(column[row] for column in columns)] for row in columns[0]]
    return rows_of(["", "one collector, an hour", "batches apart, 12 minutes"], rows)


def _soak_column(found: dict[str, Any]) -> dict[str, str]:
    more = "% more latency of a neighbour"
    kinds = {
        "beside": "beside that load, than alone",
        "beside over elsewhere": "beside it, than beside it on another collector",
        "alone once more": "alone once more (the noise)",
    }
    return {
        "acknowledged spans": f"{found['acknowledged_spans']:,}",
        "lost, stored twice": f"{found['lost_spans']}, {found['doubled_spans']}",
        "faults": f"{sum(found['faults'].values())}",
        "peak of the memory, MB": f"{found['peak_mb']:.0f}",
        "most memory in each half, MB": f"{found['first_half_mb']:.0f}, {found['second_half_mb']:.0f}",
        "internal errors": f"{sum(found['strange'].values())}",
        "median latency of a batch, 99th percentile, ms": f"{found['p50_ms']:.0f}, {found['p99_ms']:.0f}",
        **{f"{more}: {text}": change(Ratio(**found["neighbour"][kind])) for kind, text in kinds.items()},
    }


def _paper(experiment: str, table: Callable[[dict[str, Any]], str]) -> str:
    return table(newest(f"paper/{experiment}")) if files(f"paper/{experiment}") else NOT_MEASURED


def _claims() -> str:
    measured = {name: newest(f"paper/{name}") for name in EXPERIMENTS if files(f"paper/{name}")}
    rows = {name: claims(results) for name, results in measured.items()}
    rows["convergence"] = losses.claims(newest("paper/convergence")["found"])
    # The page has the claims, and says which are unchecked.
    cells = [
        [row[0].partition(":")[0].removesuffix(" (unchecked)"), name, *row[1:]]
        for name, each in rows.items()
        for row in each
    ]
    return _without_sizes(rows_of([CLAIMS_HEAD[0], "NAME", *CLAIMS_HEAD[1:]], cells))


def _without_sizes(table: str) -> str:
    """Return a table with the models' names alone; other tables of the page have their sizes."""
    return re.sub(r"\b(ResNet-50|BERT-base|transformer), [\d.]+ M", r"\1", table)


TABLES: dict[str, Callable[[], str]] = {
    "step": _steps,
    "unused": lambda: _rows(newest("overhead-unused")["settings"], (2,), "unused", _UNUSED),
    "gpu": _gpu,
    "telemetry": _telemetry,
    "broken": _broken,
    "endurance": _endurance,
    "hangs": lambda: hangs.table(newest("hangs")["ranks"]["2"]) + "\n",
    "crashes": lambda: crashes.table([crashes.Crash(**row) for row in newest("crashes")]) + "\n",
    "causes": lambda: causes.table(newest("causes")),
    "compare": _compare,
    "ingest": _figures("ingest", _INGEST),
    "ingest-parts": lambda: ingest_parts.table(newest("ingest-parts")),
    "job": _figures("job", _JOB),
    "reads": _reads,
    "peaks": _peaks,
    "auto-caps": _auto_caps,
    "unit-advice": lambda: unit_advice.report(newest("unit-advice")) + "\n",
    "whatif": lambda: whatif.errors(newest("whatif")) + "\n",
    "soak": _soak,
    "strategies": _strategies,
    "diagnosis-sums": lambda: _diagnosis(1),
    "diagnosis-alarms": lambda: _diagnosis(2),
    "paper-claims": _claims,
    "paper-predictions": lambda: _without_sizes(_paper("scaling", scaling.predictions)),
    "paper-half-bytes": lambda: _without_sizes(_paper("compression", half_bytes.table)),
    "paper-operations": partial(_paper, "operations", operations.table),
    "paper-readiness": partial(_paper, "readiness", readiness.table),
    "paper-servers": partial(_paper, "servers", communication.traffic),
    "paper-order": lambda: order.table(newest("paper/order")["found"]),
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
