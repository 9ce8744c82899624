"""`ddpobs horovodrun`: Horovod's command line, mapped to torchrun or mpiexec."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ddpobs.cli.app import TRAIN, WRONG_USE, fail, main
from ddpobs.cli.run import start
from ddpobs.config import resolve
from ddpobs.errors import ConfigError
from ddpobs.recording.place.place_file import LAUNCH

_NOT_STARTED = 127
_THIS_HOST = ("localhost", "127.0.0.1")
_ELASTIC = (
    "hosts that come and go need torchrun on each host: `torchrun --nnodes MIN:MAX --nproc-per-node N "
    "--max-restarts R --rdzv-backend c10d --rdzv-endpoint HOST:29400 train.py`"
)


@main.command(
    rich_help_panel=TRAIN,
    short_help="Start a script with Horovod's interface.",
    context_settings={"allow_interspersed_args": False},
)
def horovodrun(
    command: Annotated[list[str] | None, typer.Argument(help="Command of one rank, such as `python train.py`.")] = None,
    *,
    ranks: Annotated[int | None, typer.Option("-np", "--num-proc", min=1, help="Number of ranks.")] = None,
    hosts: Annotated[str, typer.Option("-H", "--hosts", help="HOST:SLOTS,HOST:SLOTS,…; several need --mpi.")] = "",
    hostfile: Annotated[
        Path | None, typer.Option("-hostfile", "--hostfile", help="A file with lines `HOST slots=SLOTS`.")
    ] = None,
    mpi: Annotated[bool, typer.Option("--mpi", help="Start the ranks with mpiexec.")] = False,
    gloo: Annotated[bool, typer.Option("--gloo", help="Start the ranks with torchrun, as by default.")] = False,
    mpi_args: Annotated[str, typer.Option("--mpi-args", help="Further arguments of mpiexec.")] = "",
    network_interface: Annotated[
        str, typer.Option("--network-interface", "--network-interfaces", help="For gloo and NCCL.")
    ] = "",
    fusion_threshold_mb: Annotated[
        int | None, typer.Option("--fusion-threshold-mb", min=0, help="Largest bucket, in MiB.")
    ] = None,
    timeline_filename: Annotated[str, typer.Option("--timeline-filename", help="Write Horovod's timeline.")] = "",
    timeline_mark_cycles: Annotated[bool, typer.Option("--timeline-mark-cycles")] = False,
    stall_check_s: Annotated[
        float | None,
        typer.Option("--stall-check-warning-time-seconds", help="Time without progress that counts as a hang."),
    ] = None,
    no_stall_check: Annotated[
        bool, typer.Option("--no-stall-check", help="No effect: only telemetry reports hangs.")
    ] = False,
    autotune: Annotated[
        bool, typer.Option("--autotune", help="No effect: `ddpobs report` estimates other bucket sizes.")
    ] = False,
    reset_limit: Annotated[
        int | None, typer.Option("--reset-limit", min=0, help="Restarts after a failure, torchrun's --max-restarts.")
    ] = None,
    min_np: Annotated[int | None, typer.Option("--min-np", "--min-num-proc", hidden=True)] = None,
    max_np: Annotated[int | None, typer.Option("--max-np", "--max-num-proc", hidden=True)] = None,
    host_discovery_script: Annotated[str, typer.Option("--host-discovery-script", hidden=True)] = "",
    check_build: Annotated[bool, typer.Option("--check-build", help="Print what is available, and end.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the launcher's command.")] = False,
    log_level: Annotated[str, typer.Option("--log-level", hidden=True)] = "",
) -> None:
    """Start a script with Horovod's interface: torchrun on this host, or mpiexec."""
    if check_build:
        typer.echo(available())
        return
    if not command or not ranks:
        fail("expected `ddpobs horovodrun -np RANKS COMMAND…`", WRONG_USE)
    if mpi and gloo:
        fail("--mpi and --gloo exclude each other", WRONG_USE)
    elastic = {min_np, max_np} - {None, ranks} or host_discovery_script
    if elastic:
        fail(_ELASTIC, WRONG_USE)
    environment = {
        "GLOO_SOCKET_IFNAME": network_interface,
        "NCCL_SOCKET_IFNAME": network_interface,
        "HOROVOD_FUSION_THRESHOLD": "" if fusion_threshold_mb is None else str(fusion_threshold_mb * 2**20),
        "HOROVOD_TIMELINE": timeline_filename,
        "HOROVOD_TIMELINE_MARK_CYCLES": "1" if timeline_mark_cycles else "",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "" if stall_check_s is None else str(stall_check_s),
        "HOROVOD_STALL_CHECK_DISABLE": "1" if no_stall_check else "",
        "HOROVOD_AUTOTUNE": "1" if autotune else "",
        # Else a new attempt finds the addresses of the one before in torch's store (pytorch issue 135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if reset_limit else "",
    }
    set_here = {name: value for name, value in environment.items() if value}
    try:
        hosts = read_hosts(hostfile) if hostfile else hosts
        if mpi:
            launcher = by_mpiexec(command, ranks, hosts, mpi_args.split(), list(set_here))
        else:
            launcher = by_torchrun(command, ranks, hosts, reset_limit)
    except (ValueError, OSError) as error:
        fail(str(error), WRONG_USE)
    if verbose:
        typer.echo(" ".join(launcher), err=True)
    os.environ.update(set_here)
    try:
        config = resolve(None, os.environ)
    except ConfigError as error:
        fail(str(error), WRONG_USE)
    if config is not None and LAUNCH not in os.environ:  # As under `ddpobs run`: early errors are reported.
        start(config, launcher)
    try:
        os.execvpe(launcher[0], launcher, os.environ)
    except OSError as error:
        fail(f"{launcher[0]}: {error.strerror}", _NOT_STARTED)


