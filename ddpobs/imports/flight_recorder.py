"""Dumps of torch's Flight Recorder, one of each rank: who did not come to the collective that the others wait in.

A dump is a pickle, or JSON (`torch._C._distributed_c10d._dump_fr_trace`, `_dump_fr_trace_json`; NCCL's watchdog writes
one at a timeout). Its entries are the latest collectives, each with a number within its process group. A pickle may
hold code; here it may hold plain values only.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ddpobs.errors import TraceFileError
from ddpobs.shared.words import format_ranks

_MAX_BYTES = 256 * 2**20
_PICKLE = b"\x80"
_JSON = re.compile(rb'\s*\{\s*"(comm_lib_version|entries|pg_config|version)"')
_FOREIGN = ("site-packages", "dist-packages", "/torch/", "<frozen", "/lib/python")
_PLACES = 2
_GROUPS = 4
"""Maximum number of process groups that are told."""


class _Frame(msgspec.Struct, frozen=True):
    name: str = ""
    filename: str = ""
    line: int = 0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One collective; `retired` tells that it is over."""

    process_group: tuple[str, str] = ("", "")
    collective_seq_id: int = 0
    is_p2p: bool = False
    profiling_name: str = ""
    input_sizes: list[list[int]] = []
    state: str = ""
    retired: bool = False
    frames: list[_Frame] = []

    @property
    def is_open(self) -> bool:
        """Whether the rank has not left it."""
        return not self.retired and self.state != "completed"

    @property
    def operation(self) -> str:
        """What it does: `all_reduce`."""
        return self.profiling_name.rpartition(":")[2]

    @property
    def place(self) -> str:
        """Innermost lines of the user's code, such as `train.py:57 → loss.py:3 mean`; empty if they are not known."""
        own = [frame for frame in self.frames if not any(part in frame.filename for part in _FOREIGN)]
        shown = [f"{Path(frame.filename).name}:{frame.line}" for frame in own[:_PLACES][::-1]]
        return " → ".join(shown) + (f" {own[0].name}" if own else "")


class _Group(msgspec.Struct):
    ranks: str | list[int] = ""


class _Dump(msgspec.Struct):
    entries: list[Entry]
    pg_config: dict[str, _Group] = {}


class RankDump(NamedTuple):
    """The dump of one rank; `members` has the ranks of each process group by its name, as far as the dump tells."""

    source: str
    rank: int
    entries: list[Entry]
    members: dict[str, list[int]]


class Verdict(NamedTuple):
    """What the dumps of a process group show.

    Attributes:
        verdict: In which collective the ranks wait, and for whom.
        cause: What each rank did last.
        ranks: The ranks that the others wait for; empty if each of them is in the same collective.
    """

    verdict: str
    cause: str
    ranks: list[int]


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def is_dump(path: Path) -> bool:
    """Whether a file looks like a dump: a pickle, or JSON that begins with a dump's field."""
    with path.open("rb") as file:
        begin = file.read(4096)
    return begin.startswith(_PICKLE) or _JSON.match(begin) is not None


def read(path: Path) -> RankDump:
    """Read the dump of one rank, whose number is the last one in the file's name.

    Raises:
        TraceFileError: The file is no dump, or its name has no number.
    """
    numbers = re.findall(r"\d+", path.name)
    if not numbers:
        raise TraceFileError(path, "a name that ends in the rank, such as nccl_trace_rank_3", "none")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise TraceFileError(path, "a dump of at most 256 MiB", f"{path.stat().st_size:,} bytes")
        content = path.read_bytes()
        with path.open("rb") as file:
            plain = _PlainUnpickler(file).load() if content.startswith(_PICKLE) else msgspec.json.decode(content)
        dump = msgspec.convert(plain, _Dump)
        members = {name: [int(rank) for rank in re.findall(r"\d+", str(g.ranks))] for name, g in dump.pg_config.items()}
        return RankDump(path.name, int(numbers[-1]), dump.entries, members)
    except OSError as error:
        raise TraceFileError(path, "a file", error.strerror or str(error)) from None
    except TraceFileError:
        raise
    except Exception as error:  # A broken pickle raises errors of any kind.
        raise TraceFileError(path, "a dump of torch's Flight Recorder", error) from None


