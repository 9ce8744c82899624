"""Commands for the operator, besides `serve`: tokens, self-check, backups, measurements."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from typer.core import TyperGroup
from typing_extensions import override

from ddpobs_server.operations import backup, self_check
from ddpobs_server.operations.command_entry import caller_text, command_entry
from ddpobs_server.operations.wrong_settings import problems_of, unknown_settings
from ddpobs_server.settings import Settings
from ddpobs_server.store import DEFAULT_WORKSPACE, Store, Token, UnavailableError, UnusableError
from ddpobs_server.store.database import database_access
from ddpobs_server.web.authenticator import SCOPES, new_token
from ddpobs_server.web.workspace_limits import Limits, effective_limits

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


class Commands(TyperGroup):
    """Lists `serve`, the default, first, and prints errors of settings, databases and files as a single line.

    A traceback means a bug in the program.

    Exit codes: 2 for a wrong setting, 1 for a failure.
    """

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: name != "serve")

    @override
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValidationError as error:
            for problem in problems_of(error):
                print_error(problem)
            raise typer.Exit(2) from None
        except (UnavailableError, UnusableError, SQLAlchemyError, backup.BackupError) as error:
            print_error(_reason(error))
            raise typer.Exit(1) from None


def _reason(error: Exception) -> str:
    """The driver's message, without the text that SQLAlchemy adds."""
    return str(getattr(error, "orig", None) or error)


def print_error(message: str) -> None:
    """Print a line to standard error."""
    typer.echo(f"ddpobs-server: {_line(message)}", err=True)


def _line(text: str) -> str:
    return " ".join(text.split())


cli = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The ddpobs collector. Without a command it runs `serve`; see `ddpobs-server serve --help` for the options.",
)
tokens = typer.Typer(help="Access tokens, each for a workspace and some of the scopes ingest, read and admin.")
cli.add_typer(tokens, name="token")
workspaces = typer.Typer(help="Limits of workspaces.", no_args_is_help=True)
cli.add_typer(workspaces, name="workspace")


@workspaces.callback()
def _workspaces() -> None:
    """Limits of workspaces."""


DatabaseOption = Annotated[
    str | None,
    typer.Option(
        help="SQLAlchemy URL of the database. Default: DDPOBS_SERVER_DATABASE_URL, or sqlite:///ddpobs.db without it."
    ),
]


ExpiresOption = Annotated[
    str | None, typer.Option(help="Time until the token expires, as 90d, 12h or 30m. Default: never.")
]


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="Owner or purpose of the token; `token list` shows it.")],
    scope: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(SCOPES)}; repeatable. Default: ingest and read.")
    ] = None,
    workspace: Annotated[
        str, typer.Option(help="Workspace of the runs: 1 to 32 of a-z, 0-9 and -.")
    ] = DEFAULT_WORKSPACE,
    expires: ExpiresOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Create a token and print it. It cannot be shown again: the database stores only its hash."""
    scopes = scope or ["ingest", "read"]
    if unknown_scopes := sorted(set(scopes) - set(SCOPES)):
        raise typer.BadParameter(f"expected some of {', '.join(SCOPES)}, got {', '.join(unknown_scopes)}")
    if not re.fullmatch(r"[a-z0-9-]{1,32}", workspace):
        raise typer.BadParameter(f"workspace: expected 1 to 32 of a-z, 0-9 and -, got {workspace!r}")
    if not name.isprintable():
        raise typer.BadParameter(f"name: expected printable characters, got {name!r}")
    expires_ns = None if expires is None else time.time_ns() + _duration_ns(expires)
    secret, token = new_token(name[:128], workspace, scopes, expires_ns)
    settings = _settings(database_url)
    store = open_store(settings)
    detail = {"name": token.name, "scopes": scopes, "expires_ns": expires_ns}
    store.add_token(token, command_entry("token.create", token.token_id, workspace, detail))
    store.close()
    print_error(f"created for {', '.join(scopes)} in workspace {workspace}, stored in {settings.database}")
    typer.echo(secret)


@tokens.command("list")
def list_tokens(database_url: DatabaseOption = None) -> None:
    """List the tokens, without their secrets."""
    settings = _settings(database_url)
    store = _open_existing(settings)
    stored = store.tokens()
    store.close()
    print_error(f"{'tokens' if stored else 'no tokens'} stored in {settings.database}")
    for token in stored:
        created = _date(token.created_ns)
        ending = _ending(token, time.time_ns())
        typer.echo(f"{token.token_id}  {token.workspace}  {','.join(token.scopes)}  {created}  {token.name}{ending}")


@tokens.command("rotate")
def rotate_token(
    token_id: Annotated[str, typer.Argument(help="Id of the token, from `token list`.")],
    overlap: Annotated[
        str, typer.Option(help="Time for which the former token still works, as 7d, 12h or 30m.")
    ] = "7d",
    expires: ExpiresOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Print a new token with the name, workspace and scopes of another one, which ends after the overlap."""
    now_ns = time.time_ns()
    former_ends_ns = now_ns + _duration_ns(overlap)
    expires_ns = None if expires is None else now_ns + _duration_ns(expires)
    settings = _settings(database_url)
    store = _open_existing(settings)
    former = next((token for token in store.tokens() if token.token_id == token_id and token.works(now_ns)), None)
    if former is None:
        print_error(f"no valid token {token_id} in {settings.database}: `ddpobs-server token list` shows them")
        raise typer.Exit(1)
    secret, token = new_token(former.name, former.workspace, list(former.scopes), expires_ns)
    detail = {"name": token.name, "scopes": list(token.scopes), "expires_ns": expires_ns, "replaces": token_id}
    store.add_token(token, command_entry("token.create", token.token_id, token.workspace, detail))
    ending = {"name": token.name, "works_until_ns": former_ends_ns}
    store.revoke_token(token_id, former_ends_ns, command_entry("token.revoke", token_id, token.workspace, ending))
    store.close()
    print_error(f"{token_id} works until {_date(former_ends_ns)} at the latest, {token.token_id} replaces it")
    typer.echo(secret)


