"""The `ddpobs` command: run a training with telemetry, send a spool, and read the collector's findings."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn
from urllib.parse import urlencode

import httpcore
import typer

from ddpobs.config import TelemetryConfig, from_environment
from ddpobs.errors import ConfigError
from ddpobs.export.http_sender import NETWORK_ERRORS, Answer, Outcome, Sender, pause_s, request_headers
from ddpobs.export.spool import Spool, Spooled
from ddpobs.recovery import recover
from ddpobs.wire import printable

main = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

_TRIES = 3
_SHOWN_SHARE, _SHOWN_PARTS = 0.01, 8
_MAX_INTERVALS = 3
"""Most intervals of a finding that are printed."""
_MAX_NAMES = 8
"""Most ranks, buckets or parameters in a line."""
CollectorOption = Annotated[
    str | None,
    typer.Option("--collector", help="Address; by default DDPOBS_TELEMETRY, or http://127.0.0.1:8321."),
]


class _Reply(NamedTuple):
    body: bytes
    document: Any


@main.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="Command of the training, after `--`.")],
    collector: CollectorOption = None,
    run_id: Annotated[
        str | None, typer.Option("--run", help="Run id; by default DDPOBS_RUN, or the launcher's.")
    ] = None,
) -> None:
    """Run a command and its child processes with telemetry."""
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

    It also reports the processes that died there, each with its last place.

    Refused batches stay on disk. The exit code is 0 only if the collector accepted every batch.
    """
    if not folder.is_dir():
        _fail(f"{folder}: no such folder", 2)
    config = _config(collector)
    sender, counts, detail = Sender(config), Counter[Outcome](), ""
    limit_bytes = int(config.spool_mb * 1e6)
    recover(folder, limit_bytes)
    batches = list(Spool(folder, limit_bytes).batches())
    for batch in batches:
        answer = _send(sender, batch)
        counts[answer.outcome] += 1
        detail = answer.detail or detail
        if answer.outcome in (Outcome.STORED, Outcome.REPEATED):
            batch.path.unlink(missing_ok=True)
        elif answer.outcome is not Outcome.REFUSED:
            break
    sender.close()
    stored, repeated, refused = (counts[outcome] for outcome in (Outcome.STORED, Outcome.REPEATED, Outcome.REFUSED))
    remaining = len(batches) - stored - repeated - refused
    typer.echo(f"sent {stored}, repeated {repeated}, refused {refused}, left {remaining}")
    if refused or remaining:
        _fail(detail, 1)


@main.command()
def report(
    run_id: Annotated[str | None, typer.Argument(metavar="RUN", help="By default the newest run.")] = None,
    collector: CollectorOption = None,
) -> None:
    """Print the collector's findings on a run, with their remedies."""
    config = _config(collector)
    run_id = _newest(config) if run_id is None else _checked(config, run=run_id).run
    answer = _get(config, f"/runs/{run_id}/diagnostics").document
    count = len(answer["findings"])
    typer.echo(f"run {answer['run']}: {answer['steps_seen']} steps seen, {count} finding{'s' * (count != 1)}")
    for line in _account_lines(_get(config, f"/runs/{run_id}/account").document):
        typer.echo(line)
    for finding in answer["findings"]:
        for line in _lines(finding):
            typer.echo(printable(line))
    if answer["missing"]:
        typer.echo()
    for missing in answer["missing"]:
        typer.echo(printable(f"not judged: {missing}"))


@main.command()
def trace(
    run_id: Annotated[str, typer.Argument(metavar="RUN")],
    steps: Annotated[str, typer.Option(help="First and last step, as A:B.")],
    output: Annotated[Path, typer.Option("-o", help="File for the Chrome trace.")],
    collector: CollectorOption = None,
) -> None:
    """Save steps as a Chrome trace, for Perfetto or chrome://tracing."""
    first, colon, last = steps.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        _fail(f"--steps: expected A:B with A up to B, got {steps!r}", 2)
    reply = _get(_checked(_config(collector), run=run_id), f"/runs/{run_id}/trace", {"from": first, "to": last})
    if not reply.document["traceEvents"]:
        _fail(f"run {run_id} has none of the steps {first} to {last}", 1)
    try:
        output.write_bytes(reply.body)
    except OSError as error:
        _fail(f"{output}: {error.strerror}", 1)


@main.command()
def stacks(
    run_id: Annotated[str | None, typer.Argument(metavar="RUN", help="By default the newest run.")] = None,
    collector: CollectorOption = None,
) -> None:
    """Print the last known place and stack of each rank of a run; the ranks' processes are not involved."""
    config = _config(collector)
    run_id = _newest(config) if run_id is None else _checked(config, run=run_id).run
    for rank in _get(config, f"/runs/{run_id}/ranks").document["ranks"]:
        for line in _stack_lines(rank):
            typer.echo(printable(line))


