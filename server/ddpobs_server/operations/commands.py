"""What an operator does beside serving: tokens, checks, backups, measurements."""

from __future__ import annotations

import json
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from typer.core import TyperGroup

from ddpobs_server.operations import backup, self_check
from ddpobs_server.settings import Settings, unknown_settings
from ddpobs_server.store import DEFAULT_WORKSPACE, Store, UnavailableError, UnusableError
from ddpobs_server.web.auth import SCOPES, new_token


class Commands(TyperGroup):
    """What the settings, a database or a file refuse is said in a line; a traceback is for faults of our own."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; ends with 2 where it was set wrongly, and with 1 where it could not be done."""
        try:
            return super().invoke(ctx)
        except ValidationError as error:
            for found in error.errors():
                where = ".".join(map(str, found["loc"])) or "settings"
                print_error(f"{where}: {found['msg'].removeprefix('Value error, ')}")
            raise typer.Exit(2) from None
        except (UnavailableError, UnusableError, SQLAlchemyError, backup.BackupError) as error:
            print_error(_reason(error))
            raise typer.Exit(1) from None


def _reason(error: Exception) -> str:
    """What the driver said, without SQLAlchemy's words about it."""
    return str(getattr(error, "orig", None) or error)


def print_error(why: str) -> None:
    """One line on standard error."""
    typer.echo(f"ddpobs-server: {_line(why)}", err=True)


def _line(text: str) -> str:
    return " ".join(text.split())


cli = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, help="The ddpobs collector.")
tokens = typer.Typer(help="Who may call: tokens, each for a workspace and some of ingest, read and admin.")
cli.add_typer(tokens, name="token")

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        help="SQLAlchemy URL of the collector's database; else DDPOBS_SERVER_DATABASE_URL, else sqlite:///ddpobs.db."
    ),
]


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="Whose it is; shown by `token list`.")],
    scope: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(SCOPES)}; may be repeated. Without: ingest and read.")
    ] = None,
    workspace: Annotated[str, typer.Option(help="Whose runs: 1 to 32 of a-z, 0-9 and -.")] = DEFAULT_WORKSPACE,
    database_url: DatabaseOption = None,
) -> None:
    """Make a token and print it, this once: only its hash is kept."""
    scopes = scope or ["ingest", "read"]
    if unknown := sorted(set(scopes) - set(SCOPES)):
        raise typer.BadParameter(f"expected some of {', '.join(SCOPES)}, got {', '.join(unknown)}")
    if not re.fullmatch(r"[a-z0-9-]{1,32}", workspace):
        raise typer.BadParameter(f"workspace: expected 1 to 32 of a-z, 0-9 and -, got {workspace!r}")
    if not name.isprintable():
        raise typer.BadParameter(f"name: expected what can be printed on a line, got {name!r}")
    token, kept = new_token(name[:128], workspace, scopes)
    settings = _settings(database_url)
    store = open_store(settings)
    store.add_token(kept)
    store.close()
    print_error(f"made for {', '.join(scopes)} in workspace {workspace}, kept in {settings.database}")
    typer.echo(token)


@tokens.command("list")
def list_tokens(database_url: DatabaseOption = None) -> None:
    """Show every token but its secret."""
    settings = _settings(database_url)
    store = _open_existing(settings)
    found = store.tokens()
    store.close()
    print_error(f"{'tokens' if found else 'no tokens'} kept in {settings.database}")
    for token in found:
        made = datetime.fromtimestamp(token.created_ns / 1e9, UTC).isoformat(timespec="seconds")
        ended = " revoked" if token.revoked_ns is not None else ""
        typer.echo(f"{token.token_id}  {token.workspace}  {','.join(token.scopes)}  {made}  {token.name}{ended}")


