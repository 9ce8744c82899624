"""The table of strategies: its names, its arguments and its documentation."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ddpobs import comm
from ddpobs.comm.registry import STRATEGIES, Strategy, choose
from ddpobs.errors import ConfigError

DOCUMENT = Path(__file__).parents[2] / "docs" / "communication.md"


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_every_strategy_has_a_row_in_the_documentation(strategy: Strategy) -> None:
    name = f'`"{strategy.name}{":" if strategy.argument is not None else chr(34)}'
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    assert any(name in row.split("|")[1] for row in rows)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_every_strategy_is_chosen_by_its_name_exported_and_pickled(strategy: Strategy) -> None:
    assert choose(strategy.name, 1) is strategy.factory
    assert strategy.factory.__name__ in comm.__all__
    assert getattr(comm, strategy.factory.__name__) is strategy.factory
    assert pickle.loads(pickle.dumps(strategy.factory)) is strategy.factory


def test_an_error_lists_every_name_and_the_limits_of_arguments() -> None:
    with pytest.raises(ConfigError) as caught:
        choose("fp15", 1)
    assert all(strategy.name in str(caught.value) for strategy in STRATEGIES)
    assert "topk:DENSITY (above 0, at most 1)" in str(caught.value)
