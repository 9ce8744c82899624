"""The end of a process: works that a process group's threads drop late, and the events of an exit."""

from __future__ import annotations

import sys
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zstandard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddpobs
from benchmarks.faults.launch import ranks_of
from benchmarks.rig import patience
from ddpobs import DistributedDataParallel, telemetry, wire
from ddpobs.torch_seam import collectives, interpreter_exit
from ddpobs.torch_seam.patching import unwrap
from tests.support.distributed.compare import batch, net
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.sent import sending


def attached(module: torch.nn.Module) -> Any:
    model = TorchDDP(module)
    ddpobs.attach(model, ddpobs.TelemetryConfig(collector="http://127.0.0.1:9"))
    return model


def test_works_hold_no_python_object() -> None:
    for recording_all_reduce in run_ranks(contexts_kept, 2):
        assert recording_all_reduce == {"plain": 0, "find_unused": 0, "static_graph": 0, "attached": 0}


def contexts_kept(rank: int, _: int) -> dict[str, int]:
    """Number of Python contexts of backward passes that live as long as the works launched in them."""
    return {
        "plain": contexts_of(DistributedDataParallel(net()), rank),
        "find_unused": contexts_of(DistributedDataParallel(net(), find_unused_parameters=True), rank),
        "static_graph": contexts_of(DistributedDataParallel(net(), static_graph=True), rank),
        "attached": contexts_of(attached(net()), rank),
    }


def callbacks_of_a_thread(rank: int, _: int) -> int:
    """Number of callbacks in the state of the group's busiest thread."""
    thread_state, counts = threading.local(), []

    def count_callback(_: object) -> None:
        if threading.current_thread() is threading.main_thread():  # The work was done before the callback was added.
            return
        thread_state.count = getattr(thread_state, "count", 0) + 1
        counts.append(thread_state.count)
        interpreter_exit.stay_in_interpreter()

    group = dist.group.WORLD
    assert group is not None
    for _ in range(200):
        work = collectives.all_reduce(group, [torch.ones(4)])
        work.get_future().add_done_callback(count_callback)
        work.wait()
    dist.barrier()
    return max(counts, default=0)


def test_a_process_groups_thread_keeps_its_python_state_between_callbacks() -> None:
    assert all(most > 2 for most in run_ranks(callbacks_of_a_thread, 2))


def contexts_of(model: Any, rank: int) -> int:
    contexts: list[Any] = []
    works: list[Any] = []

    def record_context(_: torch.Tensor) -> None:
        contexts.append(weakref.ref(torch._C._get_obj_in_tls("context")))

    def recording_all_reduce(*args: Any) -> Any:
        works.append(unwrap(torch.distributed.ProcessGroup.allreduce)(*args))
        return works[-1]

    next(reversed(list(model.parameters()))).register_hook(record_context)
    key = (torch.distributed.ProcessGroup, "allreduce")
    with mock.patch.dict(collectives._methods, {key: recording_all_reduce}):
        for step in range(3):
            model(batch(rank, step)).sum().backward()
    assert len(works) >= len(contexts) == 3
    return sum(context() is not None for context in contexts)


def dies(rank: int, _: int) -> list[str]:
    """The last event of a script that ended by an error, and of an interactive session with an error."""
    events = []
    for interactive in (False, True):
        with mock.patch.object(sys, "last_value", KeyError("x"), create=True), sending() as records:
            if interactive:
                sys.ps1 = ">"
            ddp = DistributedDataParallel(net(), telemetry=records.config)
            ddp(batch(rank, 0)).sum().backward()
        events.append(records.events[-1])
    return events


def test_a_script_that_ended_by_an_error_sends_failed_instead_of_goodbye() -> None:
    assert run_ranks(dies, 2) == [["failed", "goodbye"]] * 2


def raises_in_child(rank: int, _: int, code: int) -> list[str]:
    """Exit as `torch.multiprocessing.spawn` does after an error: with a message for the parent and an exit code."""
    with sending() as records:
        ddp = DistributedDataParallel(net(), telemetry=records.config)
        ddp(batch(rank, 0)).sum().backward()
        assert telemetry._process is not None
        try:
            try:
                raise KeyError("x")
            except KeyError:
                sys.exit(code)
        except SystemExit:
            telemetry._process._at_exit()
    return records.events[-1:]


