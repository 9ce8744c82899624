"""Building of batches from queued records, on the telemetry thread."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import torch

import ddpobs
from ddpobs import wire
from ddpobs.export.identity import Envelope
from ddpobs.shared.processors import format_processors
from ddpobs.steps.compile_time import ReadCompilations
from ddpobs.steps.raw_step import RawStep
from ddpobs.steps.step_columns import RawSteps
from ddpobs.steps.summary import Summariser, Summary

_RESOLUTION_NS = 1000
"""Resolution of sent stamps: a callback may come tens of microseconds late."""
_REPEAT_HELLO = 30
"""Batches after which hello and layouts are sent again, in case the batch with the earlier ones was dropped."""


class BatchEncoder:
    """Builds the batches of one process.

    Args:
        hello: Identity of the process, sent in the first batch and again every `_REPEAT_HELLO` batches.
        read_step: Adds the stamps of a step to columns; returns a false value if the device failed.
        on_steps: Receives each batch's steps.
        count_lost: Receives the number of records that could not be read.
        account: Returns the account of the process's wall time, with these steps and the time outside of them.
        compilations: As for `Summariser`.
    """

    def __init__(
        self,
        hello: wire.Hello,
        read_step: Callable[[RawSteps, RawStep], object],
        on_steps: Callable[[wire.Steps], None],
        count_lost: Callable[[int], None],
        account: Callable[[Summary | None], wire.Account | None] = lambda _: None,
        *,
        compilations: ReadCompilations = lambda: None,
    ) -> None:
        self._hello, self._read_step = hello, read_step
        self._on_steps, self._count_lost, self._account = on_steps, count_lost, account
        self._summariser = Summariser(_RESOLUTION_NS, compilations)
        self._layouts: dict[int, wire.Layout] = {}
        self._batches = 0

    def add_settings(self, settings: Mapping[str, wire.Scalar]) -> None:
        """Add settings to the process's hello, before its first batch."""
        self._hello = msgspec.structs.replace(self._hello, settings={**self._hello.settings, **settings})

    def encode(self, records: Sequence[object], envelope: Envelope, modules: Collection[int]) -> wire.Batch:
        """Build a batch.

        Args:
            records: Steps, layouts and other records, in the order in which they were offered.
            envelope: Identity and counts.
            modules: Indexes of the DDP modules that still exist.
        """
        summary = self._summarise(records)
        layouts = [record for record in records if isinstance(record, wire.Layout)]
        self._layouts.update({layout.module: layout for layout in layouts})
        repeat = self._batches % _REPEAT_HELLO == 0
        self._batches += 1
        if repeat:
            layouts = self._with_earlier(layouts, modules)
        pulses = [record for record in records if isinstance(record, wire.Pulse)]
        return wire.Batch(
            version=wire.VERSION,
            **vars(envelope),
            hello=self._hello if repeat else None,
            layouts=layouts,
            steps=summary.steps if summary else None,
            spans=summary.spans if summary and len(summary.spans.step) else None,
            comms=summary.comms if summary and len(summary.comms.step) else None,
            readiness=summary.readiness if summary else [],
            unused=[record for record in records if isinstance(record, wire.Unused)],
            peers=[record for record in records if isinstance(record, wire.Peers)],
            fingerprints=[record for record in records if isinstance(record, wire.Fingerprint)],
            pulse=pulses[-1] if pulses else None,
            account=self._account(summary),
            events=[record for record in records if isinstance(record, wire.Event)],
        )

    def _summarise(self, records: Sequence[object]) -> Summary | None:
        steps = RawSteps()
        for record in records:
            if isinstance(record, RawSteps):
                steps.extend(record)
            elif isinstance(record, RawStep) and not self._read_step(steps, record):
                self._count_lost(record.records)
        if not steps.number:
            return None
        summary = self._summariser.summarise(steps)
        self._on_steps(summary.steps)
        return summary

    def _with_earlier(self, layouts: list[wire.Layout], modules: Collection[int]) -> list[wire.Layout]:
        """Add the latest layout of each other module, then drop the layouts of deleted modules."""
        new = {(layout.module, layout.revision) for layout in layouts}
        earlier = [layout for layout in self._layouts.values() if (layout.module, layout.revision) not in new]
        present = {*modules, *(layout.module for layout in layouts)}
        self._layouts = {module: layout for module, layout in self._layouts.items() if module in present}
        return layouts + earlier


def describe_process(device: torch.device, backend: str, settings: Mapping[str, wire.Scalar]) -> wire.Hello:
    """Describe this process: host, device, versions and settings.

    Args:
        device: Device of the first DDP module's parameters.
        backend: Name of the process group's backend.
        settings: Settings of the reducer that matter for a diagnosis.
    """
    return wire.Hello(
        host=socket.gethostname(),
        pid=os.getpid(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        backend=backend,
        versions={"ddpobs": ddpobs.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
        settings={"processors": _processors(), "threads": torch.get_num_threads(), **settings},
    )


def _processors() -> str:
    """Return the processors that this process may use, as ranges: `0-3,8`."""
    try:
        numbers = os.sched_getaffinity(0)
    except (AttributeError, OSError):  # Only Linux has it.
        numbers = set(range(os.cpu_count() or 0))
    return format_processors(numbers)
