"""Programs that some tests need. If a program is missing, the test is skipped; in CI it fails."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

_SYSTEM = "/usr/sbin:/sbin"
"""Debian's folders of system programs, which are not in every user's PATH."""


def need(program: str, package: str) -> str:
    """Return the path of a program, or end the test with the package to install."""
    path = shutil.which(program) or shutil.which(program, path=_SYSTEM)
    if path is None:
        end(f"{program} is not installed: apt-get install {package}")
    return path


def need_in(folder: Path, program: str, command: str) -> str:
    """Return the path of a program in a folder, or end the test with the command that installs it."""
    path = folder / program
    if not path.exists():
        end(f"{path} is not installed: run {command}")
    return str(path)


def end(reason: str) -> NoReturn:
    """End the test with the reason: as skipped, and in CI as failed."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
