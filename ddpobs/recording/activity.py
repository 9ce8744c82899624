"""What the training thread is doing right now, read from its Python frames by the telemetry thread.

A look takes the interpreter for some microseconds and costs the training thread nothing else. A rank makes progress
when its journal has new entries, or when its frames have moved since the last look. In a wait for the other ranks, and
while worker processes prepare a batch, moving frames mean nothing: such loops poll.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Literal

import torch

Kind = Literal["data", "bucket", "collective", "checkpoint", "compile", "evaluation", "code"]

_FRAMES = 40
"""Innermost frames that are looked at, and sent."""
_FIRST_STEP_S = 120.0
"""Patience before a rank has finished steps: a first step compiles, warms caches up and fills loaders."""
_STEPS_OF_PATIENCE = 5
_INTERVALS = 32
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {_OURS, "<frozen"}
)
_LOADER = (f"{_TORCH}/utils/data/",)
_POLLING = (
    *_LOADER,
    *(
        f"{sysconfig.get_path('stdlib')}/{name}"
        for name in ("multiprocessing", "queue.py", "threading.py", "selectors.py")
    ),
)
_CHECKPOINT = (f"{_TORCH}/serialization.py", f"{_TORCH}/distributed/checkpoint/")
_COMPILE = (f"{_TORCH}/_dynamo/", f"{_TORCH}/_inductor/", f"{_TORCH}/_functorch/")
_DISTRIBUTED = f"{_TORCH}/distributed/"
_REDUCER = tuple(f"{_OURS}/{folder}" for folder in ("reducer/", "comm/", "torch_seam/collectives.py"))
_DDP_MODULE = f"{_TORCH}/nn/parallel/distributed.py"
_ENGINE = "_engine_run_backward"


@dataclass(frozen=True)
class Activity:
    """One look at the training thread.

    Attributes:
        kind: `bucket` and `collective` are waits for the other ranks.
        waits_in: Name of the collective, empty for other kinds.
        place: Innermost two lines of the user's code, such as `train.py:57 → dataset.py:31 __getitem__`.
        stack: Its frames, outermost first.
        idle_ns: Time since the rank's last progress.
        patience_ns: Time without progress after which the rank counts as stuck.
    """

    kind: Kind = "code"
    waits_in: str = ""
    place: str = ""
    stack: list[str] = field(default_factory=list)
    idle_ns: int = 0
    patience_ns: int = 0

    @property
    def is_stuck(self) -> bool:
        """Whether the rank made no progress for longer than its steps justify."""
        return self.idle_ns >= self.patience_ns


class ActivityWatch:
    """Follows the training thread from look to look.

    Args:
        hang_after_s: Least time without progress after which a rank counts as stuck.
    """

    def __init__(self, hang_after_s: float) -> None:
        self._hang_after_s = hang_after_s
        self._entries = -1
        self._lines: Sequence[tuple[object, int]] = ()
        self._progress_ns = time.monotonic_ns()
        self._step = -1
        self._step_ns = self._progress_ns
        self._intervals_s: deque[float] = deque(maxlen=_INTERVALS)

    def look(
        self, thread: int, *, entries: int, step: int, phase: str, bucket_pending: bool, waiting: bool, evaluating: bool
    ) -> Activity:
        """Look once.

        Args:
            thread: Identifier of the training thread, 0 where it is not known yet.
            entries: Journal entries so far.
            step: Number of the open step.
            phase: Its phase.
            bucket_pending: A bucket was launched and has not completed.
            waiting: The journal has an open wait for a collective of user code.
            evaluating: Every module is in evaluation mode.
        """
        now_ns = time.monotonic_ns()
        frames = list(_frames_of(thread))
        kind, waits_in = classify(frames, phase, bucket_pending=bucket_pending, waiting=waiting, evaluating=evaluating)
        lines = _lines(frames, skip=_POLLING if kind == "data" else ())
        moved = lines != self._lines and kind not in {"bucket", "collective"}
        if entries != self._entries or moved:
            self._progress_ns = now_ns
        self._entries, self._lines = entries, lines
        if step != self._step:
            if step > self._step >= 0:
                self._intervals_s.append((now_ns - self._step_ns) / 1e9 / (step - self._step))
            self._step, self._step_ns = step, now_ns
        return Activity(
            kind=kind,
            waits_in=waits_in,
            place=place_of(frames),
            stack=[_frame_text(frame) for frame in reversed(frames)],
            idle_ns=now_ns - self._progress_ns,
            patience_ns=self._patience_ns(),
        )

    def _patience_ns(self) -> int:
        steps_s = _STEPS_OF_PATIENCE * median(self._intervals_s) if self._intervals_s else _FIRST_STEP_S
        return int(max(self._hang_after_s, steps_s) * 1e9)


def classify(
    frames: Sequence[FrameType], phase: str, *, bucket_pending: bool, waiting: bool, evaluating: bool
) -> tuple[Kind, str]:
    """Return the kind of activity that frames show, innermost frame first, and the collective's name in a wait."""
    files = [frame.f_code.co_filename for frame in frames]
    inner = files[0] if files else ""
    name = _collective_name(frames)
    in_engine = bool(frames) and frames[0].f_code.co_name == _ENGINE
    kinds: list[tuple[bool, Kind, str]] = [
        (any(file.startswith(_COMPILE) for file in files), "compile", ""),
        (any(file.startswith(_CHECKPOINT) for file in files) and not waiting, "checkpoint", ""),
        (inner.startswith(_REDUCER), "bucket", ""),
        (waiting or (name != "" and inner.startswith(_DISTRIBUTED)), "collective", name or "a collective"),
        (inner.startswith(_DDP_MODULE), "collective", "the broadcast of buffers"),
        (in_engine and bucket_pending, "bucket", ""),
        (phase == "data" or any(file.startswith(_LOADER) for file in files), "data", ""),
        (evaluating, "evaluation", ""),
        (True, "code", ""),
    ]
    return next((kind, waits_in) for applies, kind, waits_in in kinds if applies)


