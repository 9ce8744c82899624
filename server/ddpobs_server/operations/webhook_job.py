"""Sends new findings to the webhook, for people without Alertmanager. Nothing waits for its thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from ddpobs_server.operations.webhook_message import message_of
from ddpobs_server.operations.webhook_sender import MAX_AGE_S, WebhookSender
from ddpobs_server.reports.outline import DiagnosisOutline
from ddpobs_server.reports.reports import Reports
from ddpobs_server.settings import Settings
from ddpobs_server.store import NotificationKey, Run, Store

_log = logging.getLogger(__name__)
PERIOD_S = 15.0
"""Seconds between two rounds over the active runs."""
_LEASE_NS = int((MAX_AGE_S + 60) * 1e9)
"""Time for which one collector alone may send the findings that it has claimed: longer than its retries."""
_KNOWN = 20_000
"""Attempts whose sent findings are remembered."""
_CLOSE_S = 2.0
_SEVERITIES = {"critical": ("critical",), "warning": ("critical", "warning")}
_ALWAYS = ("lost",)
"""Codes that are sent with any severity: a job that went away costs all of its time."""


class WebhookJob:
    """Sends the findings of each code and severity once an attempt, also with several collectors on a database.

    Args:
        settings: The webhook, and which findings it gets.
        store: Holds what was sent.
        reports: Source of the findings.
        registry: Receives the metric.
        now_s: A monotonic clock.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        reports: Reports,
        registry: CollectorRegistry,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._store, self._reports, self._now_s = settings, store, reports, now_s
        url, secret = settings.webhook_url, settings.webhook_secret
        self._is_on = url is not None
        self._sender = WebhookSender(
            url.get_secret_value() if url else "", secret.get_secret_value() if secret else None, registry, now_s
        )
        self._since_s: dict[NotificationKey, float] = {}
        """When each present finding was first seen."""
        self._sent: OrderedDict[tuple[str, str], set[NotificationKey]] = OrderedDict()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpobs-webhook", daemon=True)

    def start(self) -> None:
        """Start the thread, if there is a webhook."""
        if self._is_on:
            self._thread.start()

    def close(self) -> None:
        """End the thread, and let other collectors send what waits."""
        self._closing.set()
        if self._is_on:
            self._thread.join(_CLOSE_S)
            for message in self._sender.waiting:
                self._store.release_notification(message.key)

    def judge(self) -> None:
        """Run a round: queue the messages about findings that are new."""
        now_ns = time.time_ns()
        quiet_ns = int(self._settings.quiet_after_s * 1e9)
        present: dict[NotificationKey, float] = {}
        for workspace in self._store.runs_by_workspace():
            active = self._store.active_runs(now_ns - quiet_ns, now_ns + quiet_ns, workspace)
            runs = [run for run in active if not run.imported]
            for run, outline in zip(runs, self._reports.recent_diagnostics(runs), strict=True):
                with self._reports.faults.contained("webhook", run.run):
                    keys = self._severe_enough(run, outline)
                    present |= {key: self._since_s.get(key, self._now_s()) for key in keys}
                    self._queue(run, workspace, [key for key in keys if self._holds(present[key])], now_ns)
        self._since_s = present

    def send_due(self) -> None:
        """Send the messages that are due."""
        while self._sender.wait_s == 0 and not self._closing.is_set():
            if (message := self._sender.send_next()) is not None:
                self._store.mark_notification_sent(message.key, time.time_ns())

    def _severe_enough(self, run: Run, outline: DiagnosisOutline | None) -> set[NotificationKey]:
        severities = _SEVERITIES[self._settings.webhook_severity]
        counts = outline.counts if outline else {}
        kinds = [kind for kind in counts if kind[1] in severities or kind[0] in _ALWAYS]
        return {NotificationKey(run.run, run.attempt, *kind) for kind in kinds}

    def _holds(self, since_s: float) -> bool:
        return self._now_s() - since_s >= self._settings.webhook_after_s

    def _queue(self, run: Run, workspace: str, keys: list[NotificationKey], now_ns: int) -> None:
        attempt = (run.run, run.attempt)
        if not set(keys) - self._sent.get(attempt, set()):
            return
        self._sent[attempt] = self._store.sent_notifications(*attempt)
        self._sent.move_to_end(attempt)
        while len(self._sent) > _KNOWN:
            self._sent.popitem(last=False)
        if not (new := [key for key in keys if key not in self._sent[attempt]]):
            return
        findings = self._reports.diagnostics_for_marks(*attempt)["findings"]
        for key in new:
            own = [finding for finding in findings if (finding["code"], finding["severity"]) == key[2:]]
            if own and self._sender.free > 0 and self._store.claim_notification(key, now_ns, _LEASE_NS):
                self._sender.put(message_of(key, workspace, own, self._settings, now_ns))

    def _run(self) -> None:
        next_s = self._now_s()
        while not self._closing.wait(min(self._sender.wait_s, max(0.0, next_s - self._now_s()))):
            try:
                if self._now_s() >= next_s:
                    next_s = self._now_s() + PERIOD_S
                    self.judge()
                self.send_due()
            except Exception:
                _log.exception("the webhook's round failed; the next one starts in %g s", PERIOD_S)
                self._closing.wait(PERIOD_S)