def verdicts(dumps: Sequence[RankDump]) -> list[Verdict]:
    """Return a verdict for each process group in which a rank waits; at most four.

    Raises:
        TraceFileError: Two dumps are of the same rank.
    """
    by_rank: dict[int, RankDump] = {}
    for dump in dumps:
        if dump.rank in by_rank:
            other = by_rank[dump.rank].source
            raise TraceFileError(dump.source, "one dump of each rank", f"rank {dump.rank}, as in {other}")
        by_rank[dump.rank] = dump
    groups = dict.fromkeys(entry.process_group for dump in dumps for entry in dump.entries if not entry.is_p2p)
    judged = [_judge(group, by_rank) for group in groups]
    return [verdict for verdict in judged if verdict is not None][:_GROUPS]


def _judge(group: tuple[str, str], by_rank: dict[int, RankDump]) -> Verdict | None:
    last: dict[int, Entry] = {}
    waits: dict[int, Entry] = {}
    for rank, dump in sorted(by_rank.items()):
        entries = [entry for entry in dump.entries if entry.process_group == group and not entry.is_p2p]
        if not entries:
            continue
        last[rank] = max(entries, key=lambda entry: entry.collective_seq_id)
        if open_entries := [entry for entry in entries if entry.is_open]:
            waits[rank] = min(open_entries, key=lambda entry: entry.collective_seq_id)
    if not waits:
        return None
    members = {rank for dump in by_rank.values() for rank in dump.members.get(group[0], dump.members.get("", []))}
    unknown = sorted(members - set(last))
    number = min(entry.collective_seq_id for entry in waits.values())
    here = [entry for entry in waits.values() if entry.collective_seq_id == number]
    behind = [rank for rank, entry in last.items() if entry.collective_seq_id < number]
    name = group[1] or group[0]
    told = [f"{format_ranks([rank])} last called {_called(last[rank])}" for rank in behind[:_GROUPS]]
    told += [f"{format_ranks(ranks)} {_does(len(ranks), entry, number)}" for entry, ranks in _alike(waits)]
    told += [f"no dump has a call of {format_ranks(unknown)}"] if unknown else []
    hang = f"The ranks hang in {here[0].operation} {number} of group {name}"
    if behind:
        return Verdict(f"{hang}, waiting for {format_ranks(behind)}", "; ".join(told), behind)
    if len({(entry.operation, str(entry.input_sizes)) for entry in here}) > 1:
        different = f"The ranks called different collectives as number {number} of group {name}"
        return Verdict(different, "; ".join(told), [])
    if not unknown:
        told.insert(0, "every rank has entered it")
    return Verdict(hang, "; ".join(told), [])


def _alike(waits: dict[int, Entry]) -> list[tuple[Entry, list[int]]]:
    """The ranks that wait at the same place in the same collective."""
    groups: dict[tuple[object, ...], tuple[Entry, list[int]]] = {}
    for rank, entry in waits.items():
        key = (entry.operation, entry.collective_seq_id, str(entry.input_sizes), entry.place)
        groups.setdefault(key, (entry, []))[1].append(rank)
    return list(groups.values())


def _does(ranks: int, entry: Entry, number: int) -> str:
    if entry.collective_seq_id > number:
        return f"{'are' if ranks > 1 else 'is'} in a later one, {_called(entry)}"
    return f"{'wait' if ranks > 1 else 'waits'} in {_called(entry)}"


def _called(entry: Entry) -> str:
    place = f" ({entry.place})" if entry.place else ""
    sizes = f" of {entry.input_sizes}" if entry.input_sizes else ""
    return f"{entry.operation} {entry.collective_seq_id}{sizes}{place}"