def place_of(frames: Sequence[FrameType]) -> str:
    """The innermost two lines of code outside of libraries, `outer.py:57 → inner.py:31 function`."""
    inner, outer = [*(frame for frame in frames if not frame.f_code.co_filename.startswith(_LIBRARIES)), None, None][:2]
    if inner is None:
        return ""
    text = f"{Path(inner.f_code.co_filename).name}:{inner.f_lineno}"
    if inner.f_code.co_name != "<module>":
        text += f" {inner.f_code.co_name}"
    return text if outer is None else f"{Path(outer.f_code.co_filename).name}:{outer.f_lineno} → {text}"


def _frames_of(thread: int) -> Iterator[FrameType]:
    """Frames of a thread, innermost first, without the frames of telemetry's own patches."""
    frame = sys._current_frames().get(thread)
    count = 0
    while frame is not None and count < _FRAMES:
        if not frame.f_code.co_filename.startswith(f"{_OURS}/recording/"):
            yield frame
            count += 1
        frame = frame.f_back


def _lines(frames: Sequence[FrameType], skip: tuple[str, ...]) -> Sequence[tuple[object, int]]:
    return [
        (frame.f_code, frame.f_lineno) for frame in frames if not (skip and frame.f_code.co_filename.startswith(skip))
    ]


def _collective_name(frames: Sequence[FrameType]) -> str:
    """Name of torch's public function that the user's code called, or of Horovod's; empty where there is none."""
    name = ""
    for frame in frames:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith((_DISTRIBUTED, f"{_OURS}/horovod/")):
            break
        if not function.startswith("_") and function not in {"wrapper", "timed", "wait"}:
            name = function
    return name


def _frame_text(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    for library in _LIBRARIES:
        path = path.removeprefix(f"{library}/")
    return f"{path[-160:]}:{frame.f_lineno} {frame.f_code.co_name}"[:256]
