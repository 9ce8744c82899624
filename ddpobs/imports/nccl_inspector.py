"""Logs of NCCL Inspector: JSON objects, one of each collective, in a file of each process.

Only verbose logs have times (`NCCL_INSPECTOR_DUMP_VERBOSE=1`):
https://github.com/NVIDIA/nccl/blob/master/plugins/profiler/inspector/README.md. They have no steps: a step is one round
of the shortest sequence of reductions that recurs, and begins after the longest pause in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from ddpobs.errors import TraceFileError
from ddpobs.imports.rank_trace import Collective, RankTrace
from ddpobs.imports.reductions import trace_of

_MARK = b'"inspector_output_format_version"'
_BEGIN_BYTES = 4096
_MAX_LINE = 2**20
_REDUCES = {"AllReduce": "all_reduce", "ReduceScatter": "reduce_scatter"}
_SAME = 0.95
"""Share of the collectives that are the same one round later."""
_MAX_ROUND = 4096
_Microseconds = Annotated[int, msgspec.Meta(ge=0, le=4 * 10**15)]


class _Kernel(msgspec.Struct, frozen=True, gc=False):
    kernel_start_ts: _Microseconds = 0
    kernel_stop_ts: _Microseconds = 0


class _Times(msgspec.Struct, frozen=True):
    coll_start_ts: _Microseconds
    kernel_events: list[_Kernel] = []


class _Performance(msgspec.Struct, frozen=True):
    coll: str
    coll_sn: Annotated[int, msgspec.Meta(ge=0, le=2**48)] = 0
    coll_msg_size_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**48)] = 0
    event_trace_ts: _Times | None = None


class _Header(msgspec.Struct, frozen=True):
    id: str
    rank: Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
    n_ranks: Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class _Line(msgspec.Struct, frozen=True):
    header: _Header
    coll_perf: _Performance | None = None


_Numbered = tuple[int, Collective]
"""A collective with its number in its communicator."""
_DECODER = msgspec.json.Decoder(_Line)


def is_log(path: Path) -> bool:
    """Whether a file looks like a log."""
    with path.open("rb") as file:
        return _MARK in file.read(_BEGIN_BYTES)


def read(files: Sequence[Path], advance: Callable[[int], object] = lambda _: None) -> list[RankTrace]:
    """Read the reductions of all ranks, of the communicator with the most ranks and then the most reductions.

    Raises:
        TraceFileError: A file is no log, has no times, or no sequence of collectives recurs in the first one.
    """
    logs = [_read(file, advance) for file in files]
    header = max(logs[0], key=lambda header: (header.n_ranks, len(logs[0][header])))
    numbered = [_of_communicator(file, log, header.id) for file, log in zip(files, logs, strict=True)]
    round_of = _rounds(files[0], numbered[0][1])
    ranks = [(rank, _by_round(reductions, round_of)) for rank, reductions in numbered]
    common = sorted(set.intersection(*(set(steps) for _, steps in ranks)))
    return [
        trace_of(file.name, rank, header.n_ranks, [steps[number] for number in common], backend="nccl")
        for file, (rank, steps) in zip(files, ranks, strict=True)
    ]


def _read(path: Path, advance: Callable[[int], object]) -> dict[_Header, list[_Numbered]]:
    groups: dict[_Header, list[_Numbered]] = {}
    for line in _lines(path, advance):
        if line.coll_perf is not None and line.coll_perf.coll in _REDUCES:
            numbered = line.coll_perf.coll_sn, _collective(path, line.coll_perf)
            groups.setdefault(line.header, []).append(numbered)
    if not groups:
        raise TraceFileError(path, "a log with reductions of gradients", "none")
    return {header: sorted(group, key=lambda one: one[0]) for header, group in groups.items()}


def _of_communicator(path: Path, log: dict[_Header, list[_Numbered]], name: str) -> tuple[int, list[_Numbered]]:
    for header, group in log.items():
        if header.id == name:
            return header.rank, group
    raise TraceFileError(path, f"reductions of the communicator {name}, as in the first file", "none")


def _rounds(path: Path, reductions: list[_Numbered]) -> Callable[[int], int]:
    """Return what gives the round of a collective by its number in its communicator, which is equal on all ranks."""
    known: dict[tuple[str, int], int] = {}
    kinds = np.array([known.setdefault((one.name, one.size_bytes), len(known)) for _, one in reductions])
    longest = min(len(kinds) // 2, _MAX_ROUND)
    lengths = (length for length in range(1, longest + 1) if (kinds[length:] == kinds[:-length]).mean() >= _SAME)
    if (length := next(lengths, None)) is None:
        raise TraceFileError(path, "a sequence of reductions that recurs: a step", f"{len(kinds)} reductions without")
    numbers = np.array([number for number, _ in reductions])
    pauses_ns = [after.launched_ns - before.done_ns for (_, before), (_, after) in pairwise(reductions)]
    first = (int(np.argmax([sum(pauses_ns[at::length]) for at in range(length)])) + 1) % length
    span = max(1, int(np.median(numbers[length:] - numbers[:-length])))
    return lambda number: (number - int(numbers[first])) // span


def _by_round(reductions: list[_Numbered], round_of: Callable[[int], int]) -> dict[int, list[Collective]]:
    rounds: dict[int, list[Collective]] = {}
    for number, one in reductions:
        rounds.setdefault(round_of(number), []).append(one)
    most = max(map(len, rounds.values()))
    return {number: group for number, group in rounds.items() if len(group) == most and number >= 0}


def _lines(path: Path, advance: Callable[[int], object]) -> Iterator[_Line]:
    try:
        with path.open("rb") as file:
            count = 0
            while text := file.readline(_MAX_LINE):
                count += 1
                advance(len(text))
                if text.strip():
                    yield _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceFileError(path, "a JSON object of NCCL Inspector in each line", f"line {count}: {error}") from None
    except OSError as error:
        raise TraceFileError(path, "a file", error.strerror or str(error)) from None


def _collective(path: Path, one: _Performance) -> Collective:
    times = one.event_trace_ts
    if times is None or not times.kernel_events:
        raise TraceFileError(path, "times, which NCCL_INSPECTOR_DUMP_VERBOSE=1 writes", "none")
    started_us = min(kernel.kernel_start_ts for kernel in times.kernel_events)
    done_us = max(kernel.kernel_stop_ts for kernel in times.kernel_events)
    launched_us = min(times.coll_start_ts, started_us)
    microseconds = launched_us, started_us, max(started_us, done_us)
    launched_ns, started_ns, done_ns = (1000 * at for at in microseconds)
    return Collective(_REDUCES[one.coll], launched_ns, started_ns, done_ns, one.coll_msg_size_bytes)
