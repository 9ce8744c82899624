"""Programs that some tests need. If a program is missing, the test is skipped; in CI it fails."""

from __future__ import annotations

import os
import shutil

import pytest

_SYSTEM = "/usr/sbin:/sbin"
"""Debian's folders of system programs, which are not in every user's PATH."""


def need(program: str, package: str) -> str:
    """Return the path of a program, or end the test with the package to install."""
    path = shutil.which(program) or shutil.which(program, path=_SYSTEM)
    if path is None:
        reason = f"{program} is not installed: apt-get install {package}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return path
