"""Every finding is registered, declares its codes, and is documented."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
from ddpobs_server.analysis.findings.registry import FINDINGS, MODULES

DIAGNOSTICS = Path(__file__).resolve().parents[3] / "docs" / "diagnostics.md"


def codes_in_source(module: ModuleType) -> set[str]:
    """Return the codes of all `Finding(code=...)` in a module."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    keywords = [keyword for call in calls for keyword in call.keywords if keyword.arg == "code"]
    return {ast.literal_eval(keyword.value) for keyword in keywords}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_file_declares_the_codes_that_it_returns(module: ModuleType) -> None:
    assert codes_in_source(module) == set(module.CODES)


def test_each_code_has_one_function() -> None:
    assert len(FINDINGS) == len(set(FINDINGS)) == sum(len(module.CODES) for module in MODULES)


@pytest.mark.parametrize("code", [code for module in MODULES for code in module.CODES])
def test_every_code_has_a_heading_in_the_documentation(code: str) -> None:
    assert re.search(rf"^## {re.escape(code)}$", DIAGNOSTICS.read_text(), re.MULTILINE)


def test_no_two_files_share_a_code() -> None:
    codes = [code for module in MODULES for code in module.CODES]
    assert len(codes) == len(set(codes))
