"""Works that a backward launched are dropped by threads of the process group's, at a time when Python may be gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
from ddpobs import DistributedDataParallel, telemetry
from ddpobs.torch_seam import collectives, interpreter_exit
from ddpobs.torch_seam.patching import unwrap
from tests.distributed.compare import batch, net
from tests.distributed.launch import run_ranks
from tests.distributed.sent import sending
from tests.integration.training import ROOT
from tests.ports import free_port


def attached(module: torch.nn.Module) -> Any:
    model = TorchDDP(module)
    ddpobs.attach(model, ddpobs.TelemetryConfig(collector="http://127.0.0.1:9"))
    return model


def test_works_hold_nothing_of_pythons() -> None:
    for kept in run_ranks(contexts_kept, 2):
        assert kept == {"plain": 0, "find_unused": 0, "static_graph": 0, "attached": 0}


def contexts_kept(rank: int, _: int) -> dict[str, int]:
    """Python contexts of backward passes that live on for as long as the works do that were launched in them."""
    return {
        "plain": contexts_of(DistributedDataParallel(net()), rank),
        "find_unused": contexts_of(DistributedDataParallel(net(), find_unused_parameters=True), rank),
        "static_graph": contexts_of(DistributedDataParallel(net(), static_graph=True), rank),
        "attached": contexts_of(attached(net()), rank),
    }


def callbacks_of_a_thread(rank: int, _: int) -> int:
    """How many callbacks the busiest of the group's threads remembers."""
    seen, counts = threading.local(), []

    def told(_: object) -> None:
        if threading.current_thread() is threading.main_thread():  # The work was done before it was asked.
            return
        seen.count = getattr(seen, "count", 0) + 1
        counts.append(seen.count)
        interpreter_exit.stay_in_interpreter()

    for _ in range(200):
        work = collectives.all_reduce(dist.group.WORLD, [torch.ones(4)])
        work.get_future().add_done_callback(told)
        work.wait()
    dist.barrier()
    return max(counts, default=0)


def test_threads_of_the_process_group_are_known_to_python_after_their_first_callback() -> None:
    assert all(most > 2 for most in run_ranks(callbacks_of_a_thread, 2))


def contexts_of(model: Any, rank: int) -> int:
    contexts: list[Any] = []
    works: list[Any] = []

    def noted(_: torch.Tensor) -> None:
        contexts.append(weakref.ref(torch._C._get_obj_in_tls("context")))

    def kept(*args: Any) -> Any:
        works.append(unwrap(torch.distributed.ProcessGroup.allreduce)(*args))
        return works[-1]

    next(reversed(list(model.parameters()))).register_hook(noted)
    with mock.patch.object(collectives, "_ALL_REDUCE", kept):
        for step in range(3):
            model(batch(rank, step)).sum().backward()
    assert len(works) >= len(contexts) == 3
    return sum(context() is not None for context in contexts)


def dies(rank: int, _: int) -> list[str]:
    """What is told of a script that an error ended, and of an interactive session in which there was one."""
    told = []
    for interactive in (False, True):
        with mock.patch.object(sys, "last_value", KeyError("x"), create=True), sending() as sent:
            if interactive:
                sys.ps1 = ">"
            ddp = DistributedDataParallel(net(), telemetry=sent.config)
            ddp(batch(rank, 0)).sum().backward()
        told.append(sent.events[-1])
    return told


def test_a_script_that_died_of_an_error_says_no_goodbye() -> None:
    assert run_ranks(dies, 2) == [["failed", "goodbye"]] * 2


def raises_in_child(rank: int, _: int, code: int) -> list[str]:
    """What `torch.multiprocessing.spawn` makes of an error: a message for its parent, and an exit."""
    with sending() as sent:
        ddp = DistributedDataParallel(net(), telemetry=sent.config)
        ddp(batch(rank, 0)).sum().backward()
        assert telemetry._process is not None
        try:
            try:
                raise KeyError("x")
            except KeyError:
                sys.exit(code)
        except SystemExit:
            telemetry._process._at_exit()
    return sent.events[-1:]


@pytest.mark.parametrize(("code", "said"), [(1, "failed"), (0, "goodbye")])
def test_a_spawned_rank_that_died_of_an_error_says_no_goodbye(code: int, said: str) -> None:
    assert run_ranks(raises_in_child, 2, code) == [[said]] * 2


def keys_of_nan(rank: int, _: int) -> list[int]:
    """How many keys the store has, after steps whose gradients are NaN, and after more of them."""
    store = torch.distributed.distributed_c10d._get_default_store()
    ddp, found = DistributedDataParallel(net()), []
    for _ in range(3):
        for step in range(5):
            (ddp(batch(rank, step)).sum() * float("nan")).backward()
            ddp.zero_grad()
        torch.distributed.barrier()
        found.append(store.num_keys())
        torch.distributed.barrier()
    return found


def test_gradients_that_are_nan_leave_nothing_in_the_store() -> None:
    for first, *later in run_ranks(keys_of_nan, 2):
        assert later == [first, first]


LAST_ONE = """
import os, time, torch, torch.distributed as dist, ddpobs
dist.init_process_group("gloo")
config = ddpobs.TelemetryConfig(collector="http://127.0.0.1:9", spool=os.environ["SPOOL"], pulse_s=0.2, flush_s=0.4)
model = ddpobs.DistributedDataParallel(torch.nn.Linear(2, 1), telemetry=config)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
time.sleep(1)
dist.destroy_process_group()
time.sleep(3 * int(os.environ["RANK"]))
"""


def test_a_rank_that_outlives_the_store_says_so_no_more_than_once(tmp_path: Any) -> None:
    """Torch prints a page with each call whose connection is gone, and each pulse makes some."""
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SPOOL": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LAST_ONE], env=environ | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert said[1].count("TCPStore") <= 3, said[1]  # One warning, whose stack names it twice.
    assert "Traceback" not in said[1]
