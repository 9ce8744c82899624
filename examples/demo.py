"""The whole way in one command: a collector, a training with one slow rank, and the finding that names it.

Which rank is slow is drawn at random and told to the training alone; at the end the finding is held against it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / ".demo"
RUN = time.strftime("demo-%Y%m%d-%H%M%S")


def main() -> int:
    """Run the demo; the exit code says whether the slow rank was found, and in backward."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="exit after the findings instead of staying for browsing")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--slow-phase", default="backward")
    options = parser.parse_args()
    ranks = max(2, min(4, os.cpu_count() or 2))
    slow = random.randrange(ranks)
    url = f"http://127.0.0.1:{_free_port()}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    collector = _start_collector(url)
    try:
        print(f"collector   {url}")
        slow_one = f"one of them, drawn at random, slow in {options.slow_phase}"
        print(f"training    a small GPT on {ranks} ranks, {slow_one}", flush=True)
        _train(url, ranks, slow, options)
        found = _findings(url)
        _tell(found)
        right = any(f["code"] == "straggler" and f["ranks"] == [slow] for f in found["findings"])
        right = right and found["findings"][0]["phase"] == options.slow_phase
        print(f"\nthe slow rank was in truth {slow}: the collector {'is right' if right else 'DID NOT FIND IT'}")
        if not options.once and sys.stdin.isatty():
            _tell_addresses(url)
            print("\nThe collector stays up for browsing; Ctrl-C ends it.")
            collector.wait()
        else:
            database = os.path.relpath(FOLDER / "ddpobs.db")
            print(f"\nto browse it: .venv/bin/ddpobs-server --database-url sqlite:///{database}")
        return 0 if right else 1
    except KeyboardInterrupt:
        return 0
    finally:
        collector.terminate()
        collector.wait(15)


def _start_collector(url: str) -> subprocess.Popen[bytes]:
    FOLDER.mkdir(exist_ok=True)
    log = (FOLDER / "collector.log").open("wb")
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "ddpobs_server.app", "--port", port]
    command += ["--database-url", f"sqlite:///{FOLDER / 'ddpobs.db'}"]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"{url}/readyz", timeout=5):
                return process
        except OSError:
            time.sleep(0.1)
    process.kill()
    raise SystemExit(f"the collector did not start; {log.name} says why")


def _train(url: str, ranks: int, slow: int, options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "train_gpt.py"), "--steps", str(options.steps)]
    secret = {"SLOW_RANK": str(slow), "SLOW_PHASE": options.slow_phase, "OMP_NUM_THREADS": "1"}
    environment = os.environ | secret | {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": RUN}
    if subprocess.run(command, env=environment, check=False).returncode:
        raise SystemExit("the training failed; its output above says why")


def _findings(url: str) -> dict[str, Any]:
    with urlopen(f"{url}/api/v1/runs/{RUN}/diagnostics", timeout=60) as response:
        return json.load(response)  # type: ignore[no-any-return]


def _tell(found: dict[str, Any]) -> None:
    print(f"\nfindings of run {RUN}, over {found['steps_seen']} steps")
    for finding in found["findings"]:
        gain = finding["gain"]
        print(f"\n  [{finding['severity']}] {finding['title']}")
        print(textwrap.fill(finding["remedy"], 110, initial_indent="    what to do: ", subsequent_indent="    "))
        if gain:
            error = gain["error_ratio"] * gain["ratio"]
            print(f"    what it would gain: {gain['ratio']:.0%} of every step (± {error:.1%})")
    for missing in found["missing"]:
        print(f"\n  not judged: {missing}")


def _tell_addresses(url: str) -> None:
    print(f"""
open
  the page      {url}/runs/{RUN}
  the answers   {url}/api/v1/runs/{RUN}/diagnostics
  the metrics   {url}/metrics
  the API       {url}/docs""")


def _free_port() -> int:
    """8321 where it is free, else any."""
    for port in (8321, 0):
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(taken.getsockname()[1])
    raise SystemExit("no free port on 127.0.0.1")


if __name__ == "__main__":
    sys.exit(main())
