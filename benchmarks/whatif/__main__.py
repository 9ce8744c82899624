"""Predict the step time of many settings from one measured setting, then measure them.

    sudo python -m benchmarks.whatif [--models waiting,deep,transformer] [--ranks 2,4] [--links 0.5,1,2] [--steps 60]
        [--json FILE] [--small | --smoke]

Each rank has a network namespace with one thread and a shaped link. Each setting is a training of its own with
telemetry; its measured value is the median step that the collector has. The setting with default buckets predicts the
others on the same link, and itself on the other links; those with other buckets predict each other. The first table has
the errors by kind of change. That of the same training again is the machine's own; a row leaves out the settings where
it is above 5 %. The second has each prediction. `--small` takes about thirteen minutes on an idle machine with two
cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.command import measure_and_print, parser_of
from benchmarks.faults.launch import ranks_of
from benchmarks.links import INTERFACE, Links, address, links
from benchmarks.rig.collector import push, running_collector, spooling

SCRIPT = Path(__file__).with_name("training.py")
ONE_BUCKET = 1000.0
CAPS_MB = (0.25, 1.0, 5.0, 25.0, ONE_BUCKET)
_TIMEOUT_S = 600
_STEADY = 0.05
"""Maximum error of the same training again for the row `STEADY`, as a share of the step."""
OF_OTHERS = "cap, predicted from each other cap"
SAME, STEADY = "none: the same training again", "changes, where the same training again was within 5 %"


@dataclass(frozen=True)
class Setting:
    """A training.

    Attributes:
        model: Name of the model.
        ranks: Number of ranks.
        link_gbps: Speed of the links.
        cap: `bucket_cap_mb`; None for the default: 25 MB, and 1 MB for the first bucket.
        strategy: `comm`.
        batches: Batches a step.
        groups: Process groups.
        turn: 1 for the same training once more.
    """

    model: str
    ranks: int
    link_gbps: float
    cap: float | None = None
    strategy: str = "all_reduce"
    batches: int = 1
    groups: int = 1
    turn: int = 0

    @property
    def name(self) -> str:
        """Name of its run."""
        values = asdict(self).values()
        return "-".join(str(value) for value in values)


def changes(base: Setting) -> Iterator[tuple[str, Setting, dict[str, Any]]]:
    """Yield kind, setting, and query of each change on the same link."""
    for cap in CAPS_MB:
        yield "cap", replace(base, cap=cap), {"bucket_cap_mb": cap}
    yield "strategy", replace(base, strategy="fp16"), {"compression": "fp16"}
    yield "batches", replace(base, batches=3), {"accumulate": 3}
    yield SAME, replace(base, turn=1), {}


def changes_of_caps(base: Setting) -> Iterator[tuple[Setting, Setting, dict[str, Any]]]:
    """Yield setting, setting, and query of each change from one cap to another on the same link."""
    for present, cap in permutations(CAPS_MB, 2):
        yield replace(base, cap=present), replace(base, cap=cap), {"bucket_cap_mb": cap}


def measure(setting: Setting, network: Links, url: str, options: argparse.Namespace) -> None:
    """Train, and send the telemetry to the collector."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        environ = spooling(setting.name, folder) | {
            "DDPOBS_READINESS_EVERY": "8",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        network.set_rate(f"{round(1000 * setting.link_gbps)}mbit")
        arguments = json.dumps(asdict(setting) | {"steps": options.steps})
        with ranks_of(
            SCRIPT,
            arguments,
            ranks=setting.ranks,
            folder=folder,
            environ=environ,
            namespaces=network.namespaces,
            master=address(0),
        ) as ranks:
            if any(process.wait(_TIMEOUT_S) for process in ranks.processes):
                raise RuntimeError(f"{setting.name} failed:\n{ranks.logs()}")
        push(folder / "spool", url)


def asked(url: str, run: str, query: dict[str, Any]) -> dict[str, Any]:
    """Return the collector's answers about a run."""
    reply = httpx.get(f"{url}/api/v1/runs/{run}/whatif", params=query, timeout=60).raise_for_status()
    document: dict[str, Any] = reply.json()
    return document


