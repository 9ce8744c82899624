"""The table of strategies: its names, its arguments and its documentation."""

from __future__ import annotations

import pickle
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpobs import comm
from ddpobs.comm import strategies
from ddpobs.comm.registry import STRATEGIES, choose
from ddpobs.comm.strategy import Strategy
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


@pytest.mark.parametrize("name", [module.name for module in iter_modules(strategies.__path__)])
def test_a_file_registers_each_of_its_classes_that_exchange_buckets(name: str) -> None:
    module = import_module(f"{strategies.__name__}.{name}")
    classes = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    exchanging = {value for value in classes if hasattr(value, "launch") and not value.__name__.startswith("_")}
    assert exchanging == {strategy.factory for strategy in module.STRATEGIES}
    assert set(module.STRATEGIES) <= set(STRATEGIES)


def test_an_error_lists_every_name_and_the_limits_of_arguments() -> None:
    with pytest.raises(ConfigError) as caught:
        choose("fp15", 1)
    assert all(strategy.name in str(caught.value) for strategy in STRATEGIES)
    assert "topk:DENSITY (above 0, at most 1)" in str(caught.value)


def test_the_python_of_the_documentation_trains(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) == 2
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for block in blocks:
            known: dict[str, Any] = {"model": torch.nn.Linear(4, 2)}
            exec(block, known)
            known["model"](torch.ones(3, 4)).sum().backward()
            assert known["model"].module.weight.grad.tolist() == [[3.0] * 4] * 2
    finally:
        dist.destroy_process_group()
