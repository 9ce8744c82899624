"""Stamps of one synchronised backward, which training stores and the step tracker reads."""

from __future__ import annotations

from typing import Any

from ddpobs.clocks import Stamp

_NO_PLACE = memoryview(bytearray(8)).cast("q")


class BackwardRecord:
    """Stamps of one synchronised backward of one module: a list per event, with one element per bucket.

    Attributes:
        module: Index of the module.
        revision: Number of its layout.
        ready_ns: Readiness of each bucket's last gradient.
        launched_ns: Hand-over of each bucket to the process group.
        done_ns: Completion of each bucket's communication.
        works: Collectives that report their time on the network; empty if the backend does not.
        last_ready: Readiness of the last gradient, set if buckets are not visible.
        waited_from_ns: Begin of the wait for each bucket's communication, 0 without one; None if training waits once,
            after the last gradient.
        last_bucket: One element, the index of the bucket launched last, in the process's place.
        parameter_ready_ns: Readiness of each parameter's gradient; None if this backward is not sampled.
    """

    __slots__ = (
        "done_ns",
        "last_bucket",
        "last_ready",
        "launched_ns",
        "module",
        "parameter_ready_ns",
        "ready_ns",
        "revision",
        "waited_from_ns",
        "works",
    )

    def __init__(self, module: int, revision: int = 0, buckets: int = 0, parameters: int | None = None) -> None:
        self.module = module
        self.revision = revision
        self.ready_ns: list[Stamp] = [0] * buckets
        self.launched_ns: list[Stamp] = [0] * buckets
        self.done_ns: list[Stamp] = [0] * buckets
        self.works: dict[int, Any] = {}
        self.last_ready: Stamp = 0
        self.waited_from_ns: list[Stamp] | None = None
        self.last_bucket: memoryview[int] = _NO_PLACE
        self.parameter_ready_ns: list[Stamp] | None = None if parameters is None else [0] * parameters
