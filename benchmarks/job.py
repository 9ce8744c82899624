"""Simulate a job of many ranks and one collector: is anything lost or late, and does memory grow?

    python -m benchmarks.job [--ranks 1024] [--seconds 600] [--clients 4] [--prepared FOLDER] [--json FILE] [--smoke]

Ranks and collector run the project's own code. Each rank has the telemetry of a training process: a queue, batches that
the exporter completes, pulses that travel in them, hello, layouts, readiness and counts. Rank 0 also sends the
statistics over all ranks. Only the steps are synthetic: two a second, which all ranks end at the same moment, with 40
different buckets.

One machine has no cores for all ranks. Their batches are therefore made before, in simulated time, and written to files
(`--prepared` keeps the files for the next run). The real sender then sends each batch when it is due, each rank over
its own connection. A batch's latency runs from the moment at which it was due to its acknowledgement.
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

from benchmarks import capacity
from benchmarks.source import digest
from ddpobs import wire
from ddpobs.clocks import HostClock
from ddpobs.config import TelemetryConfig
from ddpobs.export import backlog, batch_cutter, delivery, exporter, identity, schedule
from ddpobs.export.batch_encoder import BatchEncoder
from ddpobs.export.http_sender import Outcome, Sender
from ddpobs.ranks import straggler_exchange
from ddpobs.steps.account import Account, StartUp
from ddpobs.steps.backward_record import BackwardRecord
from ddpobs.steps.raw_step import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, InputSize, RawStep, Segment
from ddpobs.telemetry import step_flow
from ddpobs.telemetry.step_flow import StepFlow

STEP_S, BUCKETS = 0.5, 40
PARAMETERS = 10
"""Parameters of a bucket."""
RUN, ATTEMPT = "benchmark", "a" * 16
_EARLY_S = 3.0
"""Seconds from the threads' start to the first batch."""
_RETRY_S = 0.2


class Rank:
    """A process's telemetry without the process: it receives its steps, and hooks nothing.

    Args:
        config: Settings of the exporter.
        rank: This rank's number.
        ranks: Number of ranks in the job.
        now_ns: Returns the simulated time.
    """

    def __init__(self, config: TelemetryConfig, rank: int, ranks: int, now_ns: Callable[[], int]) -> None:
        self.exporter = exporter.Exporter(config, self._encode)
        self._flow = StepFlow(config, HostClock(), self.exporter.offer, Account(StartUp(None, 0, 0)))
        hello = wire.Hello(
            host=f"node{rank // 8}", pid=1000 + rank, device="cpu", backend="gloo", versions={"ddpobs": "benchmark"}
        )
        self._encoder = BatchEncoder(hello, self._flow.read, lambda steps: None, self.exporter.count_lost)
        self._config, self._now_ns, self._number, self._ranks = config, now_ns, rank, ranks
        self._random = np.random.default_rng(rank)
        self.steps = 0
        self.exporter.identify(identity.Identity(RUN, ATTEMPT, f"{rank:016x}", rank, ranks))
        self.exporter.call_every(config.pulse_s, self._flow.offer_steps)
        self.exporter.call_every(config.pulse_s, self._pulse)
        self.exporter.offer(layout())

    def step(self) -> None:
        """Record the end of a step."""
        sampled = self.steps % self._config.readiness_every == 0
        self._flow.add(raw_step(self.steps, self._now_ns(), self._random, sampled))
        self.steps += 1
        if self._number == 0 and self.steps % self._config.peers_every == 0:
            self._share()

    def _share(self) -> None:
        """Offer statistics over all ranks, as rank 0 sends them."""
        window = np.arange(self.steps - self._config.peers_every, self.steps)
        rows = self._random.gamma(20.0, 1e6, (len(window), self._ranks, straggler_exchange.COLUMNS)).astype(np.int64)
        rows[:, :, 0], rows[:, :, 1] = window[:, None], round(1e9 * STEP_S)
        self.exporter.offer(straggler_exchange.statistics(rows))

    def end(self) -> None:
        """End the training: the remaining records become one more batch."""
        self._flow.offer_steps()
        self.exporter.offer(wire.Event(kind="goodbye", at_ns=self._now_ns(), step=self.steps, detail={}), weight=1)
        self.exporter._cut_everything()

    def _encode(self, records: Sequence[object], envelope: identity.Envelope) -> wire.Batch:
        return self._encoder.encode(records, envelope, set())

    def _pulse(self) -> None:
        pulse = wire.Pulse(
            at_ns=self._now_ns(), phase="backward", step=self.steps, module=0, bucket=self.steps % BUCKETS
        )
        self.exporter.offer_latest(pulse)


