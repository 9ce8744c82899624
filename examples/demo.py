"""Run the whole flow: a collector, a training with one slow rank, and the finding that names it.

The demo picks a random slow rank. Only the training receives its number. At the end the demo compares the finding with
it.
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

from ddpobs.shared.words import finding_heading, finding_lines, labelled

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / ".demo"
RUN = time.strftime("demo-%Y%m%d-%H%M%S")
CAPS_MB = "0.25,0.5,1,2.5,5,10,25,50,100"
MIN_SAVED_PERCENT = 3


def main() -> int:
    """Run the demo. Returns the exit code: 0 if the finding names the slow rank and its phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="exit after the findings instead of staying for browsing")
    parser.add_argument("--fsdp", action="store_true", help="shard the model by FSDP2 instead of DDP")
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
        model = f"a small GPT{', sharded by FSDP2,' if options.fsdp else ''} on {ranks} ranks"
        print(f"training    {model}, a random one slow in {options.slow_phase}", flush=True)
        _train(url, ranks, slow, options)
        diagnosis = _ask(url, "diagnostics")
        _print_findings(diagnosis)
        stragglers = [finding for finding in diagnosis["findings"] if finding["code"] == "straggler"]
        named = any(each["ranks"] == [slow] and each["phase"] == options.slow_phase for each in stragglers)
        print(f"\nthe slow rank was {slow}: the collector {'named it' if named else 'DID NOT NAME IT'}")
        _print_bucket_cap(_ask(url, f"whatif?bucket_cap_mb={CAPS_MB}"))
        if not options.once and sys.stdin.isatty():
            _print_addresses(url)
            print("\nThe collector stays up for browsing; Ctrl-C ends it.")
            collector.wait()
        else:
            database = os.path.relpath(FOLDER / "ddpobs.db")
            print(f"\nto browse it: .venv/bin/ddpobs-server --database-url sqlite:///{database}")
        return 0 if named else 1
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
    raise SystemExit(f"the collector did not start; {log.name} has the reason")


def _train(url: str, ranks: int, slow: int, options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "train_gpt.py"), "--steps", str(options.steps)]
    command += ["--fsdp"] if options.fsdp else []
    secret = {"SLOW_RANK": str(slow), "SLOW_PHASE": options.slow_phase, "OMP_NUM_THREADS": "1"}
    environment = os.environ | secret | {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": RUN}
    if subprocess.run(command, env=environment, check=False).returncode:
        raise SystemExit("the training failed; its output above has the reason")


def _ask(url: str, path: str) -> dict[str, Any]:
    with urlopen(f"{url}/api/v1/runs/{RUN}/{path}", timeout=60) as response:
        return json.load(response)  # type: ignore[no-any-return]


def _print_findings(diagnosis: dict[str, Any]) -> None:
    print(f"\nfindings of run {RUN}, over {diagnosis['steps_seen']} steps")
    for finding in diagnosis["findings"]:
        print(f"\n  {finding_heading(finding)}")
        for label, text in finding_lines(finding):
            print(textwrap.fill(labelled(label, text), 110, initial_indent="    ", subsequent_indent=" " * 12))
    for missing in diagnosis["missing"]:
        print(f"\n  not judged: {missing}")


def _print_bucket_cap(whatif: dict[str, Any]) -> None:
    """Print the best bucket cap, if the whole interval of its saving is above zero and it saves 3 % or more."""
    known = [answer for answer in whatif["answers"] if answer["prediction"]]
    if not known:
        return
    best = min(known, key=lambda answer: answer["prediction"]["step_ns"])
    saved, error = (100 * best["prediction"][name] for name in ("saved_ratio", "error_ratio"))
    if saved >= MIN_SAVED_PERCENT and best["prediction"]["high_ns"] < whatif["now"]["step_ns"]:
        print(f"a bucket cap of {best['caps_mb'][0]:g} MB would save {saved:.1f} % ± {error:.1f} % of a step")


def _print_addresses(url: str) -> None:
    print(f"""
open
  the page      {url}/runs/{RUN}
  the findings  {url}/api/v1/runs/{RUN}/diagnostics
  the metrics   {url}/metrics
  the API       {url}/docs""")


def _free_port() -> int:
    """Return 8321 if it is free, otherwise any free port."""
    for port in (8321, 0):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(listener.getsockname()[1])
    raise SystemExit("no free port on 127.0.0.1")


if __name__ == "__main__":
    sys.exit(main())