@tokens.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(help="Id of the token, from `token list`.")],
    database_url: DatabaseOption = None,
) -> None:
    """Revoke a token; collectors reject it within five seconds."""
    settings = _settings(database_url)
    store = _open_existing(settings)
    token = next((token for token in store.tokens() if token.token_id == token_id), None)
    entry = None if token is None else command_entry("token.revoke", token_id, token.workspace, {"name": token.name})
    revoked = store.revoke_token(token_id, time.time_ns(), entry)
    store.close()
    if not revoked:
        print_error(f"no valid token {token_id} in {settings.database}: `ddpobs-server token list` shows them")
        raise typer.Exit(1)
    print_error(f"revoked {token_id} in {settings.database}")


@workspaces.command("limits")
def set_workspace_limits(
    *,
    name: Annotated[str, typer.Argument(help="Name of the workspace.")],
    share: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Largest part of shared memory and places.")
    ] = None,
    max_runs: Annotated[int | None, typer.Option(min=1, help="Stored runs.")] = None,
    max_series: Annotated[int | None, typer.Option(min=1, help="Series of the active runs.")] = None,
    batches_per_s: Annotated[float | None, typer.Option(min=0.01, help="Batches a second.")] = None,
    mb_per_s: Annotated[float | None, typer.Option(min=0.001, help="MB of bodies a second.")] = None,
    reads_per_s: Annotated[float | None, typer.Option(min=0.01, help="Reads and scrapes a second.")] = None,
    keep_gb: Annotated[float | None, typer.Option(min=0.001, help="Stored GB; old data are removed.")] = None,
    keep_runs_days: Annotated[
        float | None, typer.Option(min=0.001, help="Days of silence after which a run is removed.")
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Return to the settings first.")] = False,
    database_url: DatabaseOption = None,
) -> None:
    """Set and print the limits of a workspace. Collectors follow within five seconds, retention within a minute."""
    given = {key: value for key, value in locals().items() if key in Limits.__struct_fields__ and value is not None}
    settings = _settings(database_url)
    store = _open_existing(settings)
    stored = ({} if reset else store.workspace_limits().get(name, {})) | given
    if given or reset:
        store.set_workspace_limits(name, stored, command_entry("workspace.limits", name, name, stored))
    store.close()
    for limit, value in msgspec.structs.asdict(effective_limits(settings, stored)).items():
        origin = "stored" if limit in stored else "setting"
        typer.echo(f"{limit:15}  {'none' if value is None else f'{value:g}':>12}  {origin}")


