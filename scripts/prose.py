"""Count indirect prose and vague names by file: `python scripts/prose.py [PATH ...] [--show]`.

Prose: pronoun subjects ("what", "who", "nobody") and verbs of speech ("tell", "know", "ask") in docstrings and
comments, per 1,000 words. Names: bindings (variables, parameters, attributes) that are a bare participle, pronoun or
preposition, as a share of all bindings. The goals are at most 4 per 1,000 words and 0.5 %. `--show` prints each place.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

INDIRECT = re.compile(
    r"\b(what|whatever|who|whoever|whom|whose|nobody|somebody|anybody|everybody|"
    r"tell|tells|told|telling|say|says|said|saying|know|knows|knew|knowing|ask|asks|asked|asking|hear|hears|heard)\b",
    re.IGNORECASE,
)
VAGUE = frozenset(
    "told found place places one ones of made mine known came gone given left held shown seen said asked wanted there "
    "here those these what which who whose everyone nobody others rest both each several kept taken brought laid lent "
    "owed begun sent got heard meant noted put at on by beside between within before after another".split()
)
WORD = re.compile(r"[A-Za-z]+")


def prose_of(source: str, tree: ast.Module) -> list[tuple[int, str]]:
    """Docstrings (of modules, classes, functions and attributes) and comments, with their lines."""
    texts = [
        (node.lineno, node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:", "#!")):
            texts.append((token.start[0], token.string))
    return texts


def bindings_of(tree: ast.Module) -> list[tuple[int, str]]:
    """Every name that a file binds: assigned names and attributes, and parameters."""
    names: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id if isinstance(node, ast.Name) else node.attr))
        elif isinstance(node, ast.arg) and node.arg not in {"self", "cls"}:
            names.append((node.lineno, node.arg))
    return names


def main() -> None:
    """Print both figures by file, worst first, and in total."""
    show = "--show" in sys.argv
    paths = [argument for argument in sys.argv[1:] if not argument.startswith("--")] or ["ddpobs", "server"]
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *paths], capture_output=True, text=True, check=True
    )
    rows: list[tuple[float, float, str]] = []
    words = indirect = bindings = vague = 0
    for name in sorted(path for path in listed.stdout.split() if path.endswith((".py", ".md")) and Path(path).exists()):
        source = Path(name).read_text()
        tree = ast.parse(source if name.endswith(".py") else "")
        prose = prose_of(source, tree) if name.endswith(".py") else list(enumerate(source.splitlines(), 1))
        file_words = sum(len(WORD.findall(text)) for _, text in prose)
        hits = [
            (line + text[: match.start()].count("\n"), match.group())
            for line, text in prose
            for match in INDIRECT.finditer(text)
        ]
        names = bindings_of(tree)
        vague_names = [(line, bound) for line, bound in names if bound.lstrip("_") in VAGUE]
        words, indirect = words + file_words, indirect + len(hits)
        bindings, vague = bindings + len(names), vague + len(vague_names)
        rows.append((1000 * len(hits) / max(1, file_words), 100 * len(vague_names) / max(1, len(names)), name))
        if show:
            for line, word in sorted(hits + vague_names):
                print(f"{name}:{line}: {word}")
    for per_thousand, percent, name in sorted(rows, reverse=True):
        print(f"{per_thousand:6.1f} per 1,000 words  {percent:5.2f} % of bindings  {name}")
    rates = 1000 * indirect / max(1, words), 100 * vague / max(1, bindings)
    print(f"{rates[0]:6.1f} per 1,000 words  {rates[1]:5.2f} % of bindings  in all")


if __name__ == "__main__":
    main()
