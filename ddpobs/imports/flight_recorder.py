"""Dumps of torch's Flight Recorder, one of each rank.

A dump is a pickle, or JSON (`torch._C._distributed_c10d._dump_fr_trace`, `_dump_fr_trace_json`; NCCL's watchdog writes
one at a timeout). Its entries are the latest collectives, each with a number within its process group. A pickle may
hold code; here it may hold plain values only.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ddpobs.errors import TraceFileError

_MAX_BYTES = 256 * 2**20
_MAX_DIGITS = 6
_PICKLE = b"\x80"
_JSON = re.compile(rb'\s*\{\s*"(comm_lib_version|entries|pg_config|version)"')
_FOREIGN = ("site-packages", "dist-packages", "/torch/", "<frozen", "/lib/python")
_PLACES = 2


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
    time_created_ns: int = 0
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
    def stack(self) -> list[str]:
        """Python frames, outermost first, such as `train.py:57 step`."""
        return [f"{Path(frame.filename).name}:{frame.line} {frame.name}" for frame in self.frames[::-1]]

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
    if not numbers or len(numbers[-1]) > _MAX_DIGITS:
        raise TraceFileError(path, "a name that ends in the rank, such as nccl_trace_rank_3", "another one")
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
