"""`ddpobs report`: the collector's findings on a run, with their remedies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ddpobs.cli.app import (
    BAD_STATE,
    FAILED,
    LOOK,
    CollectorOption,
    JsonOption,
    RunArgument,
    ask,
    chosen_run,
    echo,
    fail,
    hanging,
    main,
    settings,
    wrapped,
)
from ddpobs.client.reader import page_address, read, read_file
from ddpobs.config import TelemetryConfig
from ddpobs.errors import CollectorError
from ddpobs.shared.quantities import counted, time_of_day, time_range
from ddpobs.shared.words import LABEL_COLUMNS, finding_heading, finding_lines, labelled, percent, shown_findings
from ddpobs.wire import printable
from ddpobs.wire.endings import IMPORTED

_MIN_SHARE, _MAX_PARTS = 0.01, 8
_TEXTS = {"traceback": ("stack", 20), "output": ("output", 10)}
"""Texts of the evidence that are printed as they are: label, and maximum number of last lines."""
_OF_THE_END = {"crash", "hang", "lost"}
"""Findings that have the reason of the end."""
_MAX_NAMES = 8
"""Stages or ranks in a line."""


class Severity(StrEnum):
    """Severity of a finding, the least first."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@main.command(rich_help_panel=LOOK, short_help="Print the findings on a run, with their remedies.")
def report(
    run_id: RunArgument = None,
    collector: CollectorOption = None,
    as_json: JsonOption = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Save the report as one HTML file instead.")
    ] = None,
    fail_on: Annotated[
        Severity | None, typer.Option("--fail-on", help="Exit with 3 if a finding is as severe as this, or more.")
    ] = None,
) -> None:
    """Print the collector's findings on a run, with their remedies."""
    config = settings(collector)
    run = chosen_run(config, run_id)
    diagnosis = ask(config, f"/runs/{run}/diagnostics").document
    if html is not None:
        _save_html(config, run, html)
    else:
        account = ask(config, f"/runs/{run}/account").document
        pipeline = _pipeline(config, run)
        if as_json:
            with_pipeline = {} if pipeline is None else {"pipeline": pipeline}
            typer.echo(json.dumps(diagnosis | {"account": account} | with_pipeline, indent=2))
        else:
            _print(diagnosis, account, pipeline, _end(config, run, diagnosis["findings"]))
            typer.echo(f"\n{page_address(config.collector, run)}")
    if fail_on is not None:
        severities = list(Severity)[list(Severity).index(fail_on) :]
        if any(finding["severity"] in severities for finding in diagnosis["findings"]):
            raise typer.Exit(BAD_STATE)


def _save_html(config: TelemetryConfig, run: str, file: Path) -> None:
    try:
        body = read_file(config, f"/runs/{run}/report.html")
    except CollectorError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            fail(f"{config.collector} makes no HTML reports: its version is older than this command's", FAILED)
        fail(str(error), FAILED)
    try:
        file.write_bytes(body)
    except OSError as error:
        fail(f"{file}: {error.strerror}", FAILED)


