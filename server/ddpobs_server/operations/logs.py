"""Log lines: JSON for machines, text on a terminal, uvicorn's through the same.

No text that a client chose can end a line: JSON escapes it, and text shows what cannot be printed as an escape.
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

_log = logging.getLogger(__name__)
_LINES, _WITHIN_S = 10, 10.0
"""Most warnings and errors of one kind within so long."""
_VERBOSE = ("alembic", "uvicorn.error", "ddpobs_server.store.database_errors.Pool")
"""Loggers whose info lines (migrations, server states, connections) are written at the level debug only."""
_Line = MutableMapping[str, Any]


def configure(level: str, style: str, stream: TextIO = sys.stderr) -> None:
    """Write every logger's lines to a stream.

    Args:
        level: Least serious level written, as `logging` names it.
        style: `json`, `text`, or `auto` for text on a terminal and JSON elsewhere.
        stream: Where to.
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
                *(_for_people(stream) if text else [structlog.processors.JSONRenderer()]),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(logging.WARNING if level == "info" else logging.NOTSET)
    sys.excepthook = _ended
    threading.excepthook = lambda ended: _ended(ended.exc_type, ended.exc_value, ended.exc_traceback, ended.thread)


class _Limit(logging.Filter):
    """Lets so many warnings, errors and refusals of one kind pass; the next that does says how many did not."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written; those of one place in the code are of a kind, but for their extra `kind`."""
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
    line.pop("color_message", None)  # uvicorn's line once more, for a terminal
    line.pop("kind", None)
    line["event"] = str(line["event"]).strip()
    return line


def _for_people(stream: TextIO) -> list[Any]:
    def printable(_logger: object, _method: str, line: _Line) -> _Line:
        line["event"] = _escaped(line["event"])
        if "exception" in line:
            line["exception"] = "\n".join("    " + _escaped(row) for row in line["exception"].split("\n"))
        return line

    console = structlog.dev.ConsoleRenderer(
        colors=stream.isatty(),
        repr_native_str=True,
        timestamp_key="time",
        exception_formatter=structlog.dev.plain_traceback,
    )
    return [printable, console]


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _ended(
    kind: type[BaseException],
    error: BaseException | None,
    traceback: TracebackType | None,
    thread: threading.Thread | None = None,
) -> None:
    name = thread.name if thread else "main"
    _log.critical("thread %s ended", name, exc_info=(kind, error or kind(), traceback), extra={"kind": name})
