"""Choose the package index from which `scripts/setup.sh` installs torch, and say which build follows, and why.

Prints the index's address, or nothing for the sources that pip is set to. The line for the reader goes to stderr. Runs
in a new virtual environment: only pip is installed there.
"""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PINS = Path(__file__).resolve().parents[1] / "constraints.txt"
_PROBE_S = 5.0
_NVIDIA = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvidia0")


def choose(
    named: str, has_gpu: Callable[[], bool], unreached: Callable[[str], str], cpu_index: str = CPU_INDEX
) -> tuple[str, str]:
    """Return the address of the index, empty for pip's own sources, and a line on build and reason.

    Args:
        named: `TORCH_INDEX_URL`, empty if it is not set.
        has_gpu: Whether this machine has an NVIDIA GPU.
        unreached: Returns why an index does not offer torch, empty if it does.
        cpu_index: The index of the CPU build.
    """
    if named:
        return named, f"torch: the build of {named}, because TORCH_INDEX_URL names it."
    pips = "the build that pip chooses (from PyPI: CUDA)"
    if has_gpu():
        return "", f"torch: {pips}, because this machine has an NVIDIA GPU."
    if problem := unreached(cpu_index):
        return "", f"torch: {pips}, 5 GB larger than that of {cpu_index}, which cannot be used here: {problem}."
    return cpu_index, f"torch: the CPU build of {cpu_index}, because this machine has no NVIDIA GPU."


def has_nvidia_gpu() -> bool:
    """Return whether an NVIDIA driver or device is here."""
    if any(Path(path).exists() for path in _NVIDIA):
        return True
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    return "GPU 0" in subprocess.run([command, "-L"], capture_output=True, text=True, check=False).stdout


def why_not(index: str) -> str:
    """Return why an index does not offer the pinned torch, within a few seconds; empty if it does."""
    problem = [f"no answer within {_PROBE_S:.0f} s"]

    def probe() -> None:
        try:
            with urllib.request.urlopen(f"{index}/torch/", timeout=_PROBE_S, context=_trusted()) as answer:
                page = answer.read().decode()
        except (OSError, ValueError) as error:
            problem[0] = str(getattr(error, "reason", error))
        else:
            problem[0] = "" if f"torch-{pinned()}" in page else f"it has no torch {pinned()}"

    # A timeout of urllib holds for each of a host's addresses; a daemon thread does not delay the exit.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(_PROBE_S)
    return problem[0]


def _trusted() -> ssl.SSLContext:
    """The system's certificate authorities, pip's, and that of pip's settings."""
    from pip._vendor import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    command = [sys.executable, "-m", "pip", "config", "get", "global.cert"]
    configured = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    for certificates in filter(None, (os.environ.get("PIP_CERT"), configured)):
        context.load_verify_locations(certificates)
    return context


def pinned() -> str:
    """Return the version of torch in `constraints.txt`."""
    found = re.search(r"^torch==(\S+)$", PINS.read_text(), re.MULTILINE)
    assert found, f"{PINS} pins no torch"
    return found[1]


def installed() -> str:
    """Return torch's version in this environment, with its build; empty if it has none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Print the index, and on stderr the line."""
    if installed().partition("+")[0] == pinned():
        index, line = "", f"torch: {installed()} remains, because it is installed."
    else:
        index, line = choose(os.environ.get("TORCH_INDEX_URL", ""), has_nvidia_gpu, why_not)
    print(line, file=sys.stderr)
    print(index)


if __name__ == "__main__":
    main()
