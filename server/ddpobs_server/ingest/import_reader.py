"""Read uploaded files in a process of its own, which is limited in memory and time: a hostile file ends only that."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ddpobs_server.settings import Settings
from ddpobs_server.web.problems import Problem

_log = logging.getLogger(__name__)
_MODULE = "ddpobs.imports"
"""The training side's reader. It runs as a program, so that the collector imports nothing of the training side."""
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
_MAX_LOGGED = 2000


class _Report(msgspec.Struct):
    lines: list[str] = []
    error: str = ""


async def read_files(files: Sequence[Path], run: str, output: Path, settings: Settings) -> list[str]:
    """Write the batches of a run to a folder, each to the file SOURCE-SEQ.

    Returns:
        What the files show, in words.

    Raises:
        Problem: 422 if a file is at fault or needs more memory or time than allowed.
    """
    options = ["--run", run, "--output", str(output), "--memory-mb", str(settings.import_memory_mb), "--"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", _MODULE, *options, *map(str, files)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environ(),
    )
    try:
        async with asyncio.timeout(settings.import_timeout_s):
            printed, errors = await process.communicate()
    except TimeoutError:
        reason = f"reading takes longer than {settings.import_timeout_s:g} s (DDPOBS_SERVER_IMPORT_TIMEOUT_S)"
        raise _refused(f"{reason}: use `ddpobs import` on the machine that has the files") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _lines(process.returncode or 0, printed, errors, settings)


def _environ() -> dict[str, str]:
    """The environment without the collector's settings: tokens and passwords are no business of a file's reader."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")} | _ONE_THREAD


def _lines(status: int, printed: bytes, errors: bytes, settings: Settings) -> list[str]:
    if status:
        _log.warning("a reader of files ended with %d: %s", status, errors.decode(errors="replace")[-_MAX_LOGGED:])
        raise _refused(
            f"the reader of the files failed, perhaps for want of memory: {settings.import_memory_mb} MB "
            "(DDPOBS_SERVER_IMPORT_MEMORY_MB); the collector's log has its error"
        )
    report = msgspec.json.decode(printed, type=_Report)
    if report.error:
        raise _refused(report.error)
    return report.lines


def _refused(reason: str) -> Problem:
    return Problem(422, "Not imported", f"{reason}; nothing was stored")
