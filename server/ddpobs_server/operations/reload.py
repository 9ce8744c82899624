"""Reload after SIGHUP: certificate, tokens and limits. All is checked first; a fault leaves all as it was."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable

from fastapi import FastAPI
from pydantic import ValidationError

from ddpobs_server.operations import self_check
from ddpobs_server.operations.wrong_settings import problems_of
from ddpobs_server.settings import Settings
from ddpobs_server.store import DEFAULT_WORKSPACE, AuditEntry
from ddpobs_server.web.services import Services

_log = logging.getLogger(__name__)
RELOADED = frozenset(
    (
        *("token", "token_file", "tls_cert", "tls_key", "upload_timeout_s", "min_pace_kb_s", "audit_entries"),
        *("max_body_mb", "max_batch_mb", "max_records", "max_names", "max_name_length", "max_layouts", "max_buckets"),
        *("max_ranks", "max_sources", "max_runs", "max_run_series", "max_series"),
        *("max_import_mb", "import_memory_mb", "import_timeout_s"),
        *(
            "workspace_share",
            "workspace_batches_per_s",
            "workspace_mb_per_s",
            "workspace_reads_per_s",
            "workspace_keep_gb",
        ),
        *("keep_spans_days", "keep_runs_days", "keep_gb", "keep_share"),
    )
)
"""Settings that a running collector follows after a reload: whoever uses one reads it at that moment.

`host` and `trusted_proxies` stay, as `Settings` keeps what follows from them.
"""
_TLS = frozenset(("tls_cert", "tls_key"))


class Reload:
    """Reads the settings again, and lets a running collector follow them.

    Args:
        app: The application, which has its services once it has started.
        read_settings: Reads flags, environment and files as at the start.
    """

    def __init__(self, app: FastAPI, read_settings: Callable[[], Settings]) -> None:
        self._app, self._read_settings = app, read_settings
        self._lock = threading.Lock()

    def __call__(self, tls: ssl.SSLContext | None) -> None:
        """Reload; never raises.

        Args:
            tls: Context of new connections; None without TLS.
        """
        services: Services = self._app.state.services
        with self._lock:
            try:
                self._reload(services, tls)
            except ValidationError as error:
                _refuse(services, "; ".join(problems_of(error)))
            except _RefusedError as refusal:
                _refuse(services, str(refusal))
            except Exception as error:
                _refuse(services, f"{type(error).__name__}: {error}")

    def _reload(self, services: Services, tls: ssl.SSLContext | None) -> None:
        present, new = services.settings, self._read_settings()
        has_tokens = bool(services.store.tokens())
        if problem := self_check.tls_problem(new) or self_check.access_problem(new, has_tokens):
            raise _RefusedError(problem)
        if tls is not None and new.tls_cert is not None:
            tls.load_cert_chain(new.tls_cert, new.tls_key)
        can_change_tls = tls is not None and new.tls_cert is not None
        changed = present.adopt(new, RELOADED if can_change_tls else RELOADED - _TLS)
        services.authenticator.reload()
        services.limits.refresh()
        services.reloaded.set(1)
        values = [f"{name}={getattr(new, name)}" for name in changed]  # Secrets print as asterisks.
        waiting = present.differing(new)
        services.store.add_audit_entry(_entry(values, waiting))
        _log.info("settings, tokens and certificate were read again; changed: %s", ", ".join(values) or "no setting")
        if waiting:
            _log.warning("these settings changed and need a restart: %s", ", ".join(waiting))
        if (weakness := self_check.token_problem(present)) is not None:
            _log.warning(weakness)


class _RefusedError(Exception):
    """Nothing was changed; the message has the reason."""


def _refuse(services: Services, reason: str) -> None:
    services.reloaded.set(0)
    _log.error("the reload is refused, and the former settings, tokens and certificate stay in use: %s", reason)


def _entry(changed: list[str], waiting: list[str]) -> AuditEntry:
    return AuditEntry(
        action="settings.reload",
        subject="settings",
        workspace=DEFAULT_WORKSPACE,
        kind="signal",
        identity="",
        token_id="",
        peer=socket.gethostname(),
        detail={"changed": changed, "need_restart": waiting},
        at_ns=time.time_ns(),
    )
