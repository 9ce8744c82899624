"""Tokens: one form on both sides, files, an expiry, a rotation with an overlap, and guesses that are counted."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
import zstandard
from ddpobs_server.operations.commands import cli
from ddpobs_server.settings import Settings, printable_url
from ddpobs_server.store import Store
from ddpobs_server.web.authenticator import MAX_FAILURES, Authenticator, new_token
from ddpobs_server.web.problems import Problem
from pydantic import ValidationError
from typer.testing import CliRunner

from benchmarks.rig import databases
from benchmarks.rig.collector import collector
from ddpobs import TelemetryConfig, wire
from ddpobs.config import from_environment
from ddpobs.errors import ConfigError
from ddpobs.export.http_sender import Outcome, Sender
from tests.support.server.batches import batch

SPACED = ["s3cret\n", " s3cret", "\ts3cret \r\n"]
MALFORMED = ["", " ", "gehéim", "two words", "a\nb", "\u00a0"]


@pytest.mark.parametrize("text", SPACED)
def test_white_space_around_a_token_counts_on_neither_side(tmp_path: Path, text: str) -> None:
    settings = Settings(token=text)
    assert settings.token is not None
    tokens = {settings.token.get_secret_value(), TelemetryConfig(token=text).token}
    tokens.add(from_environment({"DDPOBS_TOKEN": text}).token)
    file = tmp_path / "token"
    file.write_text(text.strip("\r\n") + "\n")
    assert Settings(token_file=file).file_tokens() == ["s3cret"]
    assert tokens == {"s3cret"}


@pytest.mark.parametrize("text", MALFORMED)
def test_a_token_that_no_header_carries_is_refused_on_both_sides(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValidationError):
        Settings(token=text)
    with pytest.raises(ConfigError):
        TelemetryConfig(token=text)
    file = tmp_path / "token"
    file.write_text("" if text == "a\nb" else text)
    with pytest.raises(ValidationError, match="token_file"):
        Settings(token_file=file)


def test_a_token_with_white_space_works_between_both_sides(tmp_path: Path) -> None:
    with collector(tmp_path, token="s3cret\n") as running:
        assert send(TelemetryConfig(collector=running.url, token=" s3cret")) is Outcome.STORED


def send(config: TelemetryConfig, sender: Sender | None = None, seq: int = 0) -> Outcome:
    sender = sender or Sender(config)
    payload = batch("x", seq=seq)
    return sender.send("x", payload.source, seq, zstandard.compress(wire.encode(payload))).outcome


def test_a_file_rotates_the_collectors_token_with_an_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens"
    file.write_text("old\n")
    store = Store(databases.migrated_sqlite(tmp_path))
    authenticator = Authenticator(Settings(token_file=file), store)
    assert allowed(authenticator, "old")
    assert not allowed(authenticator, "new")
    file.write_text("old\nnew\n")
    authenticator.refresh()
    assert allowed(authenticator, "old")
    assert allowed(authenticator, "new")
    file.write_text("new\n")
    authenticator.refresh()
    assert not allowed(authenticator, "old")
    assert allowed(authenticator, "new")
    file.write_text("")  # As in the middle of a replacement.
    authenticator.refresh()
    file.unlink()
    authenticator.refresh()
    assert allowed(authenticator, "new")
    store.close()


def allowed(authenticator: Authenticator, token: str, address: str = "a") -> bool:
    try:
        return bool(authenticator.caller(f"Bearer {token}", address).scopes)
    except Problem as problem:
        return problem.status != 401


def test_a_collector_with_a_file_of_tokens_opens_to_other_machines(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    with collector(tmp_path, host="0.0.0.0", token_file=file) as running:
        assert httpx.get(f"{running.url}/api/v1/runs").status_code == 401
        assert httpx.get(f"{running.url}/api/v1/runs", headers={"Authorization": "Bearer s3cret"}).status_code == 200


def test_a_training_reads_its_file_again_after_a_rejected_token(tmp_path: Path) -> None:
    file = tmp_path / "client-token"
    file.write_text("old\n")
    with collector(tmp_path, token="new") as running:
        environ = {"DDPOBS_TELEMETRY": running.url, "DDPOBS_TOKEN_FILE": str(file)}
        config = from_environment(environ)
        sender = Sender(config)
        assert send(config, sender) is Outcome.FORBIDDEN
        file.write_text("new\n")
        assert send(config, sender) is Outcome.STORED


def test_a_missing_file_of_a_training_keeps_its_batches(tmp_path: Path) -> None:
    with collector(tmp_path, token="new") as running:
        config = TelemetryConfig(collector=running.url, token_file=tmp_path / "none")
        assert send(config) is Outcome.RETRY


def token_command(url: str, *arguments: str) -> str:
    done = CliRunner().invoke(cli, ["token", *arguments, "--database-url", url])
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def test_a_token_expires(fresh: databases.Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = fresh(tmp_path)
    token = token_command(url, "create", "ranks", "--expires", "12h")
    assert " expires 20" in token_command(url, "list")
    authenticator = Authenticator(Settings(), store := Store(url))
    authenticator.refresh()
    assert allowed(authenticator, token)
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 12 * 3600 * 10**9)
    assert not allowed(authenticator, token)
    store.close()


def test_a_rotated_token_works_until_the_end_of_the_overlap(
    fresh: databases.Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = fresh(tmp_path)
    former = token_command(url, "create", "ranks", "--scope", "ingest", "--workspace", "vision")
    token = token_command(url, "rotate", former.split("_")[1], "--overlap", "2d")
    authenticator = Authenticator(Settings(), store := Store(url))
    authenticator.refresh()
    callers = {authenticator.caller(f"Bearer {text}", "a").workspace for text in (former, token)}
    assert callers == {"vision"}
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 2 * 86_400 * 10**9)
    assert (allowed(authenticator, former), allowed(authenticator, token)) == (False, True)
    store.close()


def test_a_token_that_would_expire_later_can_be_revoked(fresh: databases.Fresh, tmp_path: Path) -> None:
    url = fresh(tmp_path)
    token = token_command(url, "create", "ranks", "--expires", "90d")
    token_command(url, "revoke", token.split("_")[1])
    assert token_command(url, "list").endswith("revoked")


@pytest.mark.parametrize("text", ["0d", "7", "d", "1w", "-1d"])
def test_a_malformed_time_is_refused(tmp_path: Path, text: str) -> None:
    url = databases.sqlite(tmp_path)
    done = CliRunner().invoke(cli, ["token", "create", "x", "--expires", text, "--database-url", url])
    assert done.exit_code == 2


def test_ranks_that_share_an_old_token_lock_no_other_rank_out(tmp_path: Path) -> None:
    store = Store(databases.migrated_sqlite(tmp_path))
    authenticator = Authenticator(Settings(token="right"), store)
    authenticator.refresh()
    for _ in range(5 * MAX_FAILURES):
        assert not allowed(authenticator, "old")
    assert allowed(authenticator, "right")
    for number in range(MAX_FAILURES):
        assert not allowed(authenticator, f"guess-{number}", "b")
    with pytest.raises(Problem, match="different wrong tokens") as problem:
        authenticator.caller("Bearer right", "b")
    assert problem.value.status == 429
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:s3@cret@host/ddpobs",
        "postgresql+psycopg://me:s@3@cret@host/ddpobs",
        "postgresql+psycopg://me:s3@cr/et@host/ddpobs",
    ],
)
def test_a_password_with_an_unescaped_at_sign_is_refused_without_a_part_of_it(url: str) -> None:
    done = CliRunner().invoke(cli, ["check", "--database-url", url])
    assert done.exit_code == 2
    assert "write %40" in done.stderr
    assert not any(part in done.output for part in ("s3", "cret"))


@pytest.mark.parametrize("option", ["password", "sslpassword", "passwort", "PASSWORD", "pass word"])
def test_a_printed_url_has_no_password_under_any_name(option: str) -> None:
    printed = printable_url(f"postgresql+psycopg://me:s3%40cret@host/ddpobs?{option}=s3cret&sslmode=require")
    assert printed == "postgresql+psycopg://me:***@host/ddpobs?sslmode=require"


@pytest.mark.parametrize("url", ["me:s3cret@127.0.0.1:1/db", "127.0.0.1:1/db?passwort=s3cret", "x:s3cret@:port/db"])
@pytest.mark.parametrize("command", ["check", "backup b", "restore b", "token list", "workspace list", "distribute"])
def test_no_command_prints_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, url: str) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, [*command.split(), "--database-url", f"postgresql+psycopg://{url}"])
    assert done.exit_code > 0
    assert done.output.strip()
    assert "s3cret" not in done.output + str(done.exception)


@pytest.mark.parametrize("name", ["TOKEN", "DATABASE_URL", "KEEP_GB"])
def test_a_refused_setting_is_reported_without_the_secrets_beside_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    values = {"TOKEN": "s3cret-of-good-length", "DATABASE_URL": "postgresql+psycopg://me:s3cret@host/db"}
    for variable, value in (values | {name: "s3cret with spaces"}).items():
        monkeypatch.setenv(f"DDPOBS_SERVER_{variable}", value)
    done = CliRunner().invoke(cli, ["check"])
    assert done.exit_code == 2
    assert name.lower() in done.output
    assert "s3cret" not in done.output


def test_a_backup_of_postgresql_prints_no_password(tmp_path: Path) -> None:
    url = "postgresql+psycopg://host/ddpobs?user=me&password=s3cret"
    done = CliRunner().invoke(cli, ["backup", str(tmp_path / "b"), "--database-url", url])
    assert "s3cret" not in done.output


def test_new_tokens_have_the_form_of_both_sides() -> None:
    token, _ = new_token("x", "default", ["read"])
    assert TelemetryConfig(token=token).token == token
