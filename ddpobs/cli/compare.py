"""`ddpobs compare`: two runs side by side, with an exit code for continuous integration."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ddpobs.cli.app import (
    BAD_STATE,
    LOOK,
    WRONG_USE,
    CollectorOption,
    ask,
    chosen_run,
    complete_run,
    echo,
    fail,
    hanging,
    main,
    settings,
    terminal_columns,
    wrapped,
)
from ddpobs.shared.quantities import duration
from ddpobs.shared.words import fact_text, finding_heading
from ddpobs.wire import printable

_UNDECIDED = 4
"""Exit code if a limit is neither kept nor exceeded with confidence."""
_OF_BUCKET = ("compute", "comm")
_MAX_TITLE = 40
_SEVERITIES = {"slower": "critical", "faster": "finished", "too-few": "warning"}
"""Verdict of the step, and the severity or state whose colour it has."""


@main.command(rich_help_panel=LOOK, short_help="Compare two runs; a limit for CI.")
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
    _print(response)
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


def _print(response: dict[str, Any]) -> None:
    a, b = response["a"], response["b"]
    verdict = response["changes"][0]["verdict"]
    if response["not_the_same_job"]:
        echo(response["not_the_same_job"], "warning")
    echo(response["headline"], _SEVERITIES.get(verdict, ""))
    if response["disturbed"]:
        delays = " and ".join(duration(run["run_delay_ns"]) for run in (a, b))
        echo(f"Other programs may be the cause: ranks had no processor for {delays} of a step", "warning")
    echo(f"{a['steps']} steps of {a['run']} and {b['steps']} of {b['run']}, without long ones")
    typer.echo()
    for line in _table(response["changes"], _compared(response)):
        typer.echo(line)
    sections = {
        "differs": [f"{each['title']}: {_fact(each['a'])} → {_fact(each['b'])}" for each in response["differences"]],
        f"only {b['run']}": [finding_heading(finding) for finding in response["findings"]["came"]],
        f"only {a['run']}": [finding_heading(finding) for finding in response["findings"]["went"]],
    }
    for title, lines in sections.items():
        for row, line in enumerate(lines):
            if row == 0:
                typer.echo()
            echo(f"{title}: {line}")


def _fact(value: object) -> str:
    return "–" if value is None else fact_text(value)  # A run may lack it.


def _compared(response: dict[str, Any]) -> str:
    words: str = response.get("buckets", {}).get("compared", "buckets compared")  # Older collectors send none.
    return words


def _table(changes: list[dict[str, Any]], compared: str) -> list[str]:
    """Return a line for each time that a run has; of buckets, those that changed."""
    buckets = [change for change in changes if change["kind"] in _OF_BUCKET]
    shown = [change for change in changes if change["kind"] not in _OF_BUCKET and (change["a_ns"] or change["b_ns"])]
    shown += [change for change in buckets if change["verdict"] in ("slower", "faster")]
    titles = [_short(change["title"]) for change in shown]
    width = max(map(len, titles), default=0)
    rows = [
        (f"  {title:{width}}  {duration(change['a_ns']):>8} → {duration(change['b_ns']):>8}", change["words"])
        for title, change in zip(titles, shown, strict=True)
    ]
    note = f"  {compared}; those that changed are listed"
    return _fitted([(printable(left), right) for left, right in rows]) + (hanging(note, "    ") if buckets else [])


def _fitted(rows: list[tuple[str, str]]) -> list[str]:
    """Lines of times and words; on a narrow terminal the words are below the times."""
    if all(len(left) + 2 + len(right) <= terminal_columns() for left, right in rows):
        return [f"{left}  {printable(right)}".rstrip() for left, right in rows]
    return [line for left, right in rows for line in (left, *(f"      {each}" for each in wrapped(right, 6) if each))]


def _limit_verdict(response: dict[str, Any]) -> tuple[str, int]:
    """Return a sentence on the limit, and the exit code."""
    limit = response["limit"]
    code = (BAD_STATE if limit["exceeded"] else 0) if limit["decided"] else _UNDECIDED
    return f"limit {100 * limit['ratio']:.3g} %: {limit['words']}", code


def _short(title: str) -> str:
    return title if len(title) <= _MAX_TITLE else f"{title[: _MAX_TITLE - 2]} …"
