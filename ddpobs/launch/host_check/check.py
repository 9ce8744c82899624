"""The check of the hosts on one rank: it joins the others, measures, compares, and ends with the status.

It runs before the rank's script, in a process of its own. All ranks get all rates, so all come to the same result.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ddpobs.launch.host_check.comparison import Floats
from ddpobs.launch.host_check.history import history
from ddpobs.launch.host_check.measures import Measures
from ddpobs.launch.host_check.order import MEASURES, SLOW_HOST, Order
from ddpobs.launch.host_check.partners import groups_of, rounds
from ddpobs.launch.host_check.result import Result
from ddpobs.launch.start import ending_with
from ddpobs.recording.place.early_place import rank_of

_PREFIX = "ddpobs/check-hosts"
"""Before the keys in torch's store, which the script uses after the check."""
_EXTRA_S = 120.0
"""Longest wait for a rank, beside the time of the measures: hosts start a training at different times."""


def main() -> None:
    """Check the hosts, and end with `SLOW_HOST` if one is slow, or else with 0."""
    ending_with(os.getppid())()
    rank, ranks = rank_of(os.environ) or (0, 1)
    try:
        status = _check(Order.of(os.environ), rank, ranks)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        text = f"ddpobs: hosts are not compared, because the check of rank {rank} failed: {reason}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        status = 0
    os._exit(status)  # Threads of torch's would delay the end.


def _check(order: Order, rank: int, ranks: int) -> int:
    """Measure and compare; rank 0 prints the result."""
    began_s = time.monotonic()
    timeout = timedelta(seconds=order.seconds + _EXTRA_S)
    store = next(rendezvous("env://", rank, ranks, timeout=timeout))[0]
    dist.init_process_group("gloo", store=PrefixStore(_PREFIX, store), rank=rank, world_size=ranks, timeout=timeout)
    places = _gathered((socket.gethostname(), _has_own_gpu(os.environ)))
    hosts = [host for host, _ in places]
    is_on_gpus = all(has_gpu for _, has_gpu in places)
    device = _device(os.environ) if is_on_gpus else torch.device("cpu")
    fabric = dist.new_group(backend="nccl", timeout=timeout) if is_on_gpus else None
    partners = [turn[rank] for turn in rounds(groups_of(hosts))]
    with Measures(device, order.folder, fabric, partners) as measures:
        rates = _measured(measures, order)
        results = _gathered((rates.tolist(), measures.failures))
    result = Result(
        hosts=hosts,
        rates=np.array([of_rank for of_rank, _ in results]).swapaxes(0, 1),
        limit=order.limit,
        failures=[
            (rank, MEASURES[measure], text)
            for rank, (_, of_rank) in enumerate(results)
            for measure, text in of_rank.items()
        ],
        device="GPUs" if is_on_gpus else "CPUs",
        seconds=time.monotonic() - began_s,
    )
    if rank == 0:
        for line in result.lines(history(result, os.environ).lines(result)):
            print(line, file=sys.stderr, flush=True)  # noqa: T201
    dist.barrier()
    return SLOW_HOST if result.slow_hosts() else 0


def _measured(measures: Measures, order: Order) -> Floats:
    """Rates of this rank, shape [measures, repetitions]."""
    for measure in reversed(range(len(MEASURES))):  # Unmeasured: the first operations of each kind are slow.
        measures.rate(measure, 0.0)
    rates = [
        [measures.rate(measure, order.window_s) for measure in range(len(MEASURES))] for _ in range(order.repetitions)
    ]
    return np.array(rates).T


def _gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _has_own_gpu(environ: Mapping[str, str]) -> bool:
    """Whether each rank of this host has a GPU of its own, as NCCL needs it."""
    ranks = environ.get("LOCAL_WORLD_SIZE", "")
    return torch.cuda.is_available() and ranks.isdecimal() and int(ranks) <= torch.cuda.device_count()


def _device(environ: Mapping[str, str]) -> torch.device:
    device = torch.device("cuda", int(environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
