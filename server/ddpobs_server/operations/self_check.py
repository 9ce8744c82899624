"""Whether a collector could run here; nothing is changed by looking."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddpobs_server.settings import Settings
from ddpobs_server.store import Store

_FREE_BYTES, _FREE_RATIO = 10**9, 0.02
_SKEW_S = 5.0
_ASK_S = 5.0
_RENEWAL_DAYS = 7


@dataclass(frozen=True)
class CheckResult:
    """What one check found. A warning does not keep a collector from running."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str


def run(settings: Settings, integrity: bool = True) -> Iterator[CheckResult]:
    """Look at everything; the later checks need the earlier.

    Args:
        settings: Whose database and TLS files are looked at.
        integrity: Whether to read a whole SQLite file, which takes as long as reading it does.
    """
    shown, file = settings.database, settings.database_file
    if (wrong := address_problem(settings.host, 0)) is not None:
        yield CheckResult("address", "fail", wrong)
    if settings.tls_cert is not None:
        yield _tls(settings, settings.tls_cert)
    if file is not None:
        yield (allowed := _permissions(file))
        if allowed.state == "fail":
            return
        yield _disk(file.parent)
        yield _synchronised()
        if not file.exists():
            yield CheckResult("database", "ok", f"{shown} is not there yet: the first start makes it")
            yield from _access(settings, None)
            return
    store = Store(settings.database_url, read_only=True)
    try:
        yield from _database(settings, store, file is not None and integrity)
    finally:
        store.close()


def _database(settings: Settings, store: Store, integrity: bool) -> Iterator[CheckResult]:
    shown = settings.database
    try:
        store.ready()
    except Exception as error:
        yield CheckResult("database", "fail", f"{shown} does not answer: {type(error).__name__}: {error}")
        return
    yield CheckResult("database", "ok", f"{shown} answers")
    if integrity:
        wrong = store.integrity_errors()
        detail = "; ".join(wrong) or "the file is whole"
        yield CheckResult("integrity", "fail" if wrong else "ok", detail)
        if wrong:
            return
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
        detail = f"{skew_s:+.1f} s between the database's and this machine's"
        yield CheckResult("clock", "ok" if abs(skew_s) < _SKEW_S else "fail", detail)


def open_door(settings: Settings, tokens: bool) -> str | None:
    """Why nobody may be served with these settings: other machines could call, and need no token; else None.

    Args:
        settings: Where the collector listens, and a token it may have.
        tokens: Whether its database has any, revoked ones too.
    """
    if settings.on_loopback or settings.token is not None or tokens:
        return None
    return (
        f"host {settings.host} is not loopback or has a proxy before it, and there is no token: anyone could read "
        "and write. Set --token (DDPOBS_SERVER_TOKEN), make tokens with `ddpobs-server token create`, or listen "
        "on 127.0.0.1 without trusted proxies"
    )


def _access(settings: Settings, store: Store | None) -> Iterator[CheckResult]:
    if not settings.on_loopback:
        tokens = store is not None and store.revisions()[0] is not None and bool(store.tokens())
        wrong = open_door(settings, tokens)
        yield CheckResult("access", "fail" if wrong else "ok", wrong or "other machines may call, with a token")


def address_problem(host: str, port: int) -> str | None:
    """Why no server could listen there; None where one could."""

    async def bind() -> None:
        loop = asyncio.get_running_loop()
        (await loop.create_server(asyncio.Protocol, host, port, start_serving=False)).close()

    try:
        asyncio.run(bind())
    except (OSError, UnicodeError) as error:
        return f"cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}"
    return None


def tls_problem(settings: Settings) -> str | None:
    """Why no server could be started with the settings' certificate and key; None where one could, or without any."""
    if settings.tls_cert is None:
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        key = f" with {settings.tls_key}" if settings.tls_key else ""
        return f"tls_cert: expected a certificate chain and its key as PEM, {settings.tls_cert}{key} is none: {error}"
    return None


def _tls(settings: Settings, certificate: Path) -> CheckResult:
    if (wrong := tls_problem(settings)) is not None:
        return CheckResult("tls", "fail", wrong)
    try:
        days = (_expires_s(certificate, settings.tls_key) - time.time()) / 86_400
    except ssl.SSLCertVerificationError as error:
        return CheckResult("tls", "fail", f"no client takes {certificate}: {error.verify_message}")
    detail = f"{certificate} and its key fit, for {days:.0f} more days"
    return CheckResult("tls", "ok" if days > _RENEWAL_DAYS else "warn", detail)


def _expires_s(certificate: Path, key: Path | None) -> float:
    """When a certificate expires, as a client knows it that trusts it; a `time.time`.

    Raises:
        ssl.SSLCertVerificationError: No client would take it: it has expired, or is not valid yet.
    """
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ours.load_cert_chain(certificate, key)
    theirs.load_verify_locations(certificate)
    theirs.check_hostname = False
    theirs.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = theirs.wrap_bio(back, there), ours.wrap_bio(there, back, server_side=True)
    for one in (client, server, client):
        with suppress(ssl.SSLWantReadError):
            one.do_handshake()
    return ssl.cert_time_to_seconds(str((client.getpeercert() or {})["notAfter"]))


def _schema(store: Store) -> CheckResult:
    try:
        here, wanted = store.revisions()
    except Exception as error:
        return CheckResult("schema", "fail", f"cannot be read: {type(error).__name__}: {error}")
    if here == wanted:
        return CheckResult("schema", "ok", f"at {here}, this version's")
    if here is None:
        return CheckResult("schema", "ok", f"empty; the first start makes {wanted}")
    if here in store.earlier_revisions():
        return CheckResult("schema", "fail", f"at {here}; back it up, then start this version, which makes it {wanted}")
    return CheckResult("schema", "fail", f"at {here}, which a newer version made; this one knows {wanted}: upgrade it")


def _permissions(file: Path) -> CheckResult:
    paths = [path for path in (file, Path(f"{file}-wal"), Path(f"{file}-shm")) if path.exists()]
    denied = [str(path) for path in paths if not os.access(path, os.R_OK | os.W_OK)]
    if not os.access(file.parent, os.R_OK | os.W_OK | os.X_OK):
        denied.insert(0, str(file.parent))
    who = f"user {os.geteuid()}"
    if denied:
        return CheckResult("permissions", "fail", f"{who} may not read and write {', '.join(denied)}")
    if any(path.stat().st_mode & 0o002 for path in paths):
        return CheckResult("permissions", "warn", f"anybody may write {file}: chmod o-w")
    return CheckResult("permissions", "ok", f"{who} may read and write {file}")


def _disk(folder: Path) -> CheckResult:
    disk = shutil.disk_usage(folder)
    detail = f"{disk.free / 1e9:.1f} of {disk.total / 1e9:.1f} GB free in {folder}"
    if disk.free < _FREE_BYTES:
        return CheckResult("disk", "fail", detail)
    return CheckResult("disk", "ok" if disk.free > _FREE_RATIO * disk.total else "warn", detail)


def _synchronised() -> CheckResult:
    """What the kernel says of this machine's clock: with SQLite there is no other to compare it with."""
    ask = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=_ASK_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return CheckResult("clock", "ok", "whether it is synchronised is not known: timedatectl does not answer here")
    if answer == "no":
        return CheckResult("clock", "warn", "not synchronised: start chrony or systemd-timesyncd")
    return CheckResult("clock", "ok", "synchronised")