def by_torchrun(command: list[str], ranks: int, hosts: str, restarts: int | None = None) -> list[str]:
    """Return torchrun's command for ranks on this host.

    Raises:
        ValueError: Other hosts are named, or the command is no Python script.
    """
    others = [host for host in hosts.split(",") if host and host.split(":")[0] not in _THIS_HOST]
    if others:
        raise ValueError(
            f"without --mpi the ranks start on this host only, not on {', '.join(others)}: pass --mpi, or start "
            "torchrun with --nnodes and --node-rank on each host"
        )
    if len(command) < 2 or not Path(command[0]).name.startswith("python"):
        raise ValueError(f"torchrun starts `python SCRIPT …`, not `{' '.join(command)}`")
    interpreter, *script = command
    run = [interpreter, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*run, *([] if restarts is None else [f"--max-restarts={restarts}"]), *script]


def by_mpiexec(
    command: list[str], ranks: int, hosts: str, arguments: list[str] | None = None, exported: list[str] | None = None
) -> list[str]:
    """Return the command of the `mpiexec` beside this Python, or of the one in PATH.

    Args:
        command: Command of one rank.
        ranks: Number of ranks.
        hosts: Hosts with slots; empty for this host.
        arguments: Further arguments of mpiexec.
        exported: Environment variables for the ranks; only Open MPI has to be asked to pass them to other hosts.
    """
    own = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(own) if own.exists() else shutil.which("mpiexec") or "mpiexec"
    open_mpi = Path(mpiexec).with_name("ompi_info").exists()
    placed = ["--host" if open_mpi else "-hosts", hosts] if hosts else []
    passed = [part for name in exported or () for part in ("-x", name)] if open_mpi else []
    free = ["--bind-to", "none"] if open_mpi else []  # As Horovod does: else a rank with its threads has one core.
    return [mpiexec, "-n", str(ranks), *free, *placed, *passed, *(arguments or ()), *command]


def read_hosts(path: Path) -> str:
    """Return a host file's hosts in the form of --hosts.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is not `HOST slots=SLOTS`.
    """
    hosts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = words[1].removeprefix("slots=") if len(words) > 1 else "1"
        if not slots.isdigit():
            raise ValueError(f"{path}, line {number}: expected `HOST slots=SLOTS`, got {line!r}")
        hosts.append(f"{words[0]}:{slots}")
    return ",".join(hosts)


def available() -> str:
    """Return what `horovodrun --check-build` prints: frameworks, controllers and operations, an X for each there is."""
    from ddpobs.horovod import backends

    mpi = backends.mpi_built() or find_spec("mpi4py") is not None
    parts = {
        "Available Frameworks": {"TensorFlow": False, "PyTorch": True, "MXNet": False},
        "Available Controllers": {"MPI": mpi, "Gloo": backends.gloo_built()},
        "Available Tensor Operations": {
            "NCCL": backends.nccl_built(),
            "DDL": False,
            "CCL": False,
            "MPI": mpi,
            "Gloo": backends.gloo_built(),
        },
    }
    lines = [
        f"{title}:\n" + "\n".join(f"    [{'X' if there else ' '}] {name}" for name, there in entries.items())
        for title, entries in parts.items()
    ]
    return "\n\n".join(lines)