def _end(config: TelemetryConfig, run: str, findings: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return how and when the latest attempt ended, and its outcome; empty while it runs.

    The reason is left out if a finding has it.
    """
    try:
        latest = read(config, f"/runs/{run}/attempts").document["attempts"][-1]
    except CollectorError:
        return "", ""
    if latest["ended_ns"] is None:
        return "", ""
    outcome = latest["outcome"]
    if _is_imported(config, run):
        return f"imported; the files end at {time_of_day(latest['ended_ns'])}", outcome
    reason = latest.get("reason", "")
    if reason and latest["first_rank"] is not None:
        reason = f"rank {latest['first_rank']}: {reason}"
    is_said = any(finding["code"] in _OF_THE_END for finding in findings)
    how = reason if outcome == "interrupted" else f"{outcome}: {reason}" if reason and not is_said else outcome
    return f"{how}; ran {time_range(latest['began_ns'], latest['ended_ns'], is_dated=True)}", outcome


def _is_imported(config: TelemetryConfig, run: str) -> bool:
    try:
        hello = read(config, f"/runs/{run}").document["hello"] or {}
    except CollectorError:
        return False
    return IMPORTED in hello.get("settings", {})


def _pipeline(config: TelemetryConfig, run: str) -> dict[str, Any] | None:
    """Return the run's pipeline; None without one, or from an older collector."""
    try:
        return cast(dict[str, Any] | None, read(config, f"/runs/{run}/pipeline").document.get("pipeline"))
    except CollectorError:
        return None


def _print(
    diagnosis: dict[str, Any], account: dict[str, Any], pipeline: dict[str, Any] | None, end: tuple[str, str]
) -> None:
    findings = shown_findings(diagnosis)
    summary = diagnosis["summary"]
    if findings:
        summary = f"{counted(len(findings), 'finding')} in {counted(diagnosis['steps_seen'], 'step')}"
    echo(f"run {diagnosis['run']}: {summary}")
    if end[0]:
        echo(*end)
    for finding in findings:
        typer.echo()
        echo(finding_heading(finding), finding["severity"])
        for label, text in finding_lines(finding):
            _print_part(label, text)
        for name, (label, most) in _TEXTS.items():
            for row, line in enumerate((finding["evidence"].get(name) or "").splitlines()[-most:]):
                typer.echo(f"  {labelled('' if row else label, printable(line))}")
        for attempt in finding["evidence"].get("attempts", [])[:-1]:  # The last one is the finding.
            _print_part("earlier", attempt)
    typer.echo()
    for line in [*_account_lines(account), *_pipeline_lines(pipeline)]:
        typer.echo(line)
    if diagnosis["missing"]:
        typer.echo()
    for line in _not_judged(diagnosis["missing"]):
        echo(line)


def _print_part(label: str, text: str) -> None:
    for row, line in enumerate(wrapped(text, LABEL_COLUMNS + 2)):
        typer.echo(f"  {labelled('' if row else label, line)}")


def _not_judged(missing: Sequence[str]) -> list[str]:
    """A line for each reason, with the codes of the findings that it holds for."""
    codes: dict[str, list[str]] = {}
    for each in missing:
        code, _, reason = each.partition(": ")
        codes.setdefault(reason, []).append(code)
    return [f"not judged: {', '.join(names)}: {reason}" for reason, names in codes.items()]


def _account_lines(account: dict[str, Any]) -> list[str]:
    """Return the run's wall time and goodput, and its largest parts with their share of the run."""
    if account["wall_ns"] is None:
        return ["wall time: not known, because no rank has sent an account"]
    lines = wrapped(account["summary"])
    if account["lost_cost"] is not None:
        lines.append(f"at the set price the loss is {account['lost_cost']:.2f}")
    parts = sorted(account["parts"], key=lambda part: -part["share"])
    shown = [part for part in parts if part["share"] >= _MIN_SHARE][:_MAX_PARTS]
    lines += [f"  {percent(part['share']):>5}  {part['title']}" for part in shown]
    return lines


def _pipeline_lines(pipeline: dict[str, Any] | None) -> list[str]:
    """Return the schedule, and each stage's computation, bubble and overlap of the all-reduce."""
    if pipeline is None:
        return []
    expected = pipeline["expected_bubble"]
    formula = "" if expected is None else f"; with equal stages the bubble is {percent(expected, 1)}"
    lines = [f"pipeline: {pipeline['schedule']}, {pipeline['micro_batches']} micro-batches a step{formula}"]
    for stage in pipeline["by_rank"]:
        line = f"  stage {_list(stage['stages'])} (rank {_list(stage['ranks'])}): "
        line += f"{stage['computing_ns'] / 1e6:.1f} ms of {stage['schedule_ns'] / 1e6:.1f} ms computing, "
        line += f"bubble {percent(stage['bubble'], 1)}"
        if stage["reduce_overlap"] is not None:
            line += f", {percent(stage['reduce_overlap'])} of the all-reduce overlapped"
        lines += hanging(line, "    ")
    return lines


def _list(values: Sequence[object]) -> str:
    more = f" and {len(values) - _MAX_NAMES} more" if len(values) > _MAX_NAMES else ""
    return ", ".join(map(str, values[:_MAX_NAMES])) + more