@cli.command()
def audit(
    workspace: Annotated[str | None, typer.Option(help="Only changes in this workspace.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of entries.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
    database_url: DatabaseOption = None,
) -> None:
    """Show who deleted runs and changed labels, tokens, limits and settings, newest first."""
    store = _open_existing(_settings(database_url))
    entries = store.audit_entries(limit, workspace)
    store.close()
    for entry in entries:
        detail = json.dumps(entry.detail)
        line = (
            f"{_date(entry.at_ns)}  {entry.workspace}  {entry.action}  {entry.subject}  {caller_text(entry)}  {detail}"
        )
        typer.echo(json.dumps(vars(entry)) if as_json else line)


@cli.command()
def check(
    database_url: DatabaseOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    integrity: Annotated[bool, typer.Option(help="Read a whole SQLite file to find damage.")] = True,
) -> None:
    """Check whether a collector can run here: database, schema, permissions, disk, clock, files.

    Exits with 1 if a check fails.
    """
    settings = _settings(database_url)
    results = [*(self_check.CheckResult("settings", "warn", line) for line in unknown_settings(os.environ))]
    results += self_check.run(settings, integrity)
    failed = any(result.state == "fail" for result in results)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [vars(result) for result in results]}))
    else:
        for result in results:
            colour = None if os.environ.get("NO_COLOR") else _COLOURS[result.state]
            state = typer.style(f"{result.state:4}", fg=colour)
            typer.echo(f"{state}  {result.name}: {_line(result.detail)}")
        counts = Counter(result.state for result in results)
        warnings = f"{counts['warn']} warning{'s' * (counts['warn'] != 1)}"
        verdict = "A collector cannot run here" if failed else "A collector can run here"
        typer.echo(f"{verdict}: {counts['ok']} ok, {warnings}, {counts['fail']} failed")
    if failed:
        raise typer.Exit(1)


@cli.command("backup")
def back_up(
    file: Annotated[Path, typer.Argument(help="File to create; it must not exist.")],
    database_url: DatabaseOption = None,
) -> None:
    """Copy a SQLite database to a file. Collectors may write to it meanwhile."""
    backup.backup(_settings(database_url).database_url, file)
    typer.echo(f"{file}: {file.stat().st_size:,} bytes, checked")


@cli.command()
def restore(
    file: Annotated[Path, typer.Argument(help="File that `backup` created.")], database_url: DatabaseOption = None
) -> None:
    """Create a SQLite database from a backup. Stop the collector first."""
    settings = _settings(database_url)
    backup.restore(settings.database_url, file)
    typer.echo(f"{settings.database}: restored")


@cli.command()
def distribute(
    database_url: DatabaseOption = None,
    show: Annotated[bool, typer.Option("--show", help="Print the statements without running them.")] = False,
) -> None:
    """Distribute the tables over a Citus cluster by run. Run it on the coordinator, and again after an upgrade."""
    store = Store(_settings(database_url).database_url)
    for statement in store.distribution():
        typer.echo(f"{statement};")
    if not show:
        store.distribute()
    store.close()


def open_store(settings: Settings) -> Store:
    """Open the store and upgrade its schema; a missing SQLite file is created.

    Raises:
        UnusableError: The database cannot be used; the message has its URL and the reason.
    """
    store = Store(settings.database_url, prepare_threshold=settings.statement_threshold)
    try:
        store.migrate()
    except (UnavailableError, UnusableError, SQLAlchemyError) as error:
        raise UnusableError(f"{settings.database}: {_reason(error)}") from error
    return store


def _duration_ns(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,4})([dhm])", text)
    if match is None:
        raise typer.BadParameter(f"expected a time such as 90d, 12h or 30m, got {text!r}")
    return int(match[1]) * {"d": 86_400, "h": 3600, "m": 60}[match[2]] * 10**9


def _date(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="seconds")


def _ending(token: Token, now_ns: int) -> str:
    if token.revoked_ns is None:
        return ""
    return f" expires {_date(token.revoked_ns)}" if token.works(now_ns) else " revoked"


def _open_existing(settings: Settings) -> Store:
    if (file := settings.database_file) is not None and database_access.exists(file) is False:
        raise UnusableError(f"no database {file}")
    return open_store(settings)


def _settings(database_url: str | None) -> Settings:
    overrides: dict[str, Any] = {} if database_url is None else {"database_url": database_url}
    return Settings(**overrides)