def layout() -> wire.Layout:
    """Return the layout of a model of 400 parameters."""
    buckets = [
        wire.Bucket(
            size_bytes=25_000_000,
            dtype="float32",
            parameters=[
                wire.Parameter(name=f"layers.{bucket}.{index}.weight", size=625_000) for index in range(PARAMETERS)
            ],
        )
        for bucket in range(BUCKETS)
    ]
    return wire.Layout(module=0, name="Model", revision=0, comm="allreduce", buckets=buckets)


def raw_step(number: int, end_ns: int, random: np.random.Generator, sampled: bool) -> RawStep:
    """Return a step as the training thread records it. Compute and communication of each bucket vary independently."""
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
    return RawStep(number, switches, end_ns, [segment], size=InputSize(32, 32 * 1024, 1024), micro_steps=1)


class Due(msgspec.Struct, array_like=True):
    """A batch in a file: its offset there, and its time of sending, in seconds since the job's start."""

    source: str
    seq: int
    offset: int
    size: int
    at_s: float


@dataclass
class Prepared:
    """The batches of one client.

    Attributes:
        bodies: Name of the file that holds them.
        ranks: The batches of each rank, in order.
        spans: Number of spans in all of them.
    """

    bodies: str
    ranks: list[list[Due]]
    spans: int


def prepare(ranks: Sequence[int], world_size: int, seconds: float, flush_s: float, bodies: Path) -> Prepared:
    """Make all batches of these ranks of a job of `world_size` ranks, in simulated time."""
    now_s = 0.0
    origin_ns, wall_ns = time.monotonic_ns(), time.time_ns()

    def now_ns() -> int:
        return origin_ns + round(1e9 * now_s)

    simulated = SimpleNamespace(
        time=lambda: now_s, monotonic=lambda: now_s, monotonic_ns=now_ns, time_ns=time.time_ns, sleep=lambda _: None
    )
    result = Prepared(bodies.name, [], 0)
    with ExitStack() as stack:
        for module in (exporter, schedule, delivery, backlog, step_flow):
            stack.enter_context(patch.object(module, "time", simulated))
        anchored = lambda: wire.Anchor(wall_ns=wall_ns + round(1e9 * now_s), monotonic_ns=now_ns())  # noqa: E731
        stack.enter_context(patch.object(batch_cutter, "anchor", anchored))
        out = stack.enter_context(bodies.open("wb"))
        for number in ranks:
            now_s, batches = 0.0, list[Due]()
            rank = Rank(TelemetryConfig(flush_s=flush_s), number, world_size, now_ns)
            wakes_s = 0.0
            while rank.steps < round(seconds / STEP_S):
                now_s = min(wakes_s, STEP_S * (rank.steps + 1))
                if now_s < wakes_s:
                    rank.step()
                else:
                    rank.exporter._tick()
                    rank.exporter._cut_due()
                    wakes_s = now_s + rank.exporter._schedule.pause_s()
                batches += write_waiting(rank.exporter._delivery, out)
            rank.end()
            batches += write_waiting(rank.exporter._delivery, out, now_s)
            result.ranks.append(batches)
            result.spans += rank.steps * BUCKETS
    return result