@tokens.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(help="As `token list` shows it.")], database_url: DatabaseOption = None
) -> None:
    """Have a token work no more, within five seconds."""
    settings = _settings(database_url)
    store = _open_existing(settings)
    found = store.revoke_token(token_id, time.time_ns())
    store.close()
    if not found:
        print_error(f"no token {token_id} that works in {settings.database}")
        raise typer.Exit(1)
    print_error(f"revoked {token_id} in {settings.database}")


@cli.command()
def check(
    database_url: DatabaseOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    integrity: Annotated[bool, typer.Option(help="Read a whole SQLite file for damage.")] = True,
) -> None:
    """Say whether a collector could run here: database, schema, rights, disk, clock, files. Ends with 1 where not."""
    settings = _settings(database_url)
    found = [*(self_check.CheckResult("settings", "warn", line) for line in unknown_settings(os.environ))]
    found += self_check.run(settings, integrity)
    failed = any(finding.state == "fail" for finding in found)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [vars(finding) for finding in found]}))
    else:
        for finding in found:
            typer.echo(f"{finding.state:4}  {finding.name}: {_line(finding.detail)}")
    if failed:
        raise typer.Exit(1)


@cli.command("backup")
def back_up(
    file: Annotated[Path, typer.Argument(help="What to write; must not be there yet.")],
    database_url: DatabaseOption = None,
) -> None:
    """Copy a SQLite database into one file while collectors write to it."""
    backup.backup(_settings(database_url).database_url, file)
    typer.echo(f"{file}: {file.stat().st_size:,} bytes, checked")


@cli.command()
def restore(
    file: Annotated[Path, typer.Argument(help="What `backup` wrote.")], database_url: DatabaseOption = None
) -> None:
    """Make a SQLite database from a backup, with no collector running."""
    url = _settings(database_url).database_url
    backup.restore(url, file)
    typer.echo(f"{url}: restored")


@cli.command()
def bench(
    ranks: Annotated[int, typer.Option(min=0, help="A job of so many ranks; 0 floods the collector instead.")] = 0,
    seconds: Annotated[float, typer.Option(min=1, help="How long the job lasts.")] = 60.0,
    batches: Annotated[int, typer.Option(min=1, help="Batches of 5,000 spans a client, when flooding.")] = 100,
    clients: Annotated[int, typer.Option(min=1, help="Processes that send.")] = 8,
    database_url: Annotated[
        str | None, typer.Option(help="A database for it alone; default: a new SQLite file.")
    ] = None,
) -> None:
    """Measure what a collector takes on this machine, the clients being here too."""
    from ddpobs_server.operations import bench as benchmark

    load = benchmark.job(ranks, seconds, clients) if ranks else benchmark.flood(clients, batches)
    try:
        found = benchmark.measure(load, database_url)
    except benchmark.BenchError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    for name, value in found.items():
        typer.echo(f"{name:>16}  {value:,.2f}")
    if found["lost"]:
        raise typer.Exit(1)


@cli.command()
def distribute(
    database_url: DatabaseOption = None,
    show: Annotated[bool, typer.Option("--show", help="Print the statements and run none.")] = False,
) -> None:
    """Spread the tables over a Citus cluster by run, on its coordinator; and new ones after an upgrade."""
    store = Store(_settings(database_url).database_url)
    for statement in store.distribution():
        typer.echo(f"{statement};")
    if not show:
        store.distribute()
    store.close()


def open_store(settings: Settings) -> Store:
    """The store, its schema this version's; SQLite's file is made where there is none.

    Raises:
        UnusableError: Says which database it is, and why it cannot be had.
    """
    store = Store(settings.database_url)
    try:
        store.migrate()
    except (UnavailableError, UnusableError, SQLAlchemyError) as error:
        raise UnusableError(f"{settings.database}: {_reason(error)}") from error
    return store


def _open_existing(settings: Settings) -> Store:
    if (file := settings.database_file) is not None and not file.exists():
        raise UnusableError(f"no database {file}")
    return open_store(settings)


def _settings(database_url: str | None) -> Settings:
    given: dict[str, Any] = {} if database_url is None else {"database_url": database_url}
    return Settings(**given)
