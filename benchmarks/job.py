"""A job of many ranks and one collector, both in the project's own code: is anything lost or late, does memory grow?

    python -m benchmarks.job [--ranks 1024] [--seconds 600] [--clients 4] [--prepared FOLDER] [--json FILE] [--smoke]

Each rank has the telemetry of a training process: a queue, batches cut when the exporter says so, pulses that ride in
them, hello, layouts and readiness, counts of what was emitted; rank 0's carry the statistics over all ranks. Only the
steps are made up: two a second, which all ranks end at the same moment, 40 buckets, no two alike.

As one machine has no cores for all of them, their batches are made before, in simulated time, and written to files
(`--prepared` keeps these for the next time). They are then sent by the real sender when they are due, each rank over a
connection of its own. A batch's time runs from the moment at which it was due until it is acknowledged.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import BinaryIO
from unittest.mock import patch

import msgspec
import numpy as np
from ddpobs_server.operations import bench

from benchmarks.source import digest
from ddpobs import telemetry, wire
from ddpobs.clocks import HostClock
from ddpobs.config import TelemetryConfig
from ddpobs.export import delivery, exporter, identity
from ddpobs.export.batch_encoder import BatchEncoder
from ddpobs.export.http_sender import Outcome, Sender
from ddpobs.ranks import straggler_exchange
from ddpobs.recording.module_recorder import BackwardRecord
from ddpobs.steps.step_columns import RawSteps
from ddpobs.steps.step_tracker import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, RawStep, Segment

STEP_S, BUCKETS = 0.5, 40
PARAMETERS = 10
"""Of a bucket."""
RUN, ATTEMPT = "benchmark", "a" * 16
_EARLY_S = 3.0
"""Threads start so long before the first batch is due."""
_AGAIN_S = 0.2


class Rank(telemetry.Telemetry):
    """A process's telemetry without the process: it is given its steps, and hooks nothing.

    Args:
        config: Of the exporter.
        rank: Which of so many.
        ranks: In the job.
        now_ns: The time.
    """

    def __init__(self, config: TelemetryConfig, rank: int, ranks: int, now_ns: Callable[[], int]) -> None:
        self._clock, self._steps = HostClock(), RawSteps()
        self.exporter = self._exporter = exporter.Exporter(config, self._encode)
        hello = wire.Hello(
            host=f"node{rank // 8}", pid=1000 + rank, device="cpu", backend="gloo", versions={"ddpobs": "benchmark"}
        )
        self._encoder = BatchEncoder(hello, self._read, lambda steps: None, self.exporter.count_lost)
        self._recorders = []
        self._config, self._now_ns, self._number, self._ranks = config, now_ns, rank, ranks
        self._random = np.random.default_rng(rank)
        self.steps = 0
        self.exporter.identify(identity.Identity(RUN, ATTEMPT, f"{rank:016x}", rank, ranks))
        self.exporter.call_every(config.pulse_s, self._offer_steps)
        self.exporter.call_every(config.pulse_s, self._pulse)
        self.exporter.offer(layout())

    def step(self) -> None:
        """A step has ended."""
        sampled = self.steps % self._config.readiness_every == 0
        self._add_step(raw_step(self.steps, self._now_ns(), self._random, sampled))
        self.steps += 1
        if self._number == 0 and self.steps % self._config.peers_every == 0:
            self._share()

    def _share(self) -> None:
        """Statistics over all ranks, as rank 0 sends them."""
        window = np.arange(self.steps - self._config.peers_every, self.steps)
        rows = self._random.gamma(20.0, 1e6, (len(window), self._ranks, straggler_exchange.COLUMNS)).astype(np.int64)
        rows[:, :, 0], rows[:, :, 1] = window[:, None], round(1e9 * STEP_S)
        self.exporter.offer(straggler_exchange.statistics(rows))

    def end(self) -> None:
        """The training is over: what is left is one more batch."""
        self._offer_steps()
        self._event("goodbye", self.steps, {})
        self.exporter._cut_everything()

    def _pulse(self) -> None:
        told = wire.Pulse(
            at_ns=self._now_ns(), phase="backward", step=self.steps, module=0, bucket=self.steps % BUCKETS
        )
        self.exporter.offer_latest(told)


def layout() -> wire.Layout:
    """Of a model of 400 parameters."""
    buckets = [
        wire.Bucket(
            size_bytes=25_000_000,
            dtype="float32",
            parameters=[
                wire.Parameter(name=f"layers.{one}.{place}.weight", size=625_000) for place in range(PARAMETERS)
            ],
        )
        for one in range(BUCKETS)
    ]
    return wire.Layout(module=0, name="Model", revision=0, comm="allreduce", buckets=buckets)


def raw_step(number: int, end_ns: int, random: np.random.Generator, sampled: bool) -> RawStep:
    """As the training thread leaves it; compute and communication of each bucket vary by themselves."""
    ready = random.gamma(20.0, 4e5, BUCKETS).cumsum().astype(np.int64)
    launched = ready + random.integers(5_000, 60_000, BUCKETS)
    done = launched + random.gamma(4.0, 5e5, BUCKETS).astype(np.int64)
    forward_ns, optimizer_ns = map(int, random.integers(3_000_000, 9_000_000, 2))
    start_ns, returned_ns = end_ns - round(1e9 * STEP_S), end_ns - optimizer_ns
    began_ns = returned_ns - int(done.max()) - 100_000
    record = BackwardRecord(0, 0, BUCKETS, None)
    record.ready_ns, record.launched_ns, record.done_ns = (
        (began_ns + times).tolist() for times in (ready, launched, done)
    )
    if sampled:
        record.parameter_ready_ns = np.repeat(began_ns + ready, PARAMETERS).tolist()
    switches = [
        (OTHER, start_ns),
        (DATA, start_ns + 50_000),
        (FORWARD, start_ns + forward_ns),
        (BACKWARD, began_ns),
        (OPTIMIZER, returned_ns),
        (OTHER, end_ns - 200_000),
    ]
    segment = Segment(returned_ns, [record], number > 0, number)
    return RawStep(number, switches, end_ns, [segment], samples=32, micro_steps=1)


class Due(msgspec.Struct, array_like=True):
    """A batch in a file: its place there, and when it is to be sent, in seconds since the job's start."""

    source: str
    seq: int
    offset: int
    size: int
    at_s: float


