"""Programs that some tests need: a loud skip where one is missing, a failure in CI."""

from __future__ import annotations

import os
import shutil

import pytest

_SYSTEM = "/usr/sbin:/sbin"
"""Where Debian has some that are not in everybody's PATH."""


def need(program: str, package: str) -> str:
    """Path of a program, or the end of the test with what to install."""
    found = shutil.which(program) or shutil.which(program, path=_SYSTEM)
    if found is None:
        reason = f"{program} is not installed: apt-get install {package}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found
