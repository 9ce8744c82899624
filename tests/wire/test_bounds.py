"""Every number and text of the wire has a bound."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from ddpobs import wire
from ddpobs.wire.columns import ranges_of
from ddpobs.wire.facts import FORMS


def unbounded(kind: msgspec.inspect.Type, at: str, seen: frozenset[type] = frozenset()) -> Iterator[str]:
    """Places of integers without a lower and an upper bound."""
    if isinstance(kind, msgspec.inspect.IntType):
        if kind.ge is None or kind.le is None:
            yield at
    elif isinstance(kind, msgspec.inspect.StructType) and kind.cls not in seen:
        for field in kind.fields:
            yield from unbounded(field.type, f"{at}.{field.name}", seen | {kind.cls})
    elif isinstance(kind, msgspec.inspect.UnionType):
        for part in kind.types:
            yield from unbounded(part, at, seen)
    elif isinstance(kind, msgspec.inspect.ListType):
        yield from unbounded(kind.item_type, f"{at}[]", seen)
    elif isinstance(kind, msgspec.inspect.DictType):
        yield from unbounded(kind.value_type, f"{at}[]", seen)


def test_every_integer_of_a_batch_and_of_the_facts_has_bounds() -> None:
    free = set(unbounded(msgspec.inspect.type_info(wire.Batch), "batch"))
    # Nothing computes with facts but by the forms below, and with the version but in a comparison.
    assert free == {"batch.version", "batch.hello.settings[]", "batch.events[].detail[]"}
    for kind, form in FORMS.items():
        assert list(unbounded(msgspec.inspect.type_info(form), kind)) == []


@pytest.mark.parametrize("record", [wire.Steps, wire.Spans, wire.Comms, wire.Peers])
def test_every_column_has_a_range(record: type) -> None:
    assert ranges_of(record)
    assert all(bounds.least < bounds.most for bounds in ranges_of(record).values())
