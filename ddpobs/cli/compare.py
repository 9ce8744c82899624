"""`ddpobs compare`: two runs side by side, with an exit code for continuous integration."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ddpobs.cli.app import BAD_STATE, WRONG_USE, CollectorOption, ask, chosen_run, complete_run, fail, main, settings
from ddpobs.shared.words import finding_heading
from ddpobs.wire import printable

_UNDECIDED = 4
"""Exit code if a limit is neither kept nor exceeded with confidence."""
_KINDS = {"compute": " (compute)", "comm": " (communication)"}


@main.command()
def compare(
    run_a: Annotated[str, typer.Argument(metavar="A", help="Run to compare with.", autocompletion=complete_run)],
    run_b: Annotated[
        str, typer.Argument(metavar="B", help="Run that may be slower or faster.", autocompletion=complete_run)
    ],
    fail_over: Annotated[
        str | None, typer.Option(help="Exit with 3 if B is slower than A by more than this, such as 3%.")
    ] = None,
    collector: CollectorOption = None,
) -> None:
    """Compare step time, phases, buckets, settings and findings of two runs.

    With --fail-over the exit code is 3 if B is slower by more, with 95 % confidence, and 4 if that cannot be decided:
    too few steps, too much noise, or other programs on the hosts.
    """
    config, limit = settings(collector), _share("--fail-over", fail_over or "3%")
    first, second = chosen_run(config, run_a), chosen_run(config, run_b)
    response = ask(config, f"/runs/{first}/compare", {"with": second, "limit": str(limit)}).document
    for line in _comparison_lines(response):
        typer.echo(printable(line))
    if fail_over is None:
        return
    verdict, code = _limit_verdict(response)
    typer.echo(verdict)
    if code:
        raise typer.Exit(code)


def _share(option: str, text: str) -> float:
    """Return a percentage as a share: 0.03 for `3%` and for `3`."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 10:
        fail(f"{option}: expected a percentage from 0% to 1000%, got {text!r}", WRONG_USE)
    return share


def _comparison_lines(response: dict[str, Any]) -> list[str]:
    a, b = response["a"], response["b"]
    lines = [f"{a['run']} -> {b['run']}: {a['steps']} and {b['steps']} steps"]
    if response["too_few"]:
        lines.append(f"not judged: {response['too_few']}")
    buckets = [change for change in response["changes"] if change["kind"] in _KINDS]
    shown = [change for change in response["changes"] if change["kind"] not in _KINDS]
    shown += [change for change in buckets if change["verdict"] in ("slower", "faster")]
    names = [change["name"] + _KINDS.get(change["kind"], "") for change in shown]
    width = max(map(len, names), default=0)
    lines += [f"  {name:{width}}  {_change_text(change)}" for name, change in zip(names, shown, strict=True)]
    if buckets:
        lines.append(f"  {len(buckets) // 2} buckets compared; those that changed are listed")
    if response["disturbed"]:
        delays = " and ".join(f"{run['run_delay_ns'] / 1e6:.1f}" for run in (a, b))
        lines.append(f"disturbed: ranks had no processor for {delays} ms of a step: other programs may be the cause")
    lines += [f"differs: {row['name']}: {row['a']} -> {row['b']}" for row in response["differences"]]
    for kind in ("came", "went"):
        lines += [f"{kind}: {finding_heading(finding)}" for finding in response["findings"][kind]]
    return lines


def _change_text(change: dict[str, Any]) -> str:
    times = f"{change['a_ns'] / 1e6:9.3f} -> {change['b_ns'] / 1e6:9.3f} ms"
    if change["change_ratio"] is None:
        return times
    ratios = f"{change['change_ratio']:+7.1%} ({change['low_ratio']:+.1%} to {change['high_ratio']:+.1%})"
    if change["verdict"] == "too-few":
        return f"{times}  {change['change_ratio']:+7.1%} not judged"
    seen = f", a change of {change['smallest_ratio']:.1%} would have been seen" if change["verdict"] == "same" else ""
    return f"{times}  {ratios} {change['verdict']}{seen}"


def _limit_verdict(response: dict[str, Any]) -> tuple[str, int]:
    """Return a sentence on the limit, and the exit code."""
    limit, names = f"{100 * response['limit']['ratio']:.3g} %", response["limit"]["exceeded"]
    if not response["limit"]["decided"]:
        return f"limit {limit}: not decided", _UNDECIDED
    if names:
        return f"limit {limit}: exceeded by {', '.join(names)}", BAD_STATE
    return f"limit {limit}: kept", 0
