"""`ddpobs whatif`: what a change of a run would give, predicted from the run's own steps."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ddpobs.cli.app import (
    LOOK,
    WRONG_USE,
    CollectorOption,
    JsonOption,
    RunArgument,
    ask,
    chosen_run,
    coloured,
    fail,
    main,
    settings,
)
from ddpobs.client.client import whatif_query
from ddpobs.shared.quantities import duration
from ddpobs.wire import printable

_MAX_CHANGE = 60
_MIN_LOST = 0.03
"""Share of the ranks' time, lost to slow ranks, from which on a line states it."""


@main.command(rich_help_panel=LOOK, short_help="Predict what a change would give.")
def whatif(
    run: RunArgument = None,
    *,
    cap: Annotated[
        str | None,
        typer.Option(help="bucket_cap_mb, separated by commas; 1:5:25 is one list of caps. By default the best."),
    ] = None,
    first_cap: Annotated[float | None, typer.Option(help="Limit of the first bucket in MB, before the caps.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Strategies, separated by commas, such as fp16.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches a step; all but one under no_sync.")] = None,
    groups: Annotated[int | None, typer.Option(help="Process groups that take buckets in turn.")] = None,
    world_size: Annotated[int | None, typer.Option(help="Number of ranks.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Link in Gbit/s, or as a multiple of the present one, such as 2x.")
    ] = None,
    repair: Annotated[int | None, typer.Option(help="Rank that works like the others.")] = None,
    halve: Annotated[str | None, typer.Option(help="Only this phase of --repair, and half as slow.")] = None,
    no_find_unused: Annotated[bool, typer.Option("--no-find-unused", help="Without find_unused_parameters.")] = False,
    as_json: JsonOption = False,
    collector: CollectorOption = None,
) -> None:
    """Predict the time of a step after a change, with an interval. All given changes hold together.

    Without a change it seeks the best bucket cap. What the run's steps do not show is refused with the reason.
    """
    config = settings(collector)
    chosen = chosen_run(config, run)
    given: dict[str, Any] = {
        "bucket_cap_mb": cap,
        "first_bucket_mb": first_cap,
        "compression": strategy,
        "accumulate": accumulate,
        "groups": groups,
        "world_size": world_size,
        "repair": repair,
        "halve": halve,
        "find_unused": False if no_find_unused else None,
        **_link(link),
    }
    query = whatif_query(**given) or {"bucket_cap_mb": "best"}
    reply = ask(config, f"/runs/{chosen}/whatif", query)
    if as_json:
        typer.echo(json.dumps(reply.document, indent=2))
        return
    _print(chosen, reply.document)


def _link(text: str | None) -> dict[str, float]:
    """Return the parameter for a link: `10` in Gbit/s, `2x` as a multiple."""
    if text is None:
        return {}
    try:
        value = float(text.removesuffix("x"))
    except ValueError:
        fail(f"--link: expected Gbit/s such as 10, or a multiple such as 2x, got {text!r}", WRONG_USE)
    return {"link_factor" if text.endswith("x") else "link_gbps": value}


def _print(run: str, response: dict[str, Any]) -> None:
    for reason in response["missing"]:
        typer.echo(coloured(printable(f"not known, because {reason}"), "warning"))
    if response["now"] is not None:
        typer.echo(printable(f"{run}: {_time(response['now'])} now"))
    slow = response["slow_ranks"]
    if slow is not None and slow["lost_ratio"] >= _MIN_LOST:
        typer.echo(f"slow ranks cost {100 * slow['lost_ratio']:.1f} % of the ranks' time (S = {slow['slowdown']:.3f})")
    titles = [answer["change"][:_MAX_CHANGE] for answer in response["answers"]]
    width = max(map(len, titles), default=0)
    for title, answer in zip(titles, response["answers"], strict=True):
        typer.echo(printable(f"  {title:{width}}  {_words(answer)}"))


def _words(answer: dict[str, Any]) -> str:
    prediction = answer["prediction"]
    if prediction is None:
        return f"not known, because {answer['refused']}"
    return f"{_time(prediction):>15}  {prediction['words']}"


def _time(step: dict[str, Any]) -> str:
    return f"{duration(step['step_ns'])} {'a step' if step['batches'] == 1 else 'a batch'}"
