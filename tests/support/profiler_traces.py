"""A small trace as torch.profiler writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STARTS = (0, 10_000, 20_000)
"""Microseconds at which the steps begin."""


def one(category: str, name: str, begin: int, lasts: int, thread: int = 1, **args: Any) -> dict[str, Any]:
    """An event; times in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": lasts, "tid": thread, "args": args}


def trace(folder: Path, name: str = "t.json", rank: int | None = 0, **fields: Any) -> Path:
    """Write a trace of three steps, each with a forward, a backward with one all-reduce, and an optimizer."""
    events = []
    for number, at in enumerate(STARTS):
        events += [
            one("user_annotation", f"ProfilerStep#{5 + number}", at, 10_000),
            one("user_annotation", "enumerate(DataLoader)#_Iter.__next__", at, 1_000),
            one("user_annotation", "DistributedDataParallel.forward", at + 1_000, 2_000),
            one("cpu_op", "autograd::engine::evaluate_function: Mul", at + 3_000, 3_000),
            one("cpu_op", "c10d::allreduce_", at + 5_900, 50),
            one("user_annotation", "gloo:all_reduce", at + 6_000, 1_000, 2),
            one("user_annotation", "Optimizer.step#SGD.step", at + 8_000, 1_000),
        ]
    group = {} if rank is None else {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2}}
    return _written(folder / name, group | {"traceEvents": events} | fields)


def _written(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(json.dumps(document))
    return path


def sharded_trace(folder: Path, rank: int = 0) -> Path:
    """Write a trace of three steps of a root and a unit `blocks.0`, sharded over gloo as torch's FSDP2 does."""
    events = []
    for number, at in enumerate(STARTS):
        events += [
            one("user_annotation", f"ProfilerStep#{number}", at, 10_000),
            one("user_annotation", "FSDP::root_pre_forward", at + 1_000, 100),
            *_of_unit("FSDP::all_gather", at + 1_100, "_allgather_base_"),
            *_of_unit("FSDP::all_gather (blocks.0)", at + 2_000, "_allgather_base_"),
            one("cpu_op", "autograd::engine::evaluate_function: Mul", at + 3_000, 2_000),
            *_of_unit("FSDP::all_gather (blocks.0)", at + 3_100, "_allgather_base_"),
            *_of_unit("FSDP::post_backward_reduce (blocks.0)", at + 4_000, "_reduce_scatter_base_"),
            one("user_annotation", "FSDP::root_post_backward_callback", at + 5_000, 900),
            *_of_unit("FSDP::post_backward_reduce", at + 5_100, "_reduce_scatter_base_"),
            one("user_annotation", "Optimizer.step#SGD.step", at + 8_000, 1_000),
        ]
    group = {"backend": "gloo", "rank": rank, "world_size": 2}
    return _written(folder / f"sharded{rank}.json", {"distributedInfo": group, "traceEvents": events})


def _of_unit(name: str, at: int, operator: str) -> list[dict[str, Any]]:
    """A range of 500 us in which the host waits for a collective; gloo's thread notes its end a little later."""
    work = "gloo:all_gather" if "gather" in operator else "gloo:all_reduce"
    return [
        one("user_annotation", name, at, 500),
        one("cpu_op", f"c10d::{operator}", at + 50, 20),
        one("user_annotation", work, at + 60, 450, 2),
        one("user_annotation", name.replace("all_gather", "all_gather_copy_out"), at + 500, 10),
    ]


def nccl_trace(folder: Path, rank: int, group: list[int], world_size: int, backward_us: int = 3_000) -> Path:
    """Write a trace of DDP as torch 2.13 writes it: the kernels have the collective's name, size and process group.

    Each all-reduce ends at the same time on all ranks.
    """
    events = []
    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
    args = {
        "Collective name": "allreduce",
        "In msg nelems": 1_000,
        "Out msg nelems": 1_000,
        "dtype": "Float",
        "Group size": len(group),
        "Process Group Name": "7",
        "Process Group Ranks": f"[{', '.join(map(str, group))}]",
    }
    for number, at in enumerate(STARTS):
        until = at + 3_000 + backward_us
        events += [
            one("user_annotation", f"ProfilerStep#{number}", at, 10_000),
            one("user_annotation", "DistributedDataParallel.forward", at + 1_000, 2_000),
            one("cpu_op", "autograd::engine::evaluate_function: Mul", at + 3_000, backward_us),
            one("kernel", "gemm", at + 3_000, backward_us, 7, correlation=3 * number),
            one("cuda_runtime", "cudaLaunchKernel", at + 3_000, 5, correlation=3 * number),
            one("cuda_runtime", "cudaLaunchKernel", until - 100, 5, correlation=3 * number + 1),
            one("kernel", kernel, until, at + 7_000 - until, 8, correlation=3 * number + 1, **args),
            one("user_annotation", "Optimizer.step#SGD.step", at + 8_500, 1_000),
        ]
    known = {"backend": "nccl", "rank": rank, "world_size": world_size}
    return _written(folder / f"nccl{rank}.json", {"distributedInfo": known, "traceEvents": events})
