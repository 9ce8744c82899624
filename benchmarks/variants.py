"""The compared ways to train. `Variant.prepare` sets one up on every rank of its own team."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.models import Model
from benchmarks.rig.ports import free_port
from benchmarks.teams import Steps, companion
from ddpobs import DistributedDataParallel, TelemetryConfig, attach, telemetry

Step = Callable[[torch.Tensor], None]
NO_COLLECTOR = "http://127.0.0.1:9"
"""An address without a collector: batches are retried ever more rarely, and spooled. A collector that answers costs the
delivery thread about a millisecond of processor time a batch, which only the variant "collector" measures."""
_BATCHES_BEFORE = 4
PROFILED_STEPS = 10
"""Steps of one cycle of torch.profiler."""


class MissingError(RuntimeError):
    """A variant cannot be measured here; holds the reason."""


@dataclass
class Turn:
    """The circumstances of a variant's measurement.

    Attributes:
        model: The trained model.
        variants: Number of variants that take turns. Timers go on while a team is stopped, so periods in seconds are
            multiplied by it: per second of training they then equal the defaults.
        ranks: Number of ranks of each team.
        folder: Folder for all files.
        collector: Address of the collector that `Variant.serve` started.
        device: Device on which the model trains, `cpu` or `cuda`.
        by_steps: Complete batches after the number of steps that train in the time of a flush, not by a timer.
        phase: Share of a flush that has passed when the measurement begins, 0 to 1. Draw it anew each time: otherwise
            short measurements have fewer batches than their steps deserve.
    """

    model: Model
    variants: int
    ranks: int
    folder: Path
    collector: str = NO_COLLECTOR
    phase: float = 0.0
    device: str = "cpu"
    by_steps: bool = True

    def telemetry(self) -> TelemetryConfig:
        """Return the default telemetry, sent to this turn's collector."""
        plain = TelemetryConfig()
        return TelemetryConfig(
            collector=self.collector,
            spool=self.folder / "spool",
            flush_s=plain.flush_s * self.variants,
            pulse_s=plain.pulse_s * self.variants,
        )


def _no_companion(_: Turn) -> list[subprocess.Popen[bytes]]:
    return []


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        title: Its name in tables.
        wrap: Wraps the module on a rank.
        loop: Returns the function that runs steps, from the wrapped module and the plain step. None repeats the step.
        serve: Starts the other processes that it needs, and may set the turn's collector.
    """

    title: str
    wrap: Callable[[torch.nn.Module, Turn], torch.nn.Module]
    loop: Callable[[torch.nn.Module, Callable[[], None], Turn], Steps] | None = None
    serve: Callable[[Turn], list[subprocess.Popen[bytes]]] = field(default=_no_companion)

    def prepare(self, turn: Turn) -> Steps:
        """Set up the training on this rank, and take some steps: buckets are rebuilt in the second."""
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")  # Torch warns of the needless flag that is measured.
        model = turn.model
        batch = [tensor.to(turn.device) for tensor in model.batch()]
        wrapped = self.wrap(model.build().to(turn.device), turn)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            model.loss(wrapped(*batch)).backward()
            optimizer.step()

        def repeat(count: int) -> None:
            for _ in range(count):
                step()

        steps = self.loop(wrapped, step, turn) if self.loop else repeat
        if turn.device == "cuda":
            steps = _synchronised(steps)
        steps(4)
        if telemetry._process is not None:
            _complete_first(telemetry._process, steps)
            if turn.by_steps:
                _complete_by_steps(telemetry._process, steps, turn)
        return steps


def _synchronised(steps: Steps) -> Steps:
    """Let a turn end when the device has done its work."""

    def synchronised(count: int) -> object:
        note = steps(count)
        torch.cuda.synchronize()
        return note

    return synchronised


def _complete_first(process: telemetry.Telemetry, steps: Steps) -> None:
    """Complete some batches.

    The first batches of a process take many times longer than later ones: negligible in a training of hours, but most
    of a measurement of seconds. Some batches are therefore completed before.
    """
    exporter, journal = process._exporter, process._journal
    config = exporter._queue._config
    exporter._queue._config = replace(config, batch_spans=1)
    for _ in range(_BATCHES_BEFORE):
        steps(2)
        journal.entries.catch_up()
        time.sleep(0.1)
    exporter._queue._config = config


def _complete_by_steps(process: telemetry.Telemetry, steps: Steps, turn: Turn) -> None:
    """Complete batches by steps instead of by seconds from now on, and train until the turn's phase."""
    exporter, journal = process._exporter, process._journal
    config = exporter._queue._config
    emitted, began = exporter.emitted, time.perf_counter()
    steps(2)
    step_s = torch.tensor((time.perf_counter() - began) / 2, device=turn.device)
    torch.distributed.all_reduce(step_s, torch.distributed.ReduceOp.MAX)  # All ranks must take equally many steps.
    journal.entries.catch_up()
    records = (exporter.emitted - emitted) / 2
    per_s = 1 / turn.variants / step_s.item()
    batch_records = round(records * config.flush_s * per_s)
    exporter._queue._config = replace(config, batch_spans=min(config.batch_spans, max(1, batch_records)))
    exporter._schedule.flush_due = math.inf
    if extra := round(turn.phase * config.flush_s * per_s):
        steps(extra)