@main.command()
def compare(
    run_a: Annotated[str, typer.Argument(metavar="A", help="Run to compare with.")],
    run_b: Annotated[str, typer.Argument(metavar="B", help="Run that may be slower or faster.")],
    fail_over: Annotated[
        str | None, typer.Option(help="Exit with 1 if B is slower than A by more than this, such as 3%.")
    ] = None,
    collector: CollectorOption = None,
) -> None:
    """Compare step time, phases, buckets, settings and findings of two runs.

    With --fail-over the exit code is 1 if B is slower by more, with 95 % confidence, and 3 if that cannot be decided:
    too few steps, too much noise, or other programs on the hosts.
    """
    config, limit = _config(collector), _share("--fail-over", fail_over or "3%")
    for run_id in (run_a, run_b):
        _checked(config, run=run_id)
    answer = _get(config, f"/runs/{run_a}/compare", {"with": run_b, "limit": str(limit)}).document
    for line in _comparison_lines(answer):
        typer.echo(printable(line))
    if fail_over is None:
        return
    verdict, code = _limit_verdict(answer)
    typer.echo(verdict)
    if code:
        raise typer.Exit(code)


_UNDECIDED = 3
"""Exit code if a limit is neither kept nor exceeded with confidence."""
_KINDS = {"compute": " (compute)", "comm": " (communication)"}


def _share(option: str, text: str) -> float:
    """Return a percentage as a share: 0.03 for `3%` and for `3`."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 10:
        _fail(f"{option}: expected a percentage from 0% to 1000%, got {text!r}", 2)
    return share


def _comparison_lines(answer: dict[str, Any]) -> list[str]:
    a, b = answer["a"], answer["b"]
    lines = [f"{a['run']} -> {b['run']}: {a['steps']} and {b['steps']} steps"]
    if answer["too_few"]:
        lines.append(f"not judged: {answer['too_few']}")
    buckets = [change for change in answer["changes"] if change["kind"] in _KINDS]
    shown = [change for change in answer["changes"] if change["kind"] not in _KINDS]
    shown += [change for change in buckets if change["verdict"] in ("slower", "faster")]
    names = [change["name"] + _KINDS.get(change["kind"], "") for change in shown]
    width = max(map(len, names), default=0)
    lines += [f"  {name:{width}}  {_change_text(change)}" for name, change in zip(names, shown, strict=True)]
    if buckets:
        lines.append(f"  {len(buckets) // 2} buckets compared; those that changed are listed")
    if answer["disturbed"]:
        delays = " and ".join(f"{run['run_delay_ns'] / 1e6:.1f}" for run in (a, b))
        lines.append(f"disturbed: ranks had no processor for {delays} ms of a step: other programs may be the cause")
    lines += [f"differs: {row['name']}: {row['a']} -> {row['b']}" for row in answer["differences"]]
    for kind in ("came", "went"):
        lines += [f"{kind}: {finding['severity']}: {finding['title']}" for finding in answer["findings"][kind]]
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


def _limit_verdict(answer: dict[str, Any]) -> tuple[str, int]:
    """Return a sentence on the limit, and the exit code."""
    limit, names = f"{100 * answer['limit']['ratio']:.3g} %", answer["limit"]["exceeded"]
    if not answer["limit"]["decided"]:
        return f"limit {limit}: not decided", _UNDECIDED
    if names:
        return f"limit {limit}: exceeded by {', '.join(names)}", 1
    return f"limit {limit}: kept", 0


def _stack_lines(rank: dict[str, Any]) -> list[str]:
    """Lines on one rank: its activity, and its frames with the innermost last."""
    title, pulse = f"rank {rank['rank']}", rank.get("pulse") or {}
    if host := rank.get("host"):
        title += f" on {host}"
    if not pulse:
        return [f"{title}: no pulse yet"]
    activity = " ".join(filter(None, [pulse.get("activity") or pulse["phase"], pulse.get("waits_in")]))
    if pulse.get("activity") == "bucket" and pulse["bucket"] not in (None, -1):  # Older collectors send -1.
        activity += f" {pulse['bucket']}"
    title += f": {activity}, step {pulse['step']}, no progress for {pulse.get('idle_ns', 0) / 1e9:.0f} s"
    if place := pulse.get("place"):
        title += f" ({place})"
    frames = pulse.get("stack") or ["no stack: a rank sends it once it is stuck"]
    return [title, *(f"  {frame}" for frame in frames)]


def _newest(config: TelemetryConfig) -> str:
    runs = _get(config, "/runs", {"limit": "1"}).document["runs"]
    if not runs:
        _fail(f"no run has reported to {config.collector} yet", 1)
    newest: str = runs[0]["run"]
    return newest


def _account_lines(account: dict[str, Any]) -> list[str]:
    """Return the run's wall time and goodput, and its largest parts with their share of the run."""
    if account["wall_ns"] is None:
        return ["wall time: not known, because no rank has sent an account"]
    goodput = "not known" if account["goodput"] is None else f"{account['goodput']:.0%}"
    lost = f"{account['lost_hours']:.3g} {account['unit']}s lost"
    if account["lost_cost"] is not None:
        lost += f" (cost {account['lost_cost']:.2f})"
    lines = [f"wall time: {account['wall_ns'] / 1e9:.0f} s; goodput {goodput} of the run; {lost}"]
    parts = sorted(account["parts"], key=lambda part: -part["share"])
    shown = [part for part in parts if part["share"] >= _SHOWN_SHARE][:_SHOWN_PARTS]
    width = max((len(part["title"]) for part in shown), default=0)
    lines += [f"  {part['title']:{width}}  {part['share']:4.0%} of the run" for part in shown]
    return lines


