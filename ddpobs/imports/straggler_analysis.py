"""Parquet of StragglerAnalysis (https://github.com/ByteDance-Seed/StragglerAnalysis): operations of Megatron's ranks.

Each row is an operation of a worker: its step, type, start and duration in seconds. Steps are samples of a long job,
and begin near zero: here they follow each other, and count from 0. A rank's gradients are ready when its last backward
ends; from then on, and where it sends and receives, it waits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs.errors import TraceFileError
from ddpobs.imports import envelope, parquet
from ddpobs.imports.rank_trace import Call, CallKind, Collective, RankTrace, union
from ddpobs.wire.facts import PipelineFacts

_COLUMNS = ["rank", "dp_rank", "stage", "step", "optype", "start_ts", "duration", "mb_id"]
_CALLS: dict[str, CallKind] = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "optimizer": "optimizer",
}
_REDUCES = "grads-reduce-scatter"
_WAITS = ("-send", "-recv", "all-reduce", "all-gather", "clip-main-grad")
_TIMES = ("start_ts", "duration")
_MAX_S, _MAX_NUMBER = 1e6, 2**31
_GAP_NS = 10**6
"""Time between two steps."""


def is_trace(path: Path) -> bool:
    """Whether a file is Parquet with these columns."""
    return parquet.is_parquet(path) and set(_COLUMNS[:-1]) <= set(parquet.column_names(path))


def read(path: Path) -> list[RankTrace]:
    """Read the traces of all ranks.

    Raises:
        TraceFileError: The file is not whole, or its times are none.
    """
    columns = parquet.read(path, _COLUMNS).columns
    if not all(_are_numbers(columns[name], name in _TIMES) for name in columns if name != "optype"):
        raise TraceFileError(path, "numbers in all columns but optype", "texts, or numbers of 2**31 and more")
    seconds = np.stack([columns["start_ts"], columns["start_ts"] + columns["duration"]]).astype(np.float64)
    if not len(columns["rank"]) or not (np.isfinite(seconds).all() and (np.abs(seconds) < _MAX_S).all()):
        raise TraceFileError(path, f"operations with times below {_MAX_S:,.0f} s", "none, or others")
    times_ns = np.rint(seconds * 1e9).astype(np.int64)
    steps, step = np.unique(columns["step"], return_inverse=True)
    begins_ns, ends_ns = np.full(len(steps), 2**62), np.zeros(len(steps), np.int64)
    np.minimum.at(begins_ns, step, times_ns[0])
    np.maximum.at(ends_ns, step, times_ns[1])
    lasts_ns = ends_ns - begins_ns + _GAP_NS
    times_ns += (np.cumsum(lasts_ns) - lasts_ns - begins_ns)[step]
    ranks = np.unique(columns["rank"]).tolist()
    names = {rank: index for index, rank in enumerate(ranks)}
    return [_trace(path, names, rank, columns, times_ns) for rank in ranks]


def _are_numbers(column: Any, are_times: bool) -> bool:
    """Whether a column has numbers, and unless they are times small ones."""
    return column.dtype.kind in "iuf" and bool(are_times or (np.abs(column) < _MAX_NUMBER).all())


def _trace(path: Path, names: dict[int, int], rank: int, columns: dict[str, Any], times_ns: wire.Ints) -> RankTrace:
    """A rank's trace. The files have one rank of each tensor-parallel group, so ranks are numbered anew."""
    rows = np.flatnonzero(columns["rank"] == rank)
    rows = rows[np.argsort(times_ns[0, rows], kind="stable")]
    kinds, (began, ended) = columns["optype"][rows].tolist(), times_ns[:, rows].tolist()
    calls, collectives = [], []
    for kind, began_ns, ended_ns in zip(kinds, began, ended, strict=True):
        if kind in _CALLS:
            calls.append(Call(_CALLS[kind], began_ns, ended_ns))
        elif kind == _REDUCES and (last := _last_backward(calls)) is not None:
            collectives.append(Collective("reduce_scatter", calls[last].ended_ns, 0, ended_ns))
            calls[last] = calls[last]._replace(ended_ns=ended_ns)
        elif any(part in kind for part in _WAITS):
            collectives.append(Collective(kind, began_ns, 0, ended_ns))
    computing = [(begin, end) for kind, begin, end in zip(kinds, began, ended, strict=True) if kind in _CALLS]
    dp_rank, stage = columns["dp_rank"][rows[0]], columns["stage"][rows[0]]
    first = names[int(columns["rank"][columns["dp_rank"] == dp_rank].min())]
    return RankTrace(
        source=path.name,
        rank=names[rank],
        world_size=len(names),
        host="",
        backend="",
        device="",
        wall_ns=0,
        calls=calls,
        collectives=sorted(collectives, key=lambda one: one.launched_ns),
        computing_ns=union(np.array(computing, np.int64).reshape(-1, 2)),
        events=[_pipeline(columns, rows, int(stage), first)],
    )


def _last_backward(calls: list[Call]) -> int | None:
    return next((index for index in range(len(calls) - 1, -1, -1) if calls[index].kind == "backward"), None)


def _pipeline(columns: dict[str, Any], rows: wire.Ints, stage: int, first: int) -> wire.Event:
    return envelope.pipeline(
        PipelineFacts(
            schedule="Megatron",
            stages=int(columns["stage"].max()) + 1,
            held=str(stage),
            micro_batches=max(0, int(columns["mb_id"][rows].max()) + 1) if "mb_id" in columns else 0,
            first_rank=first,
        )
    )