def compared(url: str, base: Setting, target: Setting, kind: str, query: dict[str, Any]) -> dict[str, Any]:
    """Return one prediction from `base` beside the measured value of `target`."""
    answer, measured = asked(url, base.name, query)["answers"], asked(url, target.name, {})
    row: dict[str, Any] = {"kind": kind, "base": base.name, "target": target.name, "query": query}
    row |= {"measured_ns": measured["now"]["step_ns"] if measured["now"] else None, "refused": ""}
    if not answer or answer[0]["prediction"] is None:
        return row | {"refused": answer[0]["refused"] if answer else "no model"}
    return row | {name: answer[0]["prediction"][name] for name in ("step_ns", "low_ns", "high_ns")}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all settings, and predict each from its base."""
    rows, advice = [], []
    with tempfile.TemporaryDirectory() as text, running_collector(Path(text)) as url:
        for ranks in options.ranks:
            with links(ranks, "1gbit") as network:
                for model in options.models:
                    bases = [Setting(model, ranks, gbps) for gbps in options.links]
                    for base in bases:
                        for setting in (base, *(target for _, target, _ in changes(base))):
                            measure(setting, network, url, options)
                            print(
                                f"{setting.name}: {asked(url, setting.name, {})['now']}"[:120],
                                file=sys.stderr,
                                flush=True,
                            )
                    rows += [
                        compared(url, base, target, kind, query)
                        for base in bases
                        for kind, target, query in changes(base)
                    ]
                    rows += [
                        compared(url, present, target, OF_OTHERS, query)
                        for base in bases
                        for present, target, query in changes_of_caps(base)
                    ]
                    rows += [
                        compared(url, base, other, "link", {"link_factor": other.link_gbps / base.link_gbps})
                        for base in bases
                        for other in bases
                        if other != base
                    ]
                    advice += [advised(url, base) for base in bases]
    return {"rows": rows, "advice": advice}


def advised(url: str, base: Setting) -> dict[str, Any]:
    """Return the measured step of the cap that is predicted to be best, over that of the cap that is best."""
    measured = {cap: asked(url, replace(base, cap=cap).name, {})["now"]["step_ns"] for cap in CAPS_MB}
    caps = ",".join(f"{cap:g}" for cap in CAPS_MB)
    answers = asked(url, base.name, {"bucket_cap_mb": caps})["answers"]
    predicted = {
        cap: each["prediction"]["step_ns"] for cap, each in zip(CAPS_MB, answers, strict=True) if each["prediction"]
    }
    if not predicted:
        return {"base": base.name, "cap": None, "ratio": None}
    cap = min(predicted, key=lambda one: predicted[one])
    return {"base": base.name, "cap": cap, "ratio": measured[cap] / min(measured.values())}


def errors(results: dict[str, Any]) -> str:
    """Return a table with the errors by kind of change."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    drifting = {row["base"] for row in results["rows"] if row["kind"] == SAME and not _is_steady(row)}
    for row in results["rows"]:
        by_kind["all"].append(row)
        if row["kind"] not in (SAME, OF_OTHERS) and not drifting & {row["base"], row["target"]}:
            by_kind[STEADY].append(row)
        by_kind[row["kind"]].append(row)
    lines = [
        "| change | predictions | refused | median error | 90th percentile | inside the interval | median interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, rows in by_kind.items():
        known = [row for row in rows if not row["refused"] and row["measured_ns"]]
        if not known:
            lines.append(f"| {kind} | 0 | {len(rows)} | – | – | – | – |")
            continue
        errors = [abs(row["step_ns"] / row["measured_ns"] - 1) for row in known]
        inside = sum(row["low_ns"] <= row["measured_ns"] <= row["high_ns"] for row in known)
        width = float(np.median([(row["high_ns"] - row["low_ns"]) / 2 / row["step_ns"] for row in known]))
        lines.append(
            f"| {kind} | {len(known)} | {len(rows) - len(known)} | {np.median(errors):.1%} | "
            f"{np.quantile(errors, 0.9):.1%} | {inside / len(known):.0%} | ± {width:.1%} |"
        )
    return "\n".join(lines)


def _is_steady(row: dict[str, Any]) -> bool:
    """Whether the same training took as long again: if not, the machine changed, and no model can know."""
    return bool(row["measured_ns"]) and not row["refused"] and abs(row["step_ns"] / row["measured_ns"] - 1) <= _STEADY


def report(results: dict[str, Any]) -> str:
    """Return the tables."""
    lines = [errors(results), "", "| base | advised cap | its step over the best measured |", "|---|---|---|"]
    lines += [
        f"| {row['base']} | {row['cap']} | {row['ratio'] and round(row['ratio'], 3)} |" for row in results["advice"]
    ]
    lines += ["", "| base | change | predicted | interval | measured | error |", "|---|---|---|---|---|---|"]
    for row in results["rows"]:
        if row["refused"] or not row["measured_ns"]:
            lines.append(f"| {row['base']} | {row['query']} | {row['refused']} | | | |")
            continue
        low, high, step, measured = (row[name] / 1e6 for name in ("low_ns", "high_ns", "step_ns", "measured_ns"))
        lines.append(
            f"| {row['base']} | {row['query']} | {step:.1f} ms | {low:.1f} to {high:.1f} | {measured:.1f} ms | "
            f"{step / measured - 1:+.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", default="waiting,deep,transformer")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--links", default="0.5,1,2", help="Gbit/s")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--small", action="store_true", help="two models on two ranks, 40 steps")
    options = parser.parse_args()
    if options.small:
        options.models, options.ranks, options.steps = "waiting,transformer", "2", 40
    if options.smoke:
        options.models, options.ranks, options.links, options.steps = "waiting", "2", "1", 30
    options.models = options.models.split(",")
    options.ranks, options.links = list(map(int, options.ranks.split(","))), list(map(float, options.links.split(",")))
    measure_and_print("benchmarks.whatif", options, run, report)


if __name__ == "__main__":
    main()
