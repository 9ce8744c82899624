"""Measure the cost of finding replicas that part: fingerprints, the look at frozen parameters and at the optimizer.

    python -m benchmarks.apart [--models tiny,resnet50] [--rounds 30]

Processor time of the thread, because wall time on a shared machine depends on other processes. One process and no
collective: the share of a step is an upper limit, since a step of several ranks takes longer. A fingerprint is taken
every 1,000 steps by default.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.models import MODELS
from ddpobs.clocks import clock_for
from ddpobs.recording.journal import Journal
from ddpobs.recording.replicas.fingerprints import Fingerprints
from ddpobs.recording.replicas.unreduced import UnreducedGradients
from ddpobs.reducer.late_parameters import LateParameters

EVERY, FROZEN = 1000, 1000


def median_s(call: Callable[[], object], rounds: int) -> float:
    """Median processor time of a call."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def measure(name: str, rounds: int) -> dict[str, float]:
    """Seconds of a model's step, of one sample on the training thread, and of its part on the telemetry thread."""
    model = MODELS[name]
    module, inputs = model.build(), model.batch()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(module(*inputs)).backward()
        optimizer.step()

    step()
    names, parameters = zip(*module.named_parameters(), strict=True)
    fingerprints = Fingerprints(1, list(parameters), list(names), lambda _: None, 0)

    def sample() -> None:
        fingerprints.backward_began()
        fingerprints.reduced()
        fingerprints.forward_began(module.named_buffers())

    def sample_and_flush() -> None:
        sample()
        fingerprints.flush()

    sample_and_flush()
    sampled = median_s(sample, 10)
    fingerprints.flush()
    return {
        "step": median_s(step, rounds),
        "sample": sampled,
        "flush": max(0.0, median_s(sample_and_flush, rounds) - sampled),
        "look": look_at_optimizer_s(module, optimizer),
    }


def look_at_optimizer_s(module: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Seconds that an optimizer's step takes longer where its module is followed."""
    journal = Journal(clock_for("cpu"), lambda _: None)
    unreduced = UnreducedGradients(journal, lambda *_: None)
    names, parameters = zip(*module.named_parameters(), strict=True)
    marks = bytearray(len(names))
    source: Any = _Source(
        parameters=parameters,
        names=names,
        unreduced_parameters=(),
        forwards=0,
        has_local_gradients=lambda: 1 in marks,
        local_gradients=list,
    )
    unreduced.follow(0, source, lambda: True)
    return median_s(lambda: [unreduced._began(optimizer, (optimizer,), {}) for _ in range(1000)], 9) / 1000


class _Source(SimpleNamespace):
    """A source of gradients; a plain namespace takes no weak reference."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,resnet50", help=f"of {', '.join(MODELS)}; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=30, help="steps per model; default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | step | sample, training thread | telemetry thread | share of the steps | look at a step |")
    print("|---|---|---|---|---|---|")
    for name in options.models.split(","):
        figures = measure(name, options.rounds)
        share = (figures["sample"] + figures["flush"]) / EVERY / figures["step"] + figures["look"] / figures["step"]
        print(
            f"| {MODELS[name].title} | {figures['step'] * 1e3:.1f} ms | {figures['sample'] * 1e3:.2f} ms | "
            f"{figures['flush'] * 1e3:.2f} ms | {share:.3%} | {figures['look'] * 1e6:.1f} µs |"
        )
    frozen = LateParameters((str(i), nn.Parameter(torch.zeros(1), requires_grad=False), False) for i in range(FROZEN))

    def look() -> None:
        for _ in range(100):
            frozen.look()

    look_s = min(median_s(look, 5) for _ in range(9)) / 100
    print(f"\nLook at {FROZEN:,} frozen parameters: {look_s * 1e6:.1f} µs")


if __name__ == "__main__":
    main()