@dataclass
class Prepared:
    """One client's batches.

    Attributes:
        bodies: Name of the file that holds them.
        ranks: Of each rank, in order.
        spans: In all of them.
    """

    bodies: str
    ranks: list[list[Due]]
    spans: int


def prepare(ranks: Sequence[int], of: int, seconds: float, flush_s: float, bodies: Path) -> Prepared:
    """Make all batches of these ranks, in simulated time."""
    now_s = 0.0
    origin_ns, wall_ns = time.monotonic_ns(), time.time_ns()

    def now_ns() -> int:
        return origin_ns + round(1e9 * now_s)

    simulated = SimpleNamespace(
        time=lambda: now_s, monotonic=lambda: now_s, monotonic_ns=now_ns, time_ns=time.time_ns, sleep=lambda _: None
    )
    found = Prepared(bodies.name, [], 0)
    with ExitStack() as stack:
        for module in (exporter, delivery, telemetry):
            stack.enter_context(patch.object(module, "time", simulated))
        anchored = lambda: wire.Anchor(wall_ns=wall_ns + round(1e9 * now_s), monotonic_ns=now_ns())  # noqa: E731
        stack.enter_context(patch.object(exporter, "anchor", anchored))
        out = stack.enter_context(bodies.open("wb"))
        for number in ranks:
            now_s, dues = 0.0, list[Due]()
            rank = Rank(TelemetryConfig(flush_s=flush_s), number, of, now_ns)
            wakes_s = 0.0
            while rank.steps < round(seconds / STEP_S):
                now_s = min(wakes_s, STEP_S * (rank.steps + 1))
                if now_s < wakes_s:
                    rank.step()
                else:
                    rank.exporter._tick()
                    rank.exporter._cut_due()
                    wakes_s = now_s + rank.exporter._pause_s()
                dues += kept(rank.exporter._delivery, out)
            rank.end()
            dues += kept(rank.exporter._delivery, out, now_s)
            found.ranks.append(dues)
            found.spans += rank.steps * BUCKETS
    return found


def kept(sent: delivery.Delivery, out: BinaryIO, at_s: float | None = None) -> list[Due]:
    """What waits to be sent, written down; at the end of a run it waits no more."""
    dues = []
    for one in sent._queue:
        dues.append(Due(one.source, one.seq, out.tell(), len(one.body), sent._spread_until if at_s is None else at_s))
        out.write(one.body)
    sent._queue.clear()
    return dues


