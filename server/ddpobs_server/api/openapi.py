"""Descriptions in the OpenAPI document that docstrings already have: those of classes with a section `Attributes:`.

The schemas of the API describe their fields themselves. Batches, and rows that a route returns as they are stored, keep
their descriptions in their docstrings.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

_UNITS = {"ns": "nanoseconds", "bytes": "bytes", "permille": "parts of a thousand", "mhz": "MHz"}


def describe(document: dict[str, Any]) -> None:
    """Move the section `Attributes:` of each schema's description into the descriptions of its fields."""
    for definition in document["components"]["schemas"].values():
        summary, attributes = _split(definition.get("description", ""), unknown="-1")
        if summary:
            definition["description"] = summary
        for name, field in definition.get("properties", {}).items():
            if name in attributes:
                field.setdefault("description", attributes[name])


def attributes_of(record: type, unknown: str) -> dict[str, str]:
    """Descriptions of a class's attributes; `unknown` is the word for the wire's `UNKNOWN`."""
    return _split(record.__doc__ or "", unknown)[1]


def _split(docstring: str, unknown: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text, and the descriptions of its attributes."""
    text, _, section = inspect.cleandoc(docstring).partition("\n\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    texts = {name: " ".join(entry.split()).replace("None", "null") for name, entry in entries}
    return text, {name: _with_unit(name, entry.replace("`UNKNOWN`", unknown)) for name, entry in texts.items()}


def _with_unit(name: str, text: str) -> str:
    """Add the unit that the field's name ends with, before a remark on null."""
    unit = _UNITS.get(name.rpartition("_")[2])
    fact, semicolon, remark = text.rstrip(".").partition(";")
    if unit is not None and unit not in text:
        fact = f"{fact}, in {unit}"
    return f"{fact}{semicolon}{remark}."
