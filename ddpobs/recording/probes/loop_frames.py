"""Instructions of Python frames: whether a frame waits for an iterator's next value, and the function that it calls.

A frame in a call stands at the instruction of that call. So a frame at a `for` statement's `FOR_ITER`, or at a call of
`next`, waits for an iterator, whether the iterator is a generator, a class or written in C. `enumerate` and `tqdm`
change nothing, because they run inside of the `for` statement too. Reading a frame changes nothing in the program.

CPython's `dis` documents the instructions. They are tested with CPython 3.11; 3.12 and 3.13 stand at the same ones.
"""

from __future__ import annotations

import dis
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

_NEXT = frozenset({"next", "__next__"})
"""Functions that ask an iterator for its next value."""
_CALLS = ("CALL", "PRECALL", "INSTRUMENTED_CALL")
_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_FAST", "LOAD_DEREF")
_PASSED_ON = ("PUSH_NULL", "CACHE", "NOP")
_MAX_FRAMES = 64
_MAX_CODES = 256


class _Loop(NamedTuple):
    """Offsets of a `for` statement: its `FOR_ITER`, and the first instruction after the loop."""

    begin: int
    end: int


class _Call(NamedTuple):
    """Offset of a call, and the name of the function."""

    offset: int
    name: str


class _Map(NamedTuple):
    """The loops and calls of a code object, and the offsets of all of its instructions."""

    loops: tuple[_Loop, ...]
    calls: tuple[_Call, ...]
    offsets: tuple[int, ...]

    def instruction_at(self, offset: int) -> int:
        """Offset of the instruction: a frame may stand at one of the caches behind it."""
        return self.offsets[max(0, bisect_right(self.offsets, offset) - 1)]


Places = dict[CodeType, int]
"""Offset of the latest instruction of each code object on a stack."""


def places_on_stack(frame: FrameType | None) -> Places:
    """Return the code objects on a stack from this frame outwards, each with its instruction's offset."""
    locations: Places = {}
    while frame is not None and len(locations) < _MAX_FRAMES:
        locations.setdefault(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return locations


def asks_iterator(frames: Iterable[FrameType], forward: Places) -> bool:
    """Whether a frame waits for a value of an iterator that a training loop runs over.

    Args:
        frames: Frames of the training thread.
        forward: Code objects on its stack in a training forward. A `for` statement counts if it contained the forward,
            a call of `next` if it stands in one of them.
    """
    return any(
        frame.f_code in forward and _asks(frame.f_code, frame.f_lasti, forward[frame.f_code]) for frame in frames
    )


def called_name(frame: FrameType) -> str:
    """Return the name of the function that a frame calls, for example of one written in C; empty if it calls none."""
    code = _map(frame.f_code)
    offset = code.instruction_at(frame.f_lasti)
    return next((call.name for call in code.calls if call.offset == offset), "")


def _asks(code: CodeType, offset: int, forward_offset: int) -> bool:
    instructions = _map(code)
    offset = instructions.instruction_at(offset)
    in_loop = any(loop.begin == offset and loop.begin < forward_offset < loop.end for loop in instructions.loops)
    return in_loop or any(call.offset == offset and call.name in _NEXT for call in instructions.calls)


@lru_cache(_MAX_CODES)
def _map(code: CodeType) -> _Map:
    instructions = [instruction for instruction in dis.get_instructions(code) if instruction.opname != "CACHE"]
    loops = [_Loop(i.offset, int(i.argval)) for i in instructions if i.opname == "FOR_ITER"]
    return _Map(tuple(loops), tuple(_calls(instructions)), tuple(i.offset for i in instructions))


def _calls(instructions: list[dis.Instruction]) -> Iterator[_Call]:
    """Calls with the names of their functions.

    A call's expression begins where the function's does, so the function is the longest name that begins there and ends
    before the call.
    """
    names: dict[tuple[int | None, int | None], str] = {}
    for instruction in instructions:
        where = instruction.positions
        if where is None or where.lineno is None:
            continue
        begin = where.lineno, where.col_offset
        if instruction.opname in _NAMES:
            names[begin] = str(instruction.argval)
        elif instruction.opname.startswith(_CALLS):
            yield _Call(instruction.offset, names.get(begin, ""))
