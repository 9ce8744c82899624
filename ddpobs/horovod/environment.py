"""Horovod's settings in the environment: those with a meaning here, and answers to the others."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Mapping
from dataclasses import replace

from ddpobs.config import TelemetryConfig
from ddpobs.errors import HorovodError
from ddpobs.horovod import timeline
from ddpobs.horovod.position import rank

_log = logging.getLogger("ddpobs")

_STALL_TIME = "HOROVOD_STALL_CHECK_TIME_SECONDS"
ANSWERS = {
    "HOROVOD_AUTOTUNE": (
        "buckets are those of DDP, and HOROVOD_FUSION_THRESHOLD changes them. `ddpobs report` has what other buckets "
        "would gain"
    ),
    "HOROVOD_CYCLE_TIME": "there are no cycles: a bucket starts when its last gradient is ready",
    "HOROVOD_STALL_CHECK_DISABLE": "telemetry reports a hang after DDPOBS_HANG_AFTER_S; without telemetry none does",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "a collective fails after the process group's timeout, 30 minutes for gloo",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "the backend chooses how it reduces: NCCL by itself",
}
"""By setting without an effect: what happens instead."""


def apply(environ: Mapping[str, str]) -> None:
    """Start the timeline that HOROVOD_TIMELINE names, and let rank 0 log the answers to settings without an effect."""
    path = environ.get("HOROVOD_TIMELINE", "")
    if path and path != "DYNAMIC" and timeline.current() is None:
        timeline.start_timeline(path, _is_set(environ, "HOROVOD_TIMELINE_MARK_CYCLES"))
        atexit.register(timeline.stop_timeline)
    if rank() == 0:
        for name, answer in ANSWERS.items():
            if _is_set(environ, name):
                _log.warning("ddpobs: %s=%s has no effect: %s", name, environ[name], answer)


def with_stall_check(config: TelemetryConfig, environ: Mapping[str, str]) -> TelemetryConfig:
    """Return the settings with Horovod's stall check, which is a hang here, unless DDPOBS_HANG_AFTER_S is set.

    Raises:
        HorovodError: HOROVOD_STALL_CHECK_TIME_SECONDS is no number of seconds.
    """
    text = environ.get(_STALL_TIME, "")
    if not text or "DDPOBS_HANG_AFTER_S" in environ:
        return config
    try:
        return replace(config, hang_after_s=float(text))
    except ValueError:
        raise HorovodError(f"{_STALL_TIME}: expected a number of seconds above 0, got {text!r}") from None


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0").lower() not in ("", "0", "0.0", "false")
