"""Hooks of the documentation site: pages generated from the code, and links that leave the site.

mkdocs calls `on_page_markdown` for each page (see `hooks` in mkdocs.yml).
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import Any

from ddpobs_server.analysis.finding import Facts
from ddpobs_server.analysis.findings.registry import FACTS, MODULES
from ddpobs_server.app import create_app
from ddpobs_server.metrics.fleet_metrics import render_fleet
from ddpobs_server.metrics.metric import Metric
from ddpobs_server.metrics.run_metrics import PRESENT, STORED
from ddpobs_server.metrics.run_metrics import headers as run_headers
from ddpobs_server.operations.commands import cli as server_commands
from ddpobs_server.settings import Settings
from fastapi.testclient import TestClient
from prometheus_client import generate_latest
from typer.main import get_command

from ddpobs.cli import main as commands
from scripts.combinations import table as combinations

OUTSIDE = re.compile(
    r"\[((?:[^\[\]]|\[[^\]]*\])+)\]\((?:\.\./)+((?:benchmarks|ddpobs|server|tests|examples|deploy|README|CONTRIBUTING)[^)]*)\)"
)
"""A link to a file of the repository that is not part of the site."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the generated parts; replace a link to a file outside of the site by its text and the file's path."""
    for mark, generate in GENERATED.items():
        if mark in markdown.splitlines():
            markdown = markdown.replace(mark, generate())
    return OUTSIDE.sub(r"\1, `\2`", markdown)


def command_reference() -> str:
    """Each command with its parameters, as Markdown."""
    parts = []
    for program, app in (("ddpobs", commands), ("ddpobs-server", server_commands)):
        for name, command in leaves(program, get_command(app)):
            rows = [f"| `{' '.join(names)}` | {_cell(text)} |" for names, text in _parameters(command)]
            table = ["| argument or option | meaning |", "|---|---|", *rows] if rows else []
            parts.append("\n".join([f"## {name}", "", command.help or "", "", *table]))
    return "\n\n".join(parts)


def leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands below a command, with their full names."""
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        yield name, command
        return
    for each, subcommand in subcommands.items():
        yield from leaves(f"{name} {each}", subcommand)


def _parameters(command: Any) -> Iterator[tuple[list[str], str]]:
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        is_argument = parameter.param_type_name == "argument"
        yield [name.upper() for name in names] if is_argument else names, getattr(parameter, "help", None) or ""


def field_reference() -> str:
    """Each route with its parameters and its response, and the objects in the responses, as Markdown."""
    document = create_app(Settings()).openapi()
    schemas: dict[str, Any] = document["components"]["schemas"]
    routes, names = [], []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            response = operation["responses"].get("200", {}).get("content", {}).get("application/json", {})
            name = _reference(response.get("schema", {}))
            names += [name] if name else []
            parts = [f"## {method.upper()} `{path}`", operation.get("description", ""), *_queries(operation)]
            routes.append("\n\n".join([*parts, "\n".join(_table(schemas.get(name, {})))]).rstrip())
    responses = set(names)
    for name in names:  # Grows in the loop.
        names.extend(used for used in _used(schemas[name]) if used not in names)
    elsewhere = responses | {facts.__name__ for facts in FACTS}
    objects = [f"## {name}\n\n" + "\n".join(_table(schemas[name])) for name in sorted(set(names) - elsewhere)]
    return "\n\n".join([*routes, *objects])


def _queries(operation: dict[str, Any]) -> list[str]:
    """The table of an operation's query parameters, if it has any."""
    queries = [each for each in operation.get("parameters", []) if each["in"] == "query"]
    rows = [f"| `{each['name']}=` | {_cell(each['description'])} |" for each in queries]
    return ["\n".join(["| parameter | meaning |", "|---|---|", *rows])] if rows else []


def _table(schema: dict[str, Any]) -> list[str]:
    fields = schema.get("properties", {}).items()
    rows = [f"| `{name}` | {_type(field)} | {_cell(field.get('description', ''))} |" for name, field in fields]
    if not rows:
        return []
    return ["| field | type | meaning |", "|---|---|---|", *rows]


def _reference(schema: dict[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _used(schema: Any) -> Iterator[str]:
    """Names of the schemas that a schema refers to."""
    if isinstance(schema, dict):
        if name := _reference(schema):
            yield name
        for each in schema.values():
            yield from _used(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _used(each)


def _type(schema: dict[str, Any]) -> str:
    if name := _reference(schema):
        return name
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def evidence_reference() -> str:
    """The fields of each finding's evidence, as Markdown: their meanings are those of the classes' docstrings."""
    return "\n\n".join(_facts(module, facts) for module in MODULES for facts in getattr(module, "FACTS", ()))


def _facts(module: ModuleType, facts: type[Facts]) -> str:
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", facts.__name__.removesuffix("Facts")).lower()
    codes = [name] if name in module.CODES else module.CODES
    summary, _, attributes = inspect.cleandoc(facts.__doc__ or "").partition("\nAttributes:\n")
    meanings = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE))
    rows = [f"| `{each.name}` | {_cell(str(each.type))} | {_cell(meanings[each.name])} |" for each in fields(facts)]
    head = [f"## {', '.join(codes)}", "", " ".join(summary.split()), "", "| field | type | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows])


def metric_reference() -> str:
    """Each metric of runs and of the fleet with its labels and its help, as Markdown."""
    metrics: tuple[Metric[Any], ...] = (*STORED, *PRESENT)
    labels = {metric.name: ", ".join(sorted((*metric.labels, "run"))) for metric in metrics}
    headers = {**run_headers(generate_latest), "": render_fleet(None, generate_latest)}
    rows = [
        f"| `{found[1]}` | {labels.get(name, '')} | {_cell(found[2])} |"
        for name, header in headers.items()
        for found in re.finditer(r"^# HELP (\w+) (.+)$", header.decode(), re.MULTILINE)
    ]
    return "\n".join(["| metric | labels | meaning |", "|---|---|---|", *rows])


def collector_metric_reference() -> str:
    """Each metric of the collector itself with its help, as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(database_url=f"sqlite:///{folder}/empty.db"))
        with TestClient(app) as client:
            text = client.get("/metrics", params={"only": "collector"}).text
    found = re.findall(r"^# HELP (\w+) (.+)$", text, re.MULTILINE)
    rows = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in found if not name.endswith("_created")]
    return "\n".join(["| metric | meaning |", "|---|---|", *rows])


GENERATED = {
    "[combinations]": combinations,
    "[commands]": command_reference,
    "[fields]": field_reference,
    "[evidence]": evidence_reference,
    "[metrics]": metric_reference,
    "[collector metrics]": collector_metric_reference,
}
"""What stands in the place of a line of a page."""