def _attached(module: torch.nn.Module, turn: Turn) -> torch.nn.Module:
    wrapped = TorchDDP(module)
    attach(wrapped, turn.telemetry())
    return wrapped


def _profiled(written: bool) -> Callable[[torch.nn.Module, Callable[[], None], Turn], Steps]:
    """Record every step in cycles. Traces are written as in torch's tutorials, or dropped."""

    def loop(_: torch.nn.Module, step: Callable[[], None], turn: Turn) -> Steps:
        folder = turn.folder / f"traces-{torch.distributed.get_rank()}"
        write = torch.profiler.tensorboard_trace_handler(str(folder))

        def ready(profiler: Any) -> None:
            if written:
                shutil.rmtree(folder, ignore_errors=True)
                write(profiler)

        profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=0, warmup=0, active=PROFILED_STEPS),
            on_trace_ready=ready,
        )
        os.dup2(os.open(turn.folder / "log", os.O_WRONLY | os.O_CREAT), 2)  # Kineto logs every cycle.
        profiler.start()

        def steps(count: int) -> None:
            for _ in range(count):
                step()
                profiler.step()

        return steps

    return loop


def _traced(wrapped: torch.nn.Module, step: Callable[[], None], turn: Turn) -> Steps:
    import traceml_ai

    traceml_ai.init(
        mode="auto",
        interval=2.0 * turn.variants,
        logs_dir=str(turn.folder),
        session_id="benchmark",
        aggregator_port=int(turn.collector.rpartition(":")[2]),
        on_missing_aggregator="raise",
    )

    def steps(count: int) -> None:
        for _ in range(count):
            with traceml_ai.trace_step(wrapped):
                step()

    return steps


def _traceml_aggregator(turn: Turn) -> list[subprocess.Popen[bytes]]:
    command = Path(sys.executable).with_name("traceml")
    if not command.exists() or importlib.util.find_spec("traceml_ai") is None:
        raise MissingError("TraceML is not installed: pip install traceml-ai")
    port = free_port()
    turn.collector = f"http://127.0.0.1:{port}"
    arguments = f"serve --mode summary --run-name benchmark --aggregator-port {port} --nproc-per-node {turn.ranks}"
    return [companion([str(command), *arguments.split(), "--logs-dir", str(turn.folder)], turn.folder / "traceml.log")]


def _collector(turn: Turn) -> list[subprocess.Popen[bytes]]:
    command = Path(sys.executable).with_name("ddpobs-server")
    if not command.exists():
        raise MissingError('the collector is not installed: pip install "ddpobs[server]"')
    log = turn.folder / "collector.log"
    database = f"sqlite:///{turn.folder}/runs.db"
    process = companion([str(command), "--port", "0", "--database-url", database], log)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if match := re.search(r"(?:ddpobs-server:|running on) (http://[^ ,]+)", log.read_text()):
            turn.collector = match[1]
            return [process]
        time.sleep(0.05)
    raise MissingError(f"no collector: {log.read_text()}")


def _ours(module: torch.nn.Module, turn: Turn) -> torch.nn.Module:
    return DistributedDataParallel(module, telemetry=turn.telemetry())


def _torch(module: torch.nn.Module, _: Turn) -> torch.nn.Module:
    return TorchDDP(module)


VARIANTS: dict[str, Variant] = {
    "torch": Variant("torch", _torch),
    "again": Variant("torch once more (the noise)", _torch),
    "views": Variant(
        "torch, `gradient_as_bucket_view=True`", lambda module, _: TorchDDP(module, gradient_as_bucket_view=True)
    ),
    "off": Variant("ours, telemetry off", lambda module, _: DistributedDataParallel(module, telemetry=False)),
    "on": Variant("ours, telemetry on", _ours),
    "torch_finds": Variant(
        "torch, `find_unused_parameters=True`", lambda module, _: TorchDDP(module, find_unused_parameters=True)
    ),
    "finds": Variant(
        "ours, telemetry off, `find_unused_parameters=True`",
        lambda module, _: DistributedDataParallel(module, find_unused_parameters=True, telemetry=False),
    ),
    "collector": Variant("ours, telemetry on, its collector on the same cores", _ours, serve=_collector),
    "attached": Variant("torch, our telemetry attached", _attached),
    "profiler": Variant("torch.profiler always on, traces dropped", _torch, _profiled(written=False)),
    "traces": Variant("torch.profiler always on, traces written", _torch, _profiled(written=True)),
    "traceml": Variant("TraceML, its aggregator on the same cores", _torch, _traced, _traceml_aggregator),
}
SETS: dict[str, list[str]] = {
    "claims": ["torch", "again", "views", "off", "on"],
    "unused": ["torch", "again", "torch_finds", "off", "finds"],
    "scale": ["torch", "collector", "attached", "profiler", "traces", "traceml"],
}
