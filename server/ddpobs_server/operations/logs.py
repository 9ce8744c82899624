"""Log lines, including uvicorn's: JSON for machines, text on a terminal.

No text from a client can end a line: JSON escapes it, and text lines show unprintable characters as escapes.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any, TextIO

import structlog

from ddpobs import wire

_log = logging.getLogger(__name__)
_LINES, _WITHIN_S = 10, 10.0
"""Maximum number of warnings and errors of a kind in each interval of this many seconds."""
_VERBOSE = ("alembic", "uvicorn.error", "ddpobs_server.store.database.database_errors.Pool")
"""Loggers whose info lines (migrations, server states, connections) are written at the level debug only."""
_Line = MutableMapping[str, Any]


def configure(level: str, style: str, stream: TextIO = sys.stderr) -> None:
    """Write every logger's lines to a stream.

    Args:
        level: Lowest level that is written, as `logging` names it.
        style: `json`, `text`, or `auto` for text on a terminal and JSON elsewhere.
        stream: Target of the lines.
    """
    text = style == "text" or (style == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.addFilter(_Limit())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
                structlog.processors.TimeStamper(fmt="iso", key="time"),
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _without_colours,
                *(_text_processors(stream) if text else [structlog.processors.JSONRenderer()]),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(logging.WARNING if level == "info" else logging.NOTSET)
    sys.excepthook = _log_ended_thread
    threading.excepthook = lambda hook: _log_ended_thread(
        hook.exc_type, hook.exc_value, hook.exc_traceback, hook.thread
    )


class _Limit(logging.Filter):
    """Passes a limited number of warnings, errors and refusals of a kind. The next line has the number suppressed."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written. Lines from the same line of code with the same extra `kind` are of a kind."""
        if record.levelno < logging.WARNING and not hasattr(record, "kind"):
            return True
        kind = (record.pathname, record.lineno, str(getattr(record, "kind", "")))
        now = time.monotonic()
        with self._lock:
            began, lines = self._kinds.get(kind, (now, 0))
            if now - began > _WITHIN_S:
                if lines > _LINES:
                    record.suppressed = lines - _LINES
                began, lines = now, 0
            self._kinds[kind] = (began, lines + 1)
        return lines < _LINES


def _without_colours(_logger: object, _method: str, line: _Line) -> _Line:
    line.pop("color_message", None)  # a second copy of uvicorn's line, for a terminal
    line.pop("kind", None)
    line["event"] = str(line["event"]).strip()
    return line


def _text_processors(stream: TextIO) -> list[Any]:
    def printable(_logger: object, _method: str, line: _Line) -> _Line:
        line["event"] = wire.printable(line["event"])
        if "exception" in line:
            line["exception"] = "\n".join("    " + wire.printable(row) for row in line["exception"].split("\n"))
        return line

    console = structlog.dev.ConsoleRenderer(
        colors=stream.isatty(),
        repr_native_str=True,
        timestamp_key="time",
        exception_formatter=structlog.dev.plain_traceback,
    )
    return [printable, console]


def _log_ended_thread(
    kind: type[BaseException],
    error: BaseException | None,
    traceback: TracebackType | None,
    thread: threading.Thread | None = None,
) -> None:
    name = thread.name if thread else "main"
    _log.critical("thread %s ended", name, exc_info=(kind, error or kind(), traceback), extra={"kind": name})
