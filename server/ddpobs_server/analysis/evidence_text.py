"""The evidence of a finding in sentences: what each figure means, and its value with its unit.

The meanings are those of the docstrings of the facts. Zeros and unknown values are left out, and so are an excess below
zero and texts that the finding's parts have already.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from ddpobs.shared.quantities import duration, size_text, three_digits
from ddpobs.shared.words import percent

if TYPE_CHECKING:
    from ddpobs_server.analysis.finding import Facts

_MAX_VALUES = 8
_STATED = (
    *("kind", "host", "module", "cause", "reason", "cause_unknown", "not_known_because"),
    *("device", "thread", "titles"),
)
_TEXTS = ("stacks", "threads", "traceback", "output", "places", "message")
_SHARES = ("_share", "_ratio", "efficiency", "goodput", "chance")


def evidence_sentences(facts: Facts) -> list[str]:
    """Return a sentence for each figure."""
    meanings, sentences = _meanings(type(facts).__doc__ or ""), []
    for field in fields(facts):
        value = _text(field.name, getattr(facts, field.name))
        if value and field.name in meanings and field.name not in (*_STATED, *_TEXTS):
            sentences.append(f"{meanings[field.name]}: {value}.")
    return sentences


@cache
def _meanings(docstring: str) -> dict[str, str]:
    """The first part of each attribute's description in a docstring, by name."""
    attributes = inspect.cleandoc(docstring).partition("\nAttributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE)
    return {name: re.split(r"[;:]|\.(?: |$)", " ".join(text.split()))[0] for name, text in entries}


def _text(name: str, value: Any) -> str:
    """A value with its unit; empty if it is zero, empty or not known."""
    if value is None or value is False or value in (0, "", [], {}):
        return ""
    if value is True:
        return "yes"
    if isinstance(value, Mapping):
        return _listed([_entry(name, str(key), inner) for key, inner in value.items()])
    if isinstance(value, list | tuple):
        return _listed([_text(name, inner) or "0" for inner in value if not hasattr(inner, "__dataclass_fields__")])
    if isinstance(value, int | float):
        return "" if value < 0 and "excess" in name else _number(name, value)
    return str(value)


def _entry(name: str, key: str, value: Any) -> str:
    """A value of a mapping with its key; a number is a rank. Empty without a value."""
    text = _text(f"{name}_{key}" if key.endswith("_ns") else name, value)
    label = f"rank {key}" if key.isdigit() else re.sub(r"_ns$", "", key).replace("_", " ")
    return f"{label} {text}" if text else ""


def _listed(texts: list[str]) -> str:
    known = [text for text in texts if text]
    more = f" and {len(known) - _MAX_VALUES} more" if len(known) > _MAX_VALUES else ""
    return ", ".join(known[:_MAX_VALUES]) + more


def _number(name: str, value: float) -> str:
    if name.endswith("_ns"):
        return duration(value)
    if name.endswith("bytes_per_s"):
        return f"{size_text(value)}/s"
    if name.endswith("_bytes") or name.startswith(("bytes_", "message_bytes")):
        return size_text(value)
    if name.endswith(_SHARES) or name.startswith(("share", "shares")):
        return percent(value, 0 if value >= 0.1 else 1)
    return f"{value:,}" if isinstance(value, int) else three_digits(value)
