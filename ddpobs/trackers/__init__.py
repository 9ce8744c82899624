"""The verdict on a run in an experiment tracker, with one call for each.

    ddpobs.trackers.tensorboard(ddpobs.current_run(), writer)

Each function takes a `ddpobs.client.client.Run`, reads the collector's findings and account, and raises
`CollectorError` if the collector does not answer. Call it on one rank. None for the run, as without telemetry, is
ignored. The trackers' packages are imported on use.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

from ddpobs.client.client import Run
from ddpobs.shared.words import finding_lines
from ddpobs.trackers.host_counters import host_counters
from ddpobs.trackers.otel import opentelemetry
from ddpobs.trackers.otlp import otlp

__all__ = ["mlflow", "opentelemetry", "otlp", "summary", "tensorboard", "wandb"]

_SEVERITIES = ("critical", "warning", "info")


def summary(run: Run) -> tuple[dict[str, float], str]:
    """Return the run's numbers by name, and its findings as Markdown.

    The numbers are goodput, lost hours and the parts of the wall time as shares, counts of findings by severity, the
    largest gain of a finding as a share of a step, and counters of up to 64 hosts. Those that are not known are left
    out.
    """
    findings, account = run.findings(), run.account()
    counts = Counter(str(finding["severity"]) for finding in findings)
    gains = [finding["gain"]["ratio"] for finding in findings if finding["gain"]]
    numbers: dict[str, float | None] = {
        "goodput": account["goodput"],
        "lost_hours": account["lost_hours"],
        "gain_ratio": max(gains, default=None),
        **{f"findings/{severity}": counts[severity] for severity in _SEVERITIES},
        **{f"share/{part['part']}": part["share"] for part in account["parts"]},
        **host_counters(run.ranks()),
    }
    lines = [line for finding in findings for line in _as_markdown(finding)] or ["no findings"]
    text = "\n".join([f"[{run.name}]({run.address})", "", *lines])
    return {f"ddpobs/{name}": float(value) for name, value in numbers.items() if value is not None}, text


def _as_markdown(finding: dict[str, Any]) -> list[str]:
    """The verdict as an item of a list, with its parts as items below; TensorBoard demands four spaces."""
    parts = [f"    - {label}: {text}" for label, text in finding_lines(finding)]
    return [f"- **{finding['severity']}**: {finding['verdict']}", *parts]


def tensorboard(run: Run | None, writer: Any, step: int | None = None) -> None:
    """Add scalars and a text to a `torch.utils.tensorboard.SummaryWriter`."""
    if run is not None:
        numbers, text = summary(run)
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.add_text("ddpobs/findings", text, step)


def wandb(run: Run | None, target: Any = None) -> None:
    """Add the numbers, and the run's address, to the summary of a W&B run; None for the active one."""
    if run is not None:
        target = import_module("wandb").run if target is None else target
        numbers, text = summary(run)
        target.summary.update({**numbers, "ddpobs/url": run.address, "ddpobs/findings_text": text})


def mlflow(run: Run | None) -> None:
    """Log metrics, the findings as the artifact `ddpobs.md` and the tag `ddpobs.url` in the active MLflow run."""
    if run is not None:
        tracker = import_module("mlflow")
        numbers, text = summary(run)
        tracker.log_metrics(numbers)
        tracker.log_text(text, "ddpobs.md")
        tracker.set_tag("ddpobs.url", run.address)
