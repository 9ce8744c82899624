"""Start the example of two nodes in every way on two hosts, and with a slow host and with a slow link.

    sudo python -m benchmarks.two_nodes [torchrun | env | tcp | file | mpi | 'slow host' | 'slow link']…

Network namespaces stand for the hosts: each has its own host name, and they share one link. A run's telemetry goes to
a spool, which is pushed to a collector afterwards. Prints for each start the ranks' hosts and the findings.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks import links
from benchmarks.rig.collector import collector, push, spooling

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "examples" / "two_nodes" / "train.py"
WAYS = ("torchrun", "env", "tcp", "file", "mpi")
HOSTS = 2
FAULTS = {
    "slow host": ("env", ("--steps", "150", "--slow-host", "node1"), "1gbit"),
    "slow link": ("env", ("--steps", "60", "--width", "700"), "100mbit"),
}
"""By name: the way to start, the example's arguments, and the link's speed."""
_PORT = "29500"
ON_LINK = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")]),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": links.INTERFACE,
    "OMPI_MCA_btl_tcp_if_include": links.INTERFACE,
    "FI_TCP_IFACE": links.INTERFACE,
}
"""Environment of ranks of one thread that communicate over the shaped link."""


def commands(way: str, folder: Path, arguments: Sequence[str], network: links.Links) -> list[list[str]]:
    """Return the command of each host for one way to start the example; of mpiexec, only the first host's."""
    train = [sys.executable, str(TRAIN), *arguments]
    first = links.address(0)
    if way == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(HOSTS), "--nproc-per-node", "1"]
        run += ["--master-addr", first, "--master-port", _PORT]
        return [
            [*run, "--node-rank", str(host), "--local-addr", links.address(host), *train[1:]] for host in range(HOSTS)
        ]
    if way == "env":
        shared = ["env", f"MASTER_ADDR={first}", f"MASTER_PORT={_PORT}", f"WORLD_SIZE={HOSTS}"]
        return [[*shared, f"RANK={host}", *train] for host in range(HOSTS)]
    if way in ("tcp", "file"):
        init = f"tcp://{first}:{_PORT}" if way == "tcp" else f"file://{folder / 'store'}"
        by_rank = [*train, "--init", init, "--world-size", str(HOSTS), "--rank"]
        return [[*by_rank, str(host)] for host in range(HOSTS)]
    return [[*mpiexec(folder, network, ON_LINK | spooling(folder.name, folder)), *train, "--init", "mpi://"]]


def mpiexec(folder: Path, network: links.Links, environ: Iterable[str]) -> list[str]:
    """Return the command that starts one rank on each host, by a program in place of ssh.

    Args:
        folder: For that program.
        network: The hosts.
        environ: Names of the variables that the ranks get.
    """
    agent = folder / "agent"
    by_host = "\n".join(
        f'{links.address(host)}) exec {shlex.join(network.on_own_host(host, ["sh", "-c"]))} "$*" ;;'
        for host in range(HOSTS)
    )
    # MPICH calls its agent as `AGENT -x HOST COMMAND`, Open MPI as `AGENT HOST COMMAND`.
    agent.write_text(f'#!/bin/sh\n[ "$1" = -x ] && shift\nhost=$1\nshift\ncase $host in\n{by_host}\nesac\n')
    agent.chmod(0o755)
    beside = Path(sys.executable).with_name("mpiexec")
    program = str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"
    addresses = ",".join(links.address(host) for host in range(HOSTS))
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    if "HYDRA" in version:
        return [program, "-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", addresses, "-n", str(HOSTS)]
    tools = ["--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", links.INTERFACE]
    exported = [part for name in environ for part in ("-x", name)]
    # Each host's first rank would be bound to the first core, which is one and the same here.
    return [
        program,
        "--allow-run-as-root",
        "--bind-to",
        "none",
        *tools,
        "--host",
        addresses,
        *exported,
        "-n",
        str(HOSTS),
    ]


def run(way: str, folder: Path, *arguments: str, rate: str = "1gbit", timeout_s: float = 300) -> str:
    """Run the example on two hosts, and return its output; telemetry is in `folder / "spool"`.

    Raises:
        LinkError: The hosts cannot be made here.
        RuntimeError: A host's command failed or did not end in time; the message has the output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    logs = [folder / f"host-{host}.log" for host in range(HOSTS)]
    with links.links(HOSTS, rate) as network:
        processes = []
        try:
            for host, command in enumerate(commands(way, folder, arguments, network)):
                with logs[host].open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            network.on_own_host(host, command),
                            env=kept | (ON_LINK | spooling(folder.name, folder)),
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                        )
                    )
            codes: list[int | None] = [process.wait(timeout_s) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [process.poll() for process in processes]  # None for those that hang.
        finally:
            for process in processes:
                process.kill()
                process.wait()
    output = "\n".join(log.read_text() for log in logs if log.exists())
    if any(code != 0 for code in codes):
        raise RuntimeError(f"{way}: exit codes {codes}\n{output}")
    return output


def pushed(url: str, folder: Path) -> dict[str, Any]:
    """Send a run's spool; return its ranks' hosts and its findings, with the facts that name their kind."""
    push(folder / "spool", url)
    ranks, diagnosis = (
        httpx.get(f"{url}/api/v1/runs/{folder.name}/{part}", timeout=60).raise_for_status().json()
        for part in ("ranks", "diagnostics")
    )
    findings = {finding["code"]: finding for finding in diagnosis["findings"]}
    return {"ranks": ranks["ranks"], "findings": findings}


def row(case: str, results: dict[str, Any]) -> str:
    """Return a row of the table: the ranks' hosts, and the findings with rank, host and kind."""
    hosts = ", ".join(f"{rank['rank']} on {rank['host']}" for rank in results["ranks"])
    named = []
    for code, finding in results["findings"].items():
        evidence = finding["evidence"]
        facts = [f"rank {rank}" for rank in finding["ranks"]] if code == "straggler" else []
        facts += [str(evidence[name]) for name in ("host", "kind") if evidence.get(name)]
        named.append(f"{code} ({', '.join(facts)})" if facts else code)
    return f"| {case} | {hosts} | {'; '.join(named) or 'none'} |"


def main() -> None:
    """Run the cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*WAYS, *FAULTS])
    options = parser.parse_args()
    print("| started by, or fault | ranks | findings |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name, collector(Path(name)) as running:
        for case in options.cases:
            folder = Path(name) / case.replace(" ", "-")
            way, arguments, rate = FAULTS.get(case, (case, ("--steps", "60"), "1gbit"))
            try:
                run(way, folder, *arguments, rate=rate)
            except links.LinkError as error:
                raise SystemExit(str(error)) from error
            print(row(case, pushed(running.url, folder)), flush=True)


if __name__ == "__main__":
    main()
