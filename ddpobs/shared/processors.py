"""Sets of processors as text: `0-3,8`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANGES = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")
_MAX_PROCESSORS = 8192
"""Linux numbers no more; a text may name any."""


def format_processors(numbers: Iterable[int]) -> str:
    """Write processors as ranges: `0-3,8`."""
    present = set(numbers)
    begins = sorted(number for number in present if number - 1 not in present)
    ends = sorted(number for number in present if number + 1 not in present)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))


def parse_processors(text: object) -> frozenset[int]:
    """Read processors from ranges; none from any other text."""
    if not isinstance(text, str) or not _RANGES.fullmatch(text):
        return frozenset()
    ranges = sorted({(int(part.split("-")[0]), int(part.split("-")[-1])) for part in text.split(",")})
    numbers: set[int] = set()
    reached = 0
    for first, last in ranges:  # Each number once, however often the text has it.
        numbers.update(range(max(first, reached), min(last, _MAX_PROCESSORS - 1) + 1))
        reached = max(reached, last + 1)
    return frozenset(numbers)
