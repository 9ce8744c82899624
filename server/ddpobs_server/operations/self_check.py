"""Checks whether a collector can run on this machine, without changing anything."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from ddpobs_server.store.database import database_access
from ddpobs_server.web import listening

_FREE_BYTES, _FREE_RATIO = 10**9, 0.02
_SKEW_S = 5.0
_TIMEDATECTL_S = 5.0
_RENEWAL_DAYS = 7
_TOKEN_CHARACTERS = 16
"""Minimum characters of a token that is not warned of."""


@dataclass(frozen=True)
class CheckResult:
    """Result of a check. A collector can run despite warnings."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str


def run(settings: Settings, integrity: bool = True) -> Iterator[CheckResult]:
    """Run all checks; later checks depend on earlier checks.

    Args:
        settings: Settings with the database and the TLS files to check.
        integrity: Whether to read a whole SQLite file, which takes long for a large file.
    """
    database, file = settings.database, settings.database_file
    if (problem := address_problem(settings.hosts, 0)) is not None:
        yield CheckResult("address", "fail", problem)
    if settings.tls_cert is not None:
        yield _tls(settings, settings.tls_cert)
    if file is not None:
        yield (permissions := _permissions(file))
        if permissions.state == "fail":
            return
        yield _file_system(file.parent)
        yield _disk(file.parent, int(settings.keep_free_mb * 1e6))
        yield _clock_synchronisation()
        if not file.exists():
            yield CheckResult("database", "ok", f"{database} does not exist yet: the first start creates it")
            yield from _access(settings, None)
            return
    store = Store(settings.database_url, read_only=True, prepare_threshold=settings.statement_threshold)
    try:
        yield from _database(settings, store, file is not None and integrity)
    finally:
        store.close()


def access_problem(settings: Settings, tokens: bool) -> str | None:
    """The reason to refuse service with these settings: other machines can connect, and need no token; else None.

    Args:
        settings: Settings with the address and an optional token.
        tokens: Whether the database has any tokens, including revoked tokens.
    """
    if settings.on_loopback or settings.has_token or tokens:
        return None
    return (
        f"host {settings.host} is not loopback or is behind a proxy, and there is no token: anyone could read "
        "and write. Set --token (DDPOBS_SERVER_TOKEN), create a token with `ddpobs-server token create`, or listen "
        "on 127.0.0.1 without trusted proxies"
    )


def token_problem(settings: Settings) -> str | None:
    """The reason why a token of the settings can be guessed; None if none can."""
    own = [] if settings.token is None else [settings.token.get_secret_value()]
    shortest = min(map(len, [*own, *settings.file_tokens()]), default=_TOKEN_CHARACTERS)
    if shortest >= _TOKEN_CHARACTERS:
        return None
    return f"a token has {shortest} characters and can be guessed: use at least {_TOKEN_CHARACTERS} random ones"


def address_problem(hosts: Sequence[str], port: int) -> str | None:
    """The reason why a server cannot listen on these addresses; None if it can."""
    try:
        sockets = listening.bind(hosts, port)
    except listening.AddressError as error:
        return str(error)
    for bound in sockets:
        bound.close()
    return None


def tls_problem(settings: Settings) -> str | None:
    """The reason why the settings' certificate and key cannot be used; None if they can, or without a certificate."""
    if settings.tls_cert is None:
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        key = f" with {settings.tls_key}" if settings.tls_key else ""
        return f"tls_cert: expected a certificate chain and its key as PEM, {settings.tls_cert}{key} is none: {error}"
    return None


def _database(settings: Settings, store: Store, integrity: bool) -> Iterator[CheckResult]:
    database = settings.database
    try:
        store.ready()
    except Exception as error:
        yield CheckResult("database", "fail", f"{database} does not answer: {type(error).__name__}: {error}")
        return
    yield CheckResult("database", "ok", f"{database} answers")
    if integrity:
        errors = store.integrity_errors()
        yield CheckResult("integrity", "fail" if errors else "ok", "; ".join(errors) or "the file is undamaged")
        if errors:
            return
    if store.is_distributed():
        broken = store.broken_links()
        detail = f"unreachable: {', '.join(broken)}" if broken else "every node reaches every other"
        yield CheckResult("cluster", "fail" if broken else "ok", detail)
    yield (schema := _schema(store))
    if schema.state == "ok":
        yield from _access(settings, store)
    try:
        store.try_write()
    except Exception as error:
        yield CheckResult("writing", "fail", f"{type(error).__name__}: {error}")
    else:
        yield CheckResult("writing", "ok", "rows can be written")
    if store.folder is None:
        skew_s = store.now_ns() / 1e9 - time.time()
        detail = f"{skew_s:+.1f} s between the database's clock and this machine's"
        yield CheckResult("clock", "ok" if abs(skew_s) < _SKEW_S else "fail", detail)


