"""The matrix of `docs/reference/combinations.md`: each framework or door by each way to start it.

A cell is a command, or the reason why there is none. `tests/integration/test_frameworks.py` runs the commands; the site
fills in the table of the document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2")
PYTHON = ("python",)
ACCELERATE = (
    *("accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--main_process_port=0"),
    *("--mixed_precision=no", "--dynamo_backend=no", "--num_cpu_threads_per_process=1"),
)
HOROVODRUN = ("ddpobs", "horovodrun", "-np", "2", "python")
HOROVODRUN_MPI = ("ddpobs", "horovodrun", "-np", "2", "--mpi", "python")
MPIEXEC = ("mpiexec", "-n", "2", "python")

UNDER_RUN = ("torchrun", "python", "accelerate launch", "ddpobs horovodrun", "mpiexec")
IN_CODE, VARIABLE = "in code", "DDPOBS_TELEMETRY"
WAYS = (*UNDER_RUN, IN_CODE, VARIABLE)
"""Launchers under `ddpobs run`, and the two ways without it."""


@dataclass(frozen=True)
class Command:
    """A launcher with a script in `tests/integration/scripts`, or in `examples`, and its arguments."""

    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """A training with ddpobs.

    Attributes:
        command: Its command, without `ddpobs run`.
        without: The command without ddpobs that ends alike.
        observed: Whether the collector gets a run of two ranks.
    """

    command: Command
    without: Command
    observed: bool = True


def door(launcher: tuple[str, ...], *arguments: str, without: str = "torch") -> Cell:
    """A cell of `doors.py`, whose training has the same result through each door with DDP."""
    return Cell(Command(launcher, "doors.py", arguments), Command(TORCHRUN, "doors.py", (without,)))


def same(launcher: tuple[str, ...], script: str, *arguments: str) -> Cell:
    """A cell whose script is unchanged without ddpobs."""
    command = Command(launcher, script, arguments)
    return Cell(command, command)


def unobserved(launcher: tuple[str, ...], name: str) -> Cell:
    """A cell of `doors.py` without telemetry."""
    return replace(same(launcher, "doors.py", name), observed=False)


AS_TORCHRUN, ONE_PROCESS, NO_EFFECT, NOT_TRIED = "as torchrun", "one process", "no effect", "not tried"
TABLE: dict[str, tuple[Cell | str, ...]] = {
    "torch's DDP": (
        same(TORCHRUN, "bare.py"),
        door(PYTHON, "torch", "spawn"),
        door(ACCELERATE, "torch"),
        AS_TORCHRUN,
        door(MPIEXEC, "torch"),
        "`attach`",
        NO_EFFECT,
    ),
    "`ddpobs.DistributedDataParallel`": (
        door(TORCHRUN, "ours"),
        door(PYTHON, "ours", "spawn"),
        AS_TORCHRUN,
        AS_TORCHRUN,
        door(MPIEXEC, "ours"),
        door(TORCHRUN, "ours-in-code"),
        Cell(Command(TORCHRUN, "bare.py", ("ours",)), Command(TORCHRUN, "bare.py")),
    ),
    "`ddpobs.attach`": (
        door(TORCHRUN, "attach"),
        door(PYTHON, "attach", "spawn"),
        AS_TORCHRUN,
        AS_TORCHRUN,
        door(MPIEXEC, "attach"),
        door(TORCHRUN, "attach-in-code"),
        door(TORCHRUN, "attach"),
    ),
    "Horovod": (
        door(TORCHRUN, "horovod"),
        door(PYTHON, "horovod", "hvd.run"),
        AS_TORCHRUN,
        Cell(Command(HOROVODRUN, "train_horovod.py"), Command(TORCHRUN, "train_horovod.py")),
        door(HOROVODRUN_MPI, "horovod"),
        door(TORCHRUN, "horovod-in-code"),
        door(TORCHRUN, "horovod"),
    ),
    "Accelerate": (
        Cell(
            Command(TORCHRUN, "with_accelerate.py", ("dispatch",)),
            Command(ACCELERATE, "with_accelerate.py", ("dispatch",)),
        ),
        ONE_PROCESS,
        same(ACCELERATE, "with_accelerate.py", "shard"),
        AS_TORCHRUN,
        NOT_TRIED,
        same(ACCELERATE, "with_accelerate.py", "shard"),
        NO_EFFECT,
    ),
    "Lightning": (
        Cell(Command(TORCHRUN, "with_lightning.py"), Command(PYTHON, "with_lightning.py")),
        same(PYTHON, "with_lightning.py"),
        AS_TORCHRUN,
        AS_TORCHRUN,
        NOT_TRIED,
        same(PYTHON, "with_lightning.py"),
        NO_EFFECT,
    ),
    "Transformers' Trainer": (
        same(TORCHRUN, "with_trainer.py"),
        ONE_PROCESS,
        Cell(Command(ACCELERATE, "with_trainer.py"), Command(TORCHRUN, "with_trainer.py")),
        AS_TORCHRUN,
        NOT_TRIED,
        "no place for it",
        NO_EFFECT,
    ),
    "FSDP2": (
        same(TORCHRUN, "doors.py", "fsdp2"),
        door(PYTHON, "fsdp2", "spawn", without="fsdp2"),
        AS_TORCHRUN,
        AS_TORCHRUN,
        NOT_TRIED,
        door(TORCHRUN, "fsdp2-in-code", without="fsdp2"),
        NO_EFFECT,
    ),
    "FSDP2 by Accelerate": (
        Cell(
            Command(TORCHRUN, "with_accelerate.py", ("fsdp2",)), Command(ACCELERATE, "with_accelerate.py", ("fsdp2",))
        ),
        ONE_PROCESS,
        same(ACCELERATE, "with_accelerate.py", "fsdp2"),
        AS_TORCHRUN,
        NOT_TRIED,
        same(ACCELERATE, "with_accelerate.py", "fsdp2"),
        NO_EFFECT,
    ),
    "FSDP2 by Lightning": (
        Cell(Command(TORCHRUN, "with_lightning.py", ("fsdp2",)), Command(PYTHON, "with_lightning.py", ("fsdp2",))),
        same(PYTHON, "with_lightning.py", "fsdp2"),
        AS_TORCHRUN,
        AS_TORCHRUN,
        NOT_TRIED,
        same(PYTHON, "with_lightning.py", "fsdp2"),
        NO_EFFECT,
    ),
    "FSDP2 by Transformers' Trainer": (
        same(TORCHRUN, "with_trainer.py", "fsdp2"),
        ONE_PROCESS,
        Cell(Command(ACCELERATE, "with_trainer.py", ("fsdp2",)), Command(TORCHRUN, "with_trainer.py", ("fsdp2",))),
        AS_TORCHRUN,
        NOT_TRIED,
        "no place for it",
        NO_EFFECT,
    ),
    "pipelines": (
        same(TORCHRUN, "doors.py", "pipeline"),
        door(PYTHON, "pipeline", "spawn", without="pipeline"),
        AS_TORCHRUN,
        AS_TORCHRUN,
        NOT_TRIED,
        door(TORCHRUN, "pipeline-in-code", without="pipeline"),
        NO_EFFECT,
    ),
    "MPI": (
        *("needs mpiexec",) * 4,
        door(MPIEXEC, "mpi"),
        door(MPIEXEC, "mpi-attach-in-code"),
        door(MPIEXEC, "mpi-attach"),
    ),
    "a loop without DDP": (
        unobserved(TORCHRUN, "plain"),
        unobserved(PYTHON, "plain"),
        AS_TORCHRUN,
        AS_TORCHRUN,
        unobserved(MPIEXEC, "plain"),
        "nothing to attach to",
        NO_EFFECT,
    ),
    "`torch.nn.DataParallel`": (
        ONE_PROCESS,
        unobserved(PYTHON, "data-parallel"),
        *(ONE_PROCESS,) * 3,
        "an error",
        NO_EFFECT,
    ),
    "a script without torch": (
        unobserved(TORCHRUN, "no-torch"),
        unobserved(PYTHON, "no-torch"),
        AS_TORCHRUN,
        AS_TORCHRUN,
        unobserved(MPIEXEC, "no-torch"),
        "nothing to attach to",
        NO_EFFECT,
    ),
}
"""By framework or door, the cells of `WAYS`."""
CELLS = {
    (row, way): cell
    for row, cells in TABLE.items()
    for way, cell in zip(WAYS, cells, strict=True)
    if isinstance(cell, Cell)
}

ALWAYS = {
    ("torch's DDP", "torchrun"),
    ("`ddpobs.DistributedDataParallel`", VARIABLE),
    ("`ddpobs.attach`", IN_CODE),
    ("Horovod", "ddpobs horovodrun"),
    ("Accelerate", "accelerate launch"),
    ("Lightning", "python"),
    ("Transformers' Trainer", "torchrun"),
    ("FSDP2 by Transformers' Trainer", "torchrun"),
    ("MPI", "mpiexec"),
    ("a loop without DDP", "python"),
    ("`torch.nn.DataParallel`", "python"),
    ("a script without torch", "python"),
}
"""Cells that `make test` runs: each row but `FURTHER` once, each way at least once. `make wide` runs the others."""
RECORDED = {
    ("Accelerate", "accelerate launch"),
    ("Lightning", "python"),
    ("Transformers' Trainer", "torchrun"),
    ("FSDP2 by Transformers' Trainer", "torchrun"),
}
"""Cells of `ALWAYS` whose run `make test` judges. `make wide` also runs them without ddpobs, and compares the ends."""
FURTHER = {"FSDP2", "FSDP2 by Accelerate", "FSDP2 by Lightning", "pipelines"}
"""Rows of `make wide` alone. `make test` has each framework with DDP, and one with FSDP2; `tests/fsdp/test_findings.py`
starts FSDP2 under `ddpobs run`, `tests/examples` a pipeline, and `test_pipelines.py` has the schedules."""


def table() -> str:
    """Return the tested cells in Markdown; frameworks with the same cells share a row."""
    names: dict[tuple[str, str], list[str]] = {}
    for name in TABLE:
        tested = [way for way in WAYS if (name, way) in CELLS]
        under = ", ".join(f"`{way}`" for way in tested if way in UNDER_RUN)
        beside = ", ".join(way if way == IN_CODE else f"`{way}`" for way in tested if way not in UNDER_RUN)
        names.setdefault((under, beside), []).append(name)
    head = ["training", "under `ddpobs run`", "without it"]
    rows = [head, ["---"] * 3, *([", ".join(same), *cells] for cells, same in names.items())]
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