@pytest.mark.parametrize(("code", "last_event"), [(1, "failed"), (0, "goodbye")])
def test_a_spawned_rank_that_ended_by_an_error_sends_failed_instead_of_goodbye(code: int, last_event: str) -> None:
    assert run_ranks(raises_in_child, 2, code) == [[last_event]] * 2


def keys_of_nan(rank: int, _: int) -> list[int]:
    """Number of keys in the store after steps with NaN gradients, and after more of them."""
    store = torch.distributed.distributed_c10d._get_default_store()
    ddp, key_counts = DistributedDataParallel(net()), []
    for _ in range(3):
        for step in range(5):
            (ddp(batch(rank, step)).sum() * float("nan")).backward()
            ddp.zero_grad()
        torch.distributed.barrier()
        key_counts.append(store.num_keys())
        torch.distributed.barrier()
    return key_counts


def test_nan_gradients_leave_no_keys_in_the_store() -> None:
    for first, *later in run_ranks(keys_of_nan, 2):
        assert later == [first, first]


LAST_ONE = """
import os, time, torch, torch.distributed as dist, ddpobs
dist.init_process_group("gloo")
config = ddpobs.TelemetryConfig(collector="http://127.0.0.1:9", spool=os.environ["SPOOL"], pulse_s=0.2, flush_s=0.4,
    hang_after_s=float(os.environ["HANG_AFTER_S"]))
model = ddpobs.DistributedDataParallel(torch.nn.Linear(2, 1), telemetry=config)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
time.sleep(1)
dist.destroy_process_group()
time.sleep(3 * int(os.environ["RANK"]))
"""


@pytest.mark.parametrize("hang_after_s", [8.0, 2.0])
def test_a_rank_that_outlives_the_store_prints_nothing_of_torchs(hang_after_s: float, tmp_path: Path) -> None:
    """Torch prints a page for each call on a lost connection. A rank that stands still also opens another one."""
    assert train_apart(LAST_ONE, tmp_path, HANG_AFTER_S=str(hang_after_s)) == ["", ""]


FAILING_FIRST = """
import os, time, torch, torch.distributed as dist, ddpobs
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
config = ddpobs.TelemetryConfig(collector="http://127.0.0.1:9", spool=os.environ["SPOOL"])
model = ddpobs.DistributedDataParallel(torch.nn.Linear(2, 1), telemetry=config)
time.sleep(3 * rank)
raise ValueError(f"of rank {rank}")
"""


def test_both_ranks_report_errors_under_one_run_when_the_rank_with_the_store_fails_at_once(tmp_path: Path) -> None:
    train_apart(FAILING_FIRST, tmp_path, status=1)
    bodies = [zstandard.decompress(path.read_bytes(), max_output_size=2**24) for path in tmp_path.glob("*.batch")]
    batches = [wire.decode(body) for body in bodies]
    failed = {batch.rank: event for batch in batches for event in batch.events if event.kind == "failed"}
    assert {rank: event.detail["message"] for rank, event in failed.items()} == {0: "of rank 0", 1: "of rank 1"}
    assert len({(batch.run, batch.attempt) for batch in batches}) == 1


def train_apart(code: str, folder: Path, status: int = 0, **environ: str) -> list[str]:
    """Run two ranks without a launcher, so that rank 0 has the store; return what each prints."""
    (script := folder / "script.py").write_text(code)
    with ranks_of(script, ranks=2, folder=folder, environ={"SPOOL": str(folder), **environ}) as ranks:
        assert [process.wait(patience.HANG_S) for process in ranks.processes] == [status, status], ranks.logs()
    outputs = [(folder / f"rank-{rank}.log").read_text() for rank in range(2)]
    return ["\n".join(line for line in output.splitlines() if not line.startswith("ddpobs:")) for output in outputs]