def _lines(finding: dict[str, Any]) -> list[str]:
    first, last = finding["steps"]
    location = [f"steps {first} to {last}"]
    location += [f"{kind} {_list(finding[f'{kind}s'])}" for kind in ("rank", "bucket") if finding[f"{kind}s"]]
    lines = ["", f"{finding['severity']}: {finding['title']}", f"  where: {', '.join(location)}"]
    intervals = [interval for interval in finding.get("intervals", []) if interval["began_ns"] is not None]
    lines += [f"  when: {_interval(interval)}" for interval in intervals[:_MAX_INTERVALS]]
    if len(intervals) > _MAX_INTERVALS:
        lines.append(f"  when: and {len(intervals) - _MAX_INTERVALS} more")
    if finding["parameters"]:
        lines.append(f"  parameters: {_list(finding['parameters'])}")
    lines.append(f"  do: {finding['remedy']}")
    if gain := finding["gain"]:
        if gain["whole"] == "run":
            lines.append(f"  gain: at most {gain['ratio']:.0%} of the run's wall time")
        else:
            error = gain["ratio"] * gain["error_ratio"]
            lines.append(f"  gain: {gain['step_ns'] / 1e6:.1f} ms a step, {gain['ratio']:.0%} of it (± {error:.1%})")
    return lines


def _interval(interval: dict[str, int]) -> str:
    """Return the steps of an interval, and their times of day in UTC."""
    began, ended = (datetime.fromtimestamp(interval[f"{end}_ns"] / 1e9, UTC) for end in ("began", "ended"))
    until = f"{ended:%H:%M:%S}" if began.date() == ended.date() else f"{ended:%Y-%m-%d %H:%M:%S}"
    return f"steps {interval['from']} to {interval['to']}, {began:%Y-%m-%d %H:%M:%S} to {until} UTC"


def _list(values: Sequence[object]) -> str:
    more = f" and {len(values) - _MAX_NAMES} more" if len(values) > _MAX_NAMES else ""
    return ", ".join(map(str, values[:_MAX_NAMES])) + more


def _send(sender: Sender, batch: Spooled) -> Answer:
    answer = Answer(Outcome.RETRY)
    for tries in range(_TRIES):
        try:
            body = batch.body()
        except FileNotFoundError:  # Another push, or the training itself, has sent it meanwhile.
            return Answer(Outcome.REPEATED)
        except OSError as error:
            return Answer(Outcome.REFUSED, f"{batch.path}: {error.strerror}")
        answer = sender.send(batch.run, batch.source, batch.seq, body)
        if answer.outcome is not Outcome.RETRY:
            break
        if tries + 1 < _TRIES:
            time.sleep(pause_s(tries, answer.retry_after_s, random.Random()))
    return answer


def _get(config: TelemetryConfig, path: str, query: Mapping[str, str] | None = None) -> _Reply:
    """Read a JSON document from the collector; any other reply ends the command.

    Certificates are those of the system and of SSL_CERT_FILE, as for batches. Proxies in the environment are ignored.
    """
    url = f"{config.collector.rstrip('/')}/api/v1{path}"
    limits = dict.fromkeys(("connect", "read", "write", "pool"), config.timeout_s)
    try:
        target = f"{url}?{urlencode(query)}" if query else url
        response = httpcore.request("GET", target, headers=request_headers(config), extensions={"timeout": limits})
    except (*NETWORK_ERRORS, OSError, ValueError) as error:
        _fail(f"{url}: {error}: is this the collector? --collector or DDPOBS_TELEMETRY names it", 1)
    if not 200 <= response.status < 300:
        _fail(f"{url}: HTTP {response.status}: {_problem(response.status, response.content)}", 1)
    try:
        return _Reply(response.content, json.loads(response.content))
    except ValueError:
        _fail(f"{url}: not a collector's reply: {_excerpt(response.content)}", 1)


def _problem(status: int, body: bytes) -> str:
    """Describe a refusal: by the collector's problem document, or by the start of a proxy's own page."""
    try:
        problem = json.loads(body)
        text = printable(f"{problem['title']}: {problem['detail']}")
    except (ValueError, KeyError, TypeError):
        text = _excerpt(body)
    return text + (": set DDPOBS_TOKEN" if status == HTTPStatus.UNAUTHORIZED else "")


def _excerpt(body: bytes) -> str:
    return printable(body.decode(errors="replace")[:300])


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
