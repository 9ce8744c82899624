"""The `ddpobs` command: run a training with telemetry, send a spool, and read what the collector found."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpcore
import httpx
import typer

from ddpobs.config import TelemetryConfig, from_environment
from ddpobs.errors import ConfigError
from ddpobs.export.http_sender import Answer, Outcome, Sender, pause_s
from ddpobs.export.spool import Spool, Spooled

main = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

_TRIES = 3
_SHOWN = 8
"""Of ranks, buckets or parameters, in a line."""
CollectorOption = Annotated[
    str | None, typer.Option("--collector", help="Address; else DDPOBS_TELEMETRY, else http://127.0.0.1:8321.")
]


@main.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="The training, after `--`.")],
    collector: CollectorOption = None,
    run_id: Annotated[str | None, typer.Option("--run", help="Run id; else DDPOBS_RUN or the launcher's.")] = None,
) -> None:
    """Run a command, its child processes included, with telemetry on."""
    config = _config(collector)
    environ = dict(os.environ, DDPOBS_TELEMETRY=config.collector)
    if run_id is not None:
        environ["DDPOBS_RUN"] = _checked(config, run=run_id).run or ""
    autoload = str(Path(__file__).parent / "autoload")
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (autoload, os.environ.get("PYTHONPATH"))))
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        _fail(f"{command[0]}: {error.strerror}", 127)


@main.command()
def push(folder: Annotated[Path, typer.Argument(metavar="DIR")], collector: CollectorOption = None) -> None:
    """Send the batches of a spool folder: DDPOBS_SPOOL, or ddpobs-spool-UID in the system's temporary folder.

    Refused batches stay on disk; the exit code is 0 only where every batch was taken.
    """
    if not folder.is_dir():
        _fail(f"{folder}: no such folder", 2)
    config = _config(collector)
    sender, counts, detail = Sender(config), Counter[Outcome](), ""
    kept = list(Spool(folder, int(config.spool_mb * 1e6)).batches())
    for batch in kept:
        answer = _send(sender, batch)
        counts[answer.outcome] += 1
        detail = answer.detail or detail
        if answer.outcome in (Outcome.STORED, Outcome.REPEATED):
            batch.path.unlink(missing_ok=True)
        elif answer.outcome is not Outcome.REFUSED:
            break
    sender.close()
    sent, repeated, refused = (counts[o] for o in (Outcome.STORED, Outcome.REPEATED, Outcome.REFUSED))
    left = len(kept) - sent - repeated - refused
    typer.echo(f"sent {sent}, repeated {repeated}, refused {refused}, left {left}")
    if refused or left:
        _fail(detail, 1)


@main.command()
def report(
    run_id: Annotated[str | None, typer.Argument(metavar="RUN", help="Else the newest one.")] = None,
    collector: CollectorOption = None,
) -> None:
    """Say in plain words what the collector finds wrong with a run."""
    config = _config(collector)
    run_id = _newest(config) if run_id is None else _checked(config, run=run_id).run
    answer = _get(config, f"/runs/{run_id}/diagnostics").json()
    count = len(answer["findings"])
    typer.echo(f"run {answer['run']}: {answer['steps_seen']} steps seen, {count} finding{'s' * (count != 1)}")
    for finding in answer["findings"]:
        for line in _lines(finding):
            typer.echo(_printable(line))
    if answer["missing"]:
        typer.echo()
    for missing in answer["missing"]:
        typer.echo(_printable(f"not judged: {missing}"))


@main.command()
def trace(
    run_id: Annotated[str, typer.Argument(metavar="RUN")],
    steps: Annotated[str, typer.Option(help="First and last step, as A:B.")],
    output: Annotated[Path, typer.Option("-o", help="File for the Chrome trace.")],
    collector: CollectorOption = None,
) -> None:
    """Save the steps' Chrome trace, for Perfetto or chrome://tracing."""
    first, colon, last = steps.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        _fail(f"--steps: expected A:B with A up to B, got {steps!r}", 2)
    answer = _get(_checked(_config(collector), run=run_id), f"/runs/{run_id}/trace", {"from": first, "to": last})
    if not answer.json()["traceEvents"]:
        _fail(f"run {run_id} has none of the steps {first} to {last}", 1)
    try:
        output.write_bytes(answer.content)
    except OSError as error:
        _fail(f"{output}: {error.strerror}", 1)


