"""The documents match the code: links have targets, code parses, settings and commands are complete."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from ddpobs_server import app
from ddpobs_server.settings import Settings
from typer.main import get_command

import ddpobs.horovod
from ddpobs import TelemetryConfig

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_existing_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_documents_parses(document: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        ast.parse(code)


def test_the_readme_has_every_setting_of_the_training_side_once() -> None:
    documented = re.findall(r"^\| `DDPOBS_([A-Z_]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    variables = {field.name.upper() for field in fields(TelemetryConfig)} - {"COLLECTOR"} | {"TELEMETRY"}
    assert sorted(documented) == sorted(variables)


def test_the_operators_guide_has_every_setting_command_and_alert_of_the_collector() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    rules = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "alerts.yml").read_text())["groups"]
    patterns = [rf"`(DDPOBS_SERVER_)?{name.upper()}`" for name in Settings.model_fields]
    patterns += [f"`{rule['alert']}`" for group in rules for rule in group["rules"]]
    patterns += [f"ddpobs-server {command}" for command in get_command(app.cli).commands if command != "serve"]  # type: ignore[attr-defined]
    assert [pattern for pattern in patterns if not re.search(pattern, guide)] == []


def test_the_table_for_users_of_horovod_has_every_name() -> None:
    table = (ROOT / "docs" / "horovod.md").read_text().partition("## What runs")[2].partition("\n## ")[0]
    documented = set(re.findall(r"\w+", table)) | {f"grouped_{name}" for name in re.findall(r"allreduce\w*", table)}
    assert set(ddpobs.horovod.__all__) - documented == set()


def test_links_within_the_guide_lead_to_its_headings() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    headings = re.findall(r"^## (.+)$", guide, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([\w-]+)\)", guide)) == anchors


def test_files_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = set(re.findall(r"`((?:ddpobs|server|tests|docs|benchmarks)/[\w/.-]+\.py)`", text))
    assert len(paths) > 5
    assert {path for path in paths if not (ROOT / path).exists()} == set()
