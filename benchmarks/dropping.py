"""Compare dropped layers that are known beforehand with a search for unused parameters, over links of several speeds.

    sudo python -m benchmarks.dropping [--models tiny,transformer] [--rates loopback,1gbit] [--probability 0.2]
        [--launches 3] [--rounds 20] [--smoke]

Two ranks train with one thread each; on another link than `loopback` each has a network namespace, which needs root.
The trainings take turns of some steps in the same processes, in a new order each round, and all drop the same layers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.links import INTERFACE, LinkError, Links, address, links
from benchmarks.models import MODELS
from benchmarks.pairs import Seconds, ratio
from benchmarks.rig.ranks import run_ranks
from benchmarks.tables import rows_of
from ddpobs import DistributedDataParallel, LayerDrop

_RANKS, _TURN_STEPS, _WARM_UP = 2, 6, 4
LOOPBACK = "loopback"
_TORCH, _OURS, _FINDS, _ALL = "torch, finds unused", "ours, drops", "ours, finds unused", "ours, drops nothing"
Step = Callable[[], None]


def with_layer_drop(module: nn.Module, probability: float) -> nn.Module:
    """Replace the module's lists of layers, which must be residual or shape-preserving, and return it."""
    if isinstance(module, nn.Sequential):
        return LayerDrop(module.children(), probability)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ModuleList):
                setattr(parent, name, LayerDrop(child, probability))
    return module


def _stepping(name: str, model: str, probability: float) -> Step:
    torch.manual_seed(0)
    measured = MODELS[model]
    module = with_layer_drop(measured.build(), 0.0 if name == _ALL else probability)
    kind = TorchDDP if name == _TORCH else partial(DistributedDataParallel, telemetry=False)
    ddp: Any = kind(module, find_unused_parameters=name in {_TORCH, _FINDS})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-5)
    lists = [layers for layers in ddp.modules() if isinstance(layers, LayerDrop)]
    batch, count = measured.batch(), 0

    def step() -> None:
        nonlocal count
        if name == _TORCH:
            for layers in lists:
                layers.draw(count)
        count += 1
        optimizer.zero_grad()
        measured.loss(ddp(*batch)).backward()
        optimizer.step()

    return step


def _rank_main(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # The first step drops nothing, so that the flag seems needless.
    dist.init_process_group("gloo", init_method=options.rendezvous, rank=rank, world_size=_RANKS)
    steps = {name: _stepping(name, options.models, options.probability) for name in (_TORCH, _OURS, _FINDS, _ALL)}
    for step in steps.values():
        _seconds(step, _WARM_UP)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffled = list(steps), random.Random(0)
    for _ in range(options.rounds):
        shuffled.shuffle(order)
        for name in order:
            seconds[name].append(_seconds(steps[name], _TURN_STEPS) / _TURN_STEPS)
    if rank == 0:
        Path(options.results).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _seconds(step: Step, count: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - began


@contextmanager
def _network(rate: str) -> Iterator[Links | None]:
    if rate == LOOPBACK:
        yield None
        return
    with links(_RANKS, rate) as network:
        yield network


def launch(model: str, rate: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Start the ranks, and return seconds a step, by training and round."""
    with tempfile.TemporaryDirectory() as folder, _network(rate) as network:
        results = Path(folder) / "results.json"
        rendezvous = f"tcp://{address(0)}:29500" if network else f"file://{folder}/store"
        arguments = {
            "models": model,
            "probability": options.probability,
            "rounds": options.rounds,
            "results": results,
            "rendezvous": rendezvous,
        }
        command = [sys.executable, "-m", "benchmarks.dropping", *(f"--{key}={arguments[key]}" for key in arguments)]
        commands = [[*command, f"--rank={rank}"] for rank in range(_RANKS)]
        environ = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        if network:
            commands = [network.inside(rank, command) for rank, command in enumerate(commands)]
            environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        run_ranks(commands, [environ] * _RANKS)
        return json.loads(results.read_text())  # type: ignore[no-any-return]


def row(model: str, rate: str, launches: list[dict[str, list[float]]]) -> list[str]:
    """Return a row: the time of a step with dropped layers, as a ratio of each other training's."""
    by_name: dict[str, Seconds] = {name: [launched[name] for launched in launches] for name in launches[0]}
    ratios = [str(ratio(by_name[_OURS], by_name[name], medians=len(launches) > 1)) for name in (_TORCH, _FINDS, _ALL)]
    return [MODELS[model].title, rate, *ratios]


def main() -> None:
    """Measure each model on each link, and print the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,transformer")
    parser.add_argument("--rates", default=f"{LOOPBACK},1gbit", help="as tc writes them, or loopback")
    parser.add_argument("--probability", type=float, default=0.2, help="of a layer to be dropped")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20, help="of each launch")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that touches everything")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _rank_main(options.rank, options)
        return
    if options.smoke:
        options.models, options.rates, options.launches, options.rounds = "tiny", LOOPBACK, 2, 1
    rows, head = [], ["model", "link", *(f"{_OURS} / {other}" for other in (_TORCH, _FINDS, _ALL))]
    try:
        for model in options.models.split(","):
            for rate in options.rates.split(","):
                rows.append(row(model, rate, [launch(model, rate, options) for _ in range(options.launches)]))
                print(rows_of(head, rows), flush=True)
    except LinkError as error:
        sys.exit(f"benchmarks.dropping: {error}")


if __name__ == "__main__":
    main()
