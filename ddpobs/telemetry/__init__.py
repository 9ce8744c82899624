"""Telemetry of a process, which its DDP modules share: a process has at most one.

`join` starts it with the first module, and `leave` ends it with the last. A module that was garbage-collected is only
forgotten: collection happens at different times on different ranks, and telemetry goes on for the modules after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from ddpobs import wire
from ddpobs.client.client import Run
from ddpobs.config import TelemetryConfig
from ddpobs.never_raises import goes_on_without
from ddpobs.observers import ModuleObserver
from ddpobs.telemetry.process import Telemetry
from ddpobs.torch_seam.collectives import ranks_of
from ddpobs.torch_seam.modes import unseen

__all__ = [
    "Telemetry",
    "current_run",
    "fetch_began",
    "fetch_ended",
    "forget",
    "is_recording",
    "join",
    "leave",
    "was_joined",
]

_process: Telemetry | None = None
_generation = 0
"""Number of telemetries that this process has had. It is equal on all ranks, so an older identity never matches."""
_failed_in: weakref.ref[dist.ProcessGroup] | None = None
"""Process group in which telemetry could not start: a further module does not try again, apart from the other ranks."""


@unseen
@goes_on_without
def join(
    module: torch.nn.Module,
    config: TelemetryConfig,
    process_group: dist.ProcessGroup,
    settings: Mapping[str, wire.Scalar],
    name: str | None = None,
) -> ModuleObserver | None:
    """Start recording one DDP module; None, after one line with the reason, if telemetry cannot start.

    The first module of a process starts the telemetry thread and installs the hooks. So does the first module after the
    process has left its process group and joined a new one, perhaps with another rank.

    Args:
        module: The DDP module itself, or its substitute; held weakly.
        config: Settings; those of the process's first module apply.
        process_group: Process group of the module, which determines the backend.
        settings: Settings of the reducer that matter for a diagnosis.
        name: Name of the module; None for the class of the wrapped module.
    """
    global _process  # noqa: PLW0603 - one telemetry per process
    if _process is not None and not _process.current:
        process, _process = _process, None
        process.close()
    if _process is None:
        if _failed_in is not None and _failed_in() is dist.group.WORLD:
            return None
        settings = {**settings, **_group(process_group)}
        _process = _start(config, _device(module), process_group, settings)
    return _process.recorder(module, ranks_of(process_group), name)


def _group(group: dist.ProcessGroup) -> dict[str, wire.Scalar]:
    """Size of the group, and its first rank if it is a part of the world: ranks of other groups are not compared."""
    ranks = ranks_of(group)
    first = {"group_first": ranks[0]} if len(ranks) < dist.get_world_size() else {}
    return {"group_ranks": len(ranks), **first}


def _start(
    config: TelemetryConfig, device: torch.device, group: dist.ProcessGroup, settings: Mapping[str, wire.Scalar]
) -> Telemetry:
    global _generation, _failed_in  # noqa: PLW0603 - one telemetry per process
    _generation += 1
    try:
        return Telemetry(config, device, group, settings, _generation)
    except BaseException:
        world = dist.group.WORLD
        _failed_in = None if world is None else weakref.ref(world)
        raise


def leave(recorder: ModuleObserver) -> None:
    """Stop recording a module; with the last module the process's telemetry ends, thread and hooks included."""
    global _process
    if _process is not None and _process.leave(recorder):
        process, _process = _process, None
        process.close()


def forget(recorder: ModuleObserver, stop_listening: Callable[[], None] = lambda: None) -> None:
    """Stop recording a deleted module; the process's telemetry continues for later modules.

    Args:
        recorder: Recorder of the module.
        stop_listening: Removes the door's callbacks.
    """
    stop_listening()
    if _process is not None:
        _process.leave(recorder)


def fetch_began(source: int) -> bool:
    """Record that the training thread requests a batch; `source` is any number. False if it is not recorded."""
    return _process is not None and _process.fetch_began(source)


def fetch_ended() -> None:
    """Record the end of a fetch for which `fetch_began` returned True."""
    if _process is not None:
        _process.fetch_ended()


def current_run() -> Run | None:
    """Return this process's run at its collector; None without telemetry, or before the ranks agree on the run."""
    return None if _process is None else _process.run


def is_recording() -> bool:
    """Whether telemetry of this process runs."""
    return _process is not None


def was_joined() -> bool:
    """Whether a module of this process has joined, also if its telemetry could not start or has ended."""
    return _generation > 0


def _device(module: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
