"""Parquet of `ddpobs export`: steps, and if there are, bucket spans, of one attempt of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from ddpobs import wire
from ddpobs.errors import TraceFileError
from ddpobs.imports import envelope, parquet
from ddpobs.imports.rank_trace import RankTrace
from ddpobs.imports.replay import Replayed
from ddpobs.steps.summary import Summary
from ddpobs.wire.columns import Columns
from ddpobs.wire.facts import PipelineFacts

METADATA = b"ddpobs"
"""Key of a file's metadata with `ExportedFacts` as JSON."""
_C = TypeVar("_C", bound=Columns)
_KEYS = ["run", "attempt", "rank"]


class ExportedRank(msgspec.Struct, frozen=True):
    """A rank of an exported run; `group_ranks` and `group_first` as in `ddpobs.wire.facts.SettingFacts`."""

    rank: int
    host: str | None = None
    device: str | None = None
    backend: str | None = None
    group_ranks: int | None = None
    group_first: int | None = None


class ExportedStage(msgspec.Struct, frozen=True):
    """Ranks that hold the same stages of a pipeline."""

    stages: list[int]
    ranks: list[int]


class ExportedPipeline(msgspec.Struct, frozen=True):
    """The schedule of an exported run."""

    schedule: str
    stages: int
    micro_batches: int
    by_rank: list[ExportedStage]


class ExportedFacts(msgspec.Struct, frozen=True):
    """What the columns of an exported run do not have.

    Attributes:
        world_size: Number of ranks.
        began_ns: Unix time of its begin.
        ranks: Its ranks.
        layouts: Layouts of its buckets.
        pipeline: Its pipeline; None without one.
        not_compared: Why its ranks are not compared; empty if they are.
    """

    world_size: int = 0
    began_ns: int = 0
    ranks: list[ExportedRank] = []
    layouts: list[wire.Layout] = []
    pipeline: ExportedPipeline | None = None
    not_compared: str = ""


def is_export(path: Path) -> bool:
    """Whether a file is Parquet with the columns of an export."""
    return parquet.is_parquet(path) and {*_KEYS, "step"} <= set(parquet.column_names(path))


def read(files: Sequence[Path]) -> tuple[list[RankTrace], list[Replayed]]:
    """Read the ranks of an export, and their steps.

    Raises:
        TraceFileError: A file is no whole export or of another attempt, or none has steps.
    """
    steps, spans = None, None
    for file in files:
        names = set(parquet.column_names(file))
        if set(wire.Steps.required()) <= names and steps is None:
            steps = parquet.read(file, [*_KEYS, *wire.Steps.names])
        elif set(wire.Spans.required()) <= names and spans is None:
            spans = parquet.read(file, [*_KEYS, *wire.Spans.names])
        else:
            raise TraceFileError(file, "one file of steps, and at most one of spans", f"columns {sorted(names)[:5]}")
    if steps is None or not len(steps.columns["rank"]):
        raise TraceFileError(files[0], "a file of `ddpobs export` with steps", "none")
    for table in filter(None, (steps, spans)):
        if any(column.dtype.kind not in "iu" for name, column in table.columns.items() if name not in _KEYS[:2]):
            raise TraceFileError(table.path, "columns of whole numbers, as `ddpobs export` writes them", "others")
        if len({*steps.columns["attempt"].tolist(), *table.columns["attempt"].tolist()}) > 1:
            raise TraceFileError(table.path, "one attempt of one run", "several")
    facts = _facts(steps)
    ranks = np.unique(steps.columns["rank"]).tolist()
    layouts = facts.layouts if spans is not None else []
    return (
        [_trace(rank, facts, steps) for rank in ranks],
        [Replayed(_summary(rank, steps, spans), layouts, _group(rank, facts)) for rank in ranks],
    )


def _facts(table: parquet.Table) -> ExportedFacts:
    try:
        return msgspec.json.decode(table.metadata.get(METADATA, b"{}"), type=ExportedFacts)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceFileError(table.path, "metadata as `ddpobs export` writes them", error) from None


def _rank(rank: int, facts: ExportedFacts) -> ExportedRank:
    return next((one for one in facts.ranks if one.rank == rank), ExportedRank(rank))


def _group(rank: int, facts: ExportedFacts) -> tuple[int, ...] | None:
    """The ranks that reduce gradients together; none if they are all ranks, and None if they are not known."""
    known = _rank(rank, facts)
    if not facts.not_compared and (known.group_ranks or facts.world_size) >= facts.world_size:
        return ()
    if facts.not_compared or known.group_first is None:
        return None
    return tuple(sorted(one.rank for one in facts.ranks if one.group_first == known.group_first))


def _trace(rank: int, facts: ExportedFacts, steps: parquet.Table) -> RankTrace:
    known = _rank(rank, facts)
    first_ns = int(steps.columns["start_ns"][steps.columns["rank"] == rank].min())
    return RankTrace(
        source=steps.path.name,
        rank=rank,
        world_size=facts.world_size,
        host=known.host or "",
        backend=known.backend or "",
        device=known.device or "",
        wall_ns=max(0, facts.began_ns - first_ns),
        events=_stages(rank, facts.pipeline),
    )


def _stages(rank: int, pipeline: ExportedPipeline | None) -> list[wire.Event]:
    """What the rank reported of its pipeline."""
    if pipeline is None:
        return []
    return [
        envelope.pipeline(
            PipelineFacts(
                schedule=pipeline.schedule,
                stages=pipeline.stages,
                held=",".join(map(str, stage.stages)),
                micro_batches=pipeline.micro_batches,
            )
        )
        for stage in pipeline.by_rank
        if rank in stage.ranks
    ]


def _summary(rank: int, steps: parquet.Table, spans: parquet.Table | None) -> Summary:
    of_rank = _of_rank(wire.Steps, steps, rank)
    spans_of_rank = _of_rank(wire.Spans, spans, rank) if spans else wire.Spans.from_table(_empty(wire.Spans))
    comms, compiled_ns = wire.Comms.from_table(_empty(wire.Comms)), np.zeros(len(wire.PHASES), np.int64)
    return Summary(of_rank, spans_of_rank, comms, [], {}, compiled_ns)


def _empty(kind: type[Columns]) -> wire.Ints:
    return np.zeros((len(kind.names), 0), np.int64)


def _of_rank(kind: type[_C], table: parquet.Table, rank: int) -> _C:
    try:
        columns = {name: column.astype(np.int64) for name, column in table.columns.items() if name in kind.names}
        record = kind.of_older(columns).select(table.columns["rank"] == rank)
    except (TypeError, ValueError) as error:
        raise TraceFileError(table.path, "columns of whole numbers, as `ddpobs export` writes them", error) from None
    return record.select(np.argsort(record.table[0], kind="stable"))