def _newest(config: TelemetryConfig) -> str:
    runs = _get(config, "/runs", {"limit": "1"}).json()["runs"]
    if not runs:
        _fail(f"no run has reported to {config.collector} yet", 1)
    newest: str = runs[0]["run"]
    return newest


def _lines(finding: dict[str, Any]) -> list[str]:
    first, last = finding["steps"]
    where = [f"steps {first} to {last}"]
    where += [f"{what} {_some(finding[f'{what}s'])}" for what in ("rank", "bucket") if finding[f"{what}s"]]
    lines = ["", f"{finding['severity']}: {finding['title']}", f"  where: {', '.join(where)}"]
    if finding["parameters"]:
        lines.append(f"  parameters: {_some(finding['parameters'])}")
    lines.append(f"  do: {finding['remedy']}")
    if gain := finding["gain"]:
        error = gain["ratio"] * gain["error_ratio"]
        lines.append(f"  gain: {gain['step_ns'] / 1e6:.1f} ms a step, {gain['ratio']:.0%} of it (± {error:.1%})")
    return lines


def _some(values: Sequence[object]) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(map(str, values[:_SHOWN])) + more


def _printable(line: str) -> str:
    """A terminal shows it and obeys nothing in it: names are whatever somebody called a parameter."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in line)


def _send(sender: Sender, batch: Spooled) -> Answer:
    answer = Answer(Outcome.RETRY)
    for tries in range(_TRIES):
        try:
            body = batch.body()
        except FileNotFoundError:  # Another push, or the training itself, sent it meanwhile.
            return Answer(Outcome.REPEATED)
        except OSError as error:
            return Answer(Outcome.REFUSED, f"{batch.path}: {error.strerror}")
        answer = sender.send(batch.run, batch.source, batch.seq, body)
        if answer.outcome is not Outcome.RETRY:
            break
        if tries + 1 < _TRIES:
            time.sleep(pause_s(tries, answer.retry_after_s, random.Random()))
    return answer


def _get(config: TelemetryConfig, path: str, query: dict[str, str] | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {config.token}"} if config.token else {}
    url = f"{config.collector.rstrip('/')}/api/v1{path}"
    try:
        # This machine's certificates and SSL_CERT_FILE's, as for batches, and nobody's proxies.
        trusted = httpcore.default_ssl_context()
        answer = httpx.get(
            url, params=query, headers=headers, timeout=config.timeout_s, trust_env=False, verify=trusted
        )
        answer.raise_for_status()
        answer.json()
    except httpx.HTTPStatusError as error:
        _fail(f"{url}: HTTP {error.response.status_code}: {_problem(error.response)}", 1)
    except httpx.HTTPError as error:
        _fail(f"{url}: {error}: is this the collector? --collector or DDPOBS_TELEMETRY names it", 1)
    except ValueError:
        _fail(f"{url}: no answer of a collector's: {_printable(answer.text[:300])}", 1)
    return answer


def _problem(answer: httpx.Response) -> str:
    """What the collector says in its problem document; a proxy's own answer is none."""
    try:
        problem = answer.json()
        said = f"{problem['title']}: {problem['detail']}"
    except (ValueError, KeyError, TypeError):
        said = answer.text[:300]
    return _printable(said) + (": set DDPOBS_TOKEN" if answer.status_code == HTTPStatus.UNAUTHORIZED else "")


def _config(collector: str | None) -> TelemetryConfig:
    flag = os.environ.get("DDPOBS_TELEMETRY", "")
    try:
        config = from_environment({**os.environ, "DDPOBS_TELEMETRY": flag})
    except ConfigError as error:
        _fail(str(error), 2)
    return config if collector is None else _checked(config, collector=collector)


def _checked(config: TelemetryConfig, **changes: Any) -> TelemetryConfig:
    try:
        return replace(config, **changes)
    except ConfigError as error:
        _fail(str(error), 2)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"ddpobs: {message}", err=True)
    raise typer.Exit(code)
