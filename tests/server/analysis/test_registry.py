"""Every finding is registered, declares its codes, and is documented."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
from ddpobs_server.analysis.finding import Facts
from ddpobs_server.analysis.findings.registry import FINDINGS, MODULES

DOCS = Path(__file__).resolve().parents[3] / "docs"
CODES = [code for module in MODULES for code in module.CODES]
PARTS = ["What to do", "How it is computed", "When it errs"]


def codes_in_source(module: ModuleType) -> set[str]:
    """Return the codes of all `Finding(code=...)` in a module, and in those whose functions it uses."""
    used = {inspect.getmodule(value) for value in vars(module).values() if inspect.isfunction(value)}
    own = [part for part in used if part is not None and part not in MODULES and "analysis" in part.__name__]
    trees = [ast.parse(inspect.getsource(part)) for part in (module, *own)]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    keywords = [keyword for call in calls for keyword in call.keywords if keyword.arg == "code"]
    return {ast.literal_eval(keyword.value) for keyword in keywords}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_file_declares_the_codes_that_it_returns(module: ModuleType) -> None:
    assert codes_in_source(module) == set(module.CODES)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_file_declares_the_classes_of_its_evidence(module: ModuleType) -> None:
    assert module.FACTS
    assert all(issubclass(facts, Facts) and facts is not Facts for facts in module.FACTS)


def test_each_code_has_one_function() -> None:
    assert len(FINDINGS) == len(set(FINDINGS)) == sum(len(module.CODES) for module in MODULES)


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_page_with_the_same_parts_and_an_entry_in_the_list(code: str) -> None:
    page = (DOCS / "findings" / f"{code}.md").read_text()
    assert page.startswith("# ")
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert [heading for heading in headings if heading in PARTS] == PARTS
    assert re.search(r"^> ", page, re.MULTILINE), "an example of the finding's title"
    assert f"| [{code}](findings/{code}.md) |" in (DOCS / "diagnostics.md").read_text()


def test_every_page_is_about_a_code() -> None:
    assert {page.stem for page in DOCS.glob("findings/*.md")} == set(CODES)


def test_no_two_files_share_a_code() -> None:
    assert len(CODES) == len(set(CODES))