def write_waiting(sender: delivery.Delivery, file: BinaryIO, at_s: float | None = None) -> list[Due]:
    """Write the waiting batches to the file. `at_s` is their time of sending at the end of a run."""
    batches = []
    for batch in sender._queue:
        batches.append(
            Due(batch.source, batch.seq, file.tell(), len(batch.body), sender._spread_until if at_s is None else at_s)
        )
        file.write(batch.body)
    sender._queue.clear()
    return batches


def load_or_prepare(client: int, options: argparse.Namespace, folder: Path) -> Prepared:
    """Return this client's batches, from the files of an earlier run if they are the same."""
    code = digest("ddpobs", "benchmarks/job.py")
    name = f"{code}-{options.ranks}-{options.seconds:g}-{options.flush_s:g}-{client}-of-{options.clients}"
    bodies, index = folder / f"{name}.bodies", folder / f"{name}.index"
    if index.exists():
        return msgspec.msgpack.decode(index.read_bytes(), type=Prepared)
    ranks = range(client, options.ranks, options.clients)
    result = prepare(ranks, options.ranks, options.seconds, options.flush_s, bodies)
    index.write_bytes(msgspec.msgpack.encode(result))
    return result


def send(client: int, address: Callable[[], str], options: argparse.Namespace, folder: Path) -> capacity.Sent:
    """Send this client's batches when they are due, with a thread and a connection for each rank."""
    batches = load_or_prepare(client, options, folder)
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
                    time.sleep(_RETRY_S)
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
    return capacity.Sent(batches.spans, took_s)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Send the whole job to a new collector.

    Raises:
        RuntimeError: The collector did not start, or refused a batch.
    """
    with (
        TemporaryDirectory(prefix="ddpobs-benchmark-") as name,
        capacity.senders(options.clients, send, options, folder) as pipes,
        capacity.collector(Path(name), f"sqlite:///{name}/runs.db") as (process, address),
    ):
        result = capacity.drive(pipes, process.pid, address)
        result["lost"] = result["spans"] - capacity.stored(address)
        result["ranks"], result["seconds"] = options.ranks, options.seconds
        return result


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600, help="seconds of training; default: %(default)s")
    parser.add_argument("--flush-s", type=float, default=TelemetryConfig().flush_s, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=4, help="sending processes; default: %(default)s")
    parser.add_argument("--prepared", type=Path, help="folder that keeps the batches for later runs")
    parser.add_argument("--only-prepare", action="store_true", help="send nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    options = parser.parse_args()
    if options.smoke:
        options.ranks, options.seconds, options.flush_s, options.clients = 4, 8.0, 2.0, 2
    if options.seconds < (least := 4 * options.flush_s):
        reason = f"--seconds: expected at least {least:g}, for a first, a last and other batches"
        parser.error(f"{reason}, got {options.seconds:g}")
    with TemporaryDirectory(prefix="ddpobs-benchmark-") as name:
        folder = options.prepared or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if options.only_prepare:
            with capacity.senders(options.clients, send, options, folder) as pipes:
                for pipe in pipes:
                    pipe.recv()
            return
        result = measure(options, folder)
    resident = ", ".join(f"{result[f'resident_{part}mb']:.0f}" for part in ("quarter_", "half_", "three_quarters_", ""))
    print(
        f"{options.ranks} ranks for {options.seconds:g} s: {result['spans']:,.0f} bucket spans, "
        f"{result['lost']:,.0f} lost\nacknowledged after being due: half within {result['ack_p50_ms']:.0f} ms, "
        f"99 % within {result['ack_p99_ms']:.0f} ms\n99 % of the ranks' first batches within "
        f"{result['ack_p99_first_ms']:.0f} ms, of their simultaneous last batches {result['ack_p99_last_ms']:.0f}, "
        f"of the others {result['ack_p99_others_ms']:.0f}\nthe collector: {result['cpu_cores']:.2f} of a core, "
        f"resident {resident} MB at each quarter, the end {result['resident_ratio']:.3f} of the middle"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