def _access(settings: Settings, store: Store | None) -> Iterator[CheckResult]:
    if (weakness := token_problem(settings)) is not None:
        yield CheckResult("token", "warn", weakness)
    if not settings.on_loopback:
        tokens = store is not None and store.revisions()[0] is not None and bool(store.tokens())
        problem = access_problem(settings, tokens)
        yield CheckResult("access", "fail" if problem else "ok", problem or "other machines can connect with a token")


def _tls(settings: Settings, certificate: Path) -> CheckResult:
    if (problem := tls_problem(settings)) is not None:
        return CheckResult("tls", "fail", problem)
    try:
        days = (_expires_s(certificate, settings.tls_key) - time.time()) / 86_400
    except ssl.SSLCertVerificationError as error:
        return CheckResult("tls", "fail", f"clients reject {certificate}: {error.verify_message}")
    detail = f"{certificate} and its key match, and are valid for {days:.0f} more days"
    return CheckResult("tls", "ok" if days > _RENEWAL_DAYS else "warn", detail)


def _expires_s(certificate: Path, key: Path | None) -> float:
    """Expiry of a certificate as Unix time, read by a client that trusts it.

    Raises:
        ssl.SSLCertVerificationError: Clients reject the certificate: it has expired, or is not valid yet.
    """
    server_context, client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server_context.load_cert_chain(certificate, key)
    client_context.load_verify_locations(certificate)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return ssl.cert_time_to_seconds(str((client.getpeercert() or {})["notAfter"]))


def _schema(store: Store) -> CheckResult:
    try:
        current, newest = store.revisions()
    except Exception as error:
        return CheckResult("schema", "fail", f"cannot be read: {type(error).__name__}: {error}")
    if current == newest:
        return CheckResult("schema", "ok", f"at {current}, this version's")
    if current is None:
        return CheckResult("schema", "ok", f"empty; the first start creates {newest}")
    if current in store.earlier_revisions():
        detail = f"at {current}; back it up, then start this version, which upgrades it to {newest}"
    else:
        detail = f"at {current}, which a newer version made; this version supports up to {newest}: upgrade it"
    return CheckResult("schema", "fail", detail)


def _permissions(file: Path) -> CheckResult:
    if (problem := database_access.missing_right(file)) is not None:
        return CheckResult("permissions", "fail", problem)
    if any(path.stat().st_mode & 0o002 for path in database_access.files(file)):
        return CheckResult("permissions", "warn", f"every user can write {file}: chmod o-w")
    return CheckResult("permissions", "ok", f"{database_access.user()} can read and write {file}")


def _file_system(folder: Path) -> CheckResult:
    name = database_access.network_file_system(folder)
    if name is None:
        return CheckResult("file system", "ok", f"{folder} is on a local file system")
    if name == database_access.UNKNOWN:
        return CheckResult("file system", "warn", f"{folder} is on {name}, which may lack SQLite's locks")
    detail = f"{folder} is on {name}: SQLite may lose data there; use a local disk or PostgreSQL"
    return CheckResult("file system", "fail", detail)


def _disk(folder: Path, keep_free_bytes: int) -> CheckResult:
    disk = shutil.disk_usage(folder)
    detail = f"{disk.free / 1e9:.1f} of {disk.total / 1e9:.1f} GB free in {folder}"
    if disk.free < keep_free_bytes:
        return CheckResult("disk", "fail", f"{detail}: below DDPOBS_SERVER_KEEP_FREE_MB batches get 507")
    if disk.free < _FREE_BYTES:
        return CheckResult("disk", "fail", detail)
    return CheckResult("disk", "ok" if disk.free > _FREE_RATIO * disk.total else "warn", detail)


def _clock_synchronisation() -> CheckResult:
    """The kernel's report on this machine's clock. With SQLite there is no other clock to compare it with."""
    command = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEDATECTL_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return CheckResult("clock", "warn", "synchronisation is not known: timedatectl does not answer here")
    if process.stdout.strip() == "no":
        return CheckResult("clock", "warn", "not synchronised: start chrony or systemd-timesyncd")
    return CheckResult("clock", "ok", "synchronised")
