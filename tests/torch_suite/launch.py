"""The host process of torch's tests, as a context.

`python -m tests.torch_suite.launch` prints each test's outcome and seconds; with the argument `torch`, of torch's own
class. A name belongs into `names.txt` if torch's own class passes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NAMES = (Path(__file__).parent / "names.txt").read_text().split()
"""The DDP tests that torch 2.13's own class passes on two gloo ranks without a GPU."""

ENVIRONMENT = {
    "BACKEND": "gloo",
    "WORLD_SIZE": "2",
    "INIT_METHOD": "env://",
    "MASTER_ADDR": "127.0.0.1",
    "TEMP_DIR": "",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DDPOBS_TELEMETRY": "0",
}


class Host:
    """Runs tests in a host process, one after the other.

    Args:
        arguments: Of the host process.
    """

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torch_suite.host", *arguments],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str) -> dict[str, Any]:
        """Return a test's outcome, output and seconds."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(name, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer, f"the host process ended with status {process.wait()}"
        return json.loads(answer)  # type: ignore[no-any-return]

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_error: object) -> None:
        """End the host process."""
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    with Host(*sys.argv[1:]) as host:
        for test in NAMES:
            result = host.run(test)
            print(f"{result['outcome']:<10} {result['seconds']:>5} s  {test}", flush=True)  # noqa: T201