def prepared(client: int, options: argparse.Namespace, folder: Path) -> Prepared:
    """This client's batches: made, or found where the same were made before."""
    made_by = digest("ddpobs", "benchmarks/job.py")
    name = f"{made_by}-{options.ranks}-{options.seconds:g}-{options.flush_s:g}-{client}-of-{options.clients}"
    bodies, index = folder / f"{name}.bodies", folder / f"{name}.index"
    if index.exists():
        return msgspec.msgpack.decode(index.read_bytes(), type=Prepared)
    ranks = range(client, options.ranks, options.clients)
    found = prepare(ranks, options.ranks, options.seconds, options.flush_s, bodies)
    index.write_bytes(msgspec.msgpack.encode(found))
    return found


def send(client: int, address: Callable[[], str], options: argparse.Namespace, folder: Path) -> bench.Sent:
    """Send this client's batches when they are due, a thread and a connection for each rank."""
    batches = prepared(client, options, folder)
    config = TelemetryConfig(collector=address())
    began = time.monotonic() + _EARLY_S
    took_s: dict[str, list[float]] = {"first": [], "last": [], "others": []}
    failed: list[str] = []
    with (folder / batches.bodies).open("rb") as bodies:

        def rank(dues: Sequence[Due]) -> None:
            sender = Sender(config)
            for due in dues:
                due_s = began + due.at_s
                time.sleep(max(0.0, due_s - time.monotonic()))
                body = os.pread(bodies.fileno(), due.size, due.offset)
                while (answer := sender.send(RUN, due.source, due.seq, body)).outcome is Outcome.RETRY:
                    time.sleep(_AGAIN_S)
                if answer.outcome not in (Outcome.STORED, Outcome.REPEATED):
                    failed.append(answer.detail)
                    return
                part = "first" if due.seq == 0 else "last" if due is dues[-1] else "others"
                took_s[part].append(time.monotonic() - due_s)

        threads = [threading.Thread(target=rank, args=(dues,)) for dues in batches.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise RuntimeError(failed[0])
    return bench.Sent(batches.spans, took_s)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Send the whole job to a collector of its own.

    Raises:
        RuntimeError: The collector did not start, or refused a batch.
    """
    with (
        TemporaryDirectory(prefix="ddpobs-benchmark-") as name,
        bench.senders(options.clients, send, options, folder) as pipes,
        bench.collector(Path(name), f"sqlite:///{name}/runs.db") as (process, address),
    ):
        found = bench.drive(pipes, process.pid, address)
        found["lost"] = found["spans"] - bench.stored(address)
        found["ranks"], found["seconds"] = options.ranks, options.seconds
        return found


def main() -> None:
    """Print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600, help="of training; default: %(default)s")
    parser.add_argument("--flush-s", type=float, default=TelemetryConfig().flush_s, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=4, help="processes that send; default: %(default)s")
    parser.add_argument("--prepared", type=Path, help="keep the batches in this folder, or take them from it")
    parser.add_argument("--only-prepare", action="store_true", help="send nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest job that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.ranks, options.seconds, options.flush_s, options.clients = 4, 8.0, 2.0, 2
    if options.seconds < (least := 4 * options.flush_s):
        said = f"--seconds: expected {least:g} at least, for a first, a last and other batches"
        parser.error(f"{said}, got {options.seconds:g}")
    with TemporaryDirectory(prefix="ddpobs-benchmark-") as name:
        folder = options.prepared or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if options.only_prepare:
            with bench.senders(options.clients, send, options, folder) as pipes:
                for ours in pipes:
                    ours.recv()
            return
        found = measure(options, folder)
    resident = ", ".join(f"{found[f'resident_{at}mb']:.0f}" for at in ("quarter_", "half_", "three_quarters_", ""))
    print(
        f"{options.ranks} ranks for {options.seconds:g} s: {found['spans']:,.0f} bucket spans, "
        f"{found['lost']:,.0f} lost\nacknowledged from when it was due: half within {found['ack_p50_ms']:.0f} ms, "
        f"99 % within {found['ack_p99_ms']:.0f} ms\n99 % of the ranks' first batches within "
        f"{found['ack_p99_first_ms']:.0f} ms, of their last, which come all at once, {found['ack_p99_last_ms']:.0f}, "
        f"of the others {found['ack_p99_others_ms']:.0f}\nthe collector: {found['cpu_cores']:.2f} of a core, "
        f"resident {resident} MB at each quarter, the end {found['resident_ratio']:.3f} of the middle"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
