"""Stand-ins for CUDA's streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


def stand_in_stream() -> Any:
    """Torch's module creates a device's stream for this; on the host everything runs in order."""
    stream = mock.MagicMock()
    stream.__enter__.return_value = stream
    return mock.patch.multiple(
        torch,
        Stream=lambda *_: stream,
        Event=mock.MagicMock,
        accelerator=mock.MagicMock(),
    )


class Stream(nullcontext[None]):
    """A stream that runs its work at once."""

    device = torch.device("cpu")


@contextmanager
def cpu_streams() -> Iterator[None]:
    events, current = SimpleNamespace(record=int, wait=lambda stream: None), SimpleNamespace(wait_stream=id)
    with (
        mock.patch.object(torch, "Stream", Stream),
        mock.patch.object(torch, "Event", return_value=events),
        mock.patch.object(torch.accelerator, "current_stream", return_value=current),
    ):
        yield
