"""Description of an error that ends a training: its type, message, place, and a traceback of the user's own frames.

A deep stack of a library would push the user's lines out of a short traceback. So frames of libraries are counted, but
for the innermost two, and frames of ddpobs are left out.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from ddpobs import wire

OURS = str(Path(__file__).parents[1])
LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {OURS, "<frozen"}
)
"""Begins of the file names of code that is not the user's."""
_MESSAGE_CHARACTERS = 500
_TRACEBACK_BYTES = 4000
_ERROR_LINES = 10
_OUTER, _INNER = 3, 9
"""Maximum number of outermost and of innermost frames of the user's."""
_INNERMOST = 2
_CAUSES = 2
"""Maximum number of errors before the last one."""


def describe(error: BaseException, texts: bool) -> dict[str, wire.Scalar]:
    """Describe an error: its type, and with `texts` its message, its place in the user's code and its traceback."""
    detail: dict[str, wire.Scalar] = {"error": type(error).__name__}
    if texts:
        detail["message"] = _message(error)
        detail["place"] = place_of_error(error)
        text = _traceback(error, _CAUSES).encode(errors="replace")
        detail["traceback"] = text[-_TRACEBACK_BYTES:].decode(errors="ignore")
    return detail


def place_of_error(error: BaseException) -> str:
    """The innermost two of the user's lines, `train.py:57 → dataset.py:31 __getitem__`; empty without one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame)]
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-2:]]
    if lines and frames[-1].name != "<module>":
        lines[-1] += f" {frames[-1].name}"
    return " → ".join(lines)


def _is_library(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(LIBRARIES)


def _traceback(error: BaseException, causes: int) -> str:
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    parts = []
    if before is not None and causes:
        parts += [_traceback(before, causes - 1), "", "That led to:", ""]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OURS)]
    if frames:
        parts += ["Traceback (most recent call last):", *_frames(frames)]
    only = "".join(traceback.format_exception_only(error)).splitlines()
    return "\n".join([*parts, *only[-_ERROR_LINES:]])


def _frames(frames: list[traceback.FrameSummary]) -> list[str]:
    """Lines of the user's frames and of the innermost frames, with the number of those in between."""
    own = [index for index, frame in enumerate(frames) if not _is_library(frame)]
    shown = {*own[:_OUTER], *own[-_INNER:], *range(max(0, len(frames) - _INNERMOST), len(frames))}
    lines: list[str] = []
    left_out = 0
    for index, frame in enumerate(frames):
        if index not in shown:
            left_out += 1
            continue
        if left_out:
            lines.append(f"  … {left_out} more frame{'s' * (left_out != 1)}")
            left_out = 0
        lines.append(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}')
        lines += [f"    {frame.line}"] if frame.line else []
    return lines


def _message(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:  # The user's own class.
        return ""
    return message[:_MESSAGE_CHARACTERS].encode(errors="replace").decode()
