"""Phases from torchtitan's spans: a handler of its structured logger.

torchtitan logs the begin and the end of each span. A model of FSDP2 or DDP is recorded by its own door; the spans add
where batches are fetched. Any other model, as one with tensor parallelism alone, gets its steps from the spans, from
the second step on: the first one shows whether another door records it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddpobs import config as settings
from ddpobs import telemetry
from ddpobs.clocks import Stamp
from ddpobs.never_raises import never_raises
from ddpobs.observers import ModuleObserver


def register(*, structured_logger: logging.Logger, **_: Any) -> None:
    """Record torchtitan's spans, as a factory of `TITAN_STRUCT_LOGGER_HANDLERS`; nothing while telemetry is off.

    Args:
        structured_logger: torchtitan's logger of spans.
        **_: The other arguments of a factory (`rank`, `source`, `output_dir`).

    Raises:
        ConfigError: A setting in the environment has an invalid value.
    """
    config = settings.resolve(None, os.environ)
    if config is not None:
        structured_logger.addHandler(SpanHandler(config))


class SpanHandler(logging.Handler):
    """Reports spans to telemetry.

    Args:
        config: Settings of a telemetry that it starts.
    """

    def __init__(self, config: settings.TelemetryConfig) -> None:
        super().__init__()
        self._config = config
        self._model = torch.nn.Module()
        """Stands for the parts of the model, in its mode."""
        self._observer: ModuleObserver | None = None
        self._is_fetching = False
        self._last_ready: Stamp = 0
        """End of the latest backward whose gradients no optimizer has used."""
        self._reports: dict[str, Callable[[], None]] = {
            "fetching_batch_start": self._fetch_began,
            "fetching_batch_end": self._fetch_ended,
            "fwd_bwd_start": self._forward_began,
            "fwd_bwd_end": self._backward_ended,
            "optim_start": self._optimizer_began,
            "eval_start": self._evaluation_began,
            "eval_end": self._evaluation_ended,
        }

    @never_raises
    def emit(self, record: logging.LogRecord) -> None:
        """Report the begin or the end of a span that has a meaning here."""
        report = self._reports.get(getattr(record, "log_type_name", ""))
        if report is not None:
            report()

    def _fetch_began(self) -> None:
        self._is_fetching = telemetry.fetch_began(id(self))

    def _fetch_ended(self) -> None:
        if self._is_fetching:
            self._is_fetching = False
            telemetry.fetch_ended()

    def _forward_began(self) -> None:
        if self._observer is not None:
            self._observer.forward_began(())

    def _backward_ended(self) -> None:
        if self._observer is not None:
            self._last_ready = self._observer.now()

    def _optimizer_began(self) -> None:
        """Close the backward passes since the last step: the gradients are reduced."""
        observer, last_ready, self._last_ready = self._observer, self._last_ready, 0
        if observer is None:
            self._join()
        if observer is None or not last_ready:
            return
        record = observer.backward()
        if record is not None and observer.waiting_began():
            record.last_ready = last_ready
            observer.finished(record)
            observer.waiting_ended()

    def _join(self) -> None:
        if dist.group.WORLD is not None and not telemetry.is_recording():
            self._observer = telemetry.join(
                self._model, self._config, dist.group.WORLD, {"reducer": "torchtitan"}, "torchtitan"
            )

    def _evaluation_began(self) -> None:
        self._model.eval()
        self._forward_began()

    def _evaluation_ended(self) -> None:
        self._model.train()
