"""Events of Kineto by category, of the ones that are read and of all others."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ddpobs.imports.kineto_json import Decoder, Kernel, Operator


def decoded(*events: dict[str, Any], decoder: Decoder | None = None) -> list[Any]:
    return (decoder or Decoder()).decode(json.dumps(events).encode())


OPERATOR = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2.5, "args": {"Ev Idx": 3}}
FLOW = {"ph": "s", "id": 7, "ts": 1, "cat": "ac2g", "name": "ac2g"}


def test_an_event_has_the_fields_of_its_category() -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "args": {"correlation": 7, "grid": [1, 2, 3]}}
    first, flow, second = decoded(OPERATOR, FLOW, kernel)
    assert first == Operator(name="aten::mm", ts=1, dur=2.5)
    assert (type(second), second.args.correlation) == (Kernel, 7)
    assert msgspec.structs.asdict(flow) == {}


@pytest.mark.parametrize(
    "other",
    [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "cat": "mtia_runtime", "name": "launch", "ts": 1, "dur": 1},
        {**OPERATOR, "ph": "i"},
        {**OPERATOR, "cat": ""},
    ],
    ids=["no category", "an unknown category", "an instant", "an empty category"],
)
def test_an_event_that_is_not_read_takes_no_other_with_it(other: dict[str, Any]) -> None:
    assert decoded(FLOW, other, OPERATOR) == [Operator(name="aten::mm", ts=1, dur=2.5)]


def test_categories_that_are_many_are_read_all_the_same() -> None:
    decoder = Decoder()
    for number in range(200):
        other = {"ph": "X", "cat": f"c{number}"}
        assert [type(one) for one in decoded(OPERATOR, other, decoder=decoder)] == [Operator]


def test_a_value_of_a_wrong_type_is_told() -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `float`, got `str`"):
        decoded({**OPERATOR, "ts": "now"})
