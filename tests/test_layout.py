"""The folders of the tests: what modules share is in `tests/support`, and benchmarks import no test."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_no_module_imports_a_test_module_or_a_conftest() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    wrong = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in _imported(file)
        if name.startswith("tests.") and name.rsplit(".", 1)[-1].startswith(("test_", "conftest"))
    }
    assert wrong == set()


def test_benchmarks_import_nothing_of_the_tests() -> None:
    files = (ROOT / "benchmarks").rglob("*.py")
    wrong = {str(file) for file in files if any(name.split(".")[0] == "tests" for name in _imported(file))}
    assert wrong == set()


def _imported(file: Path) -> set[str]:
    """The modules that a file imports, and for `from a import b` also `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names
