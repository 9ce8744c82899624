"""The documents match the code: links resolve, Python parses, and every setting, command and alert is listed."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ddpobs_server.api import concurrency
from ddpobs_server.figures.registry import figure_kinds
from ddpobs_server.operations import retention
from ddpobs_server.operations.commands import cli as server_cli
from ddpobs_server.settings import Settings
from ddpobs_server.store.writing import fingerprints
from typer.main import get_command

import ddpobs.horovod
from benchmarks import measured
from benchmarks.paper.experiments import EXPERIMENTS
from dashboards.alert_page import ALERTS, alert_reference
from ddpobs import TelemetryConfig, cli, wire
from ddpobs.recording.error_text import describe
from scripts.docs_site import GENERATED, command_reference
from tests.support.longest_files import FIRST

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "operations").glob("*.md")))
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_a_document_parses(document: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        ast.parse(code)


def test_the_table_of_settings_has_every_variable_of_the_training_side_once() -> None:
    documented = re.findall(r"^\| `DDPOBS_([A-Z_]+)` \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    variables = {field.name.upper() for field in fields(TelemetryConfig)} - {"COLLECTOR"} | {"TELEMETRY", "RANGES"}
    assert sorted(documented) == sorted(variables)


def table_rows(text: str) -> list[list[str]]:
    """Cells of each row of the tables of a page's text, without bold marks."""
    lines = text.splitlines()
    return [[cell.strip(" *") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]


def as_documented(default: object) -> set[str]:
    """Forms of a default in a table."""
    if default is None or default == "":
        return {"", "none"}
    if isinstance(default, bool):
        return {str(default).lower(), str(int(default))}
    if isinstance(default, int | float):
        return {f"{default:,}".removesuffix(".0"), f"{default}".removesuffix(".0")}
    return {str(default), f"`{default}`"}


def test_the_documented_defaults_of_the_collector_are_those_of_the_code() -> None:
    rows = table_rows(OPERATIONS)
    wrong = []
    for name, field in Settings.model_fields.items():
        found = [row for row in rows if any(f"`DDPOBS_SERVER_{name.upper()}`" in cell for cell in row[:2])]
        defaults = {
            part.strip(" *") for row in found for cell in row[:2] for part in re.split(r", (?!\d{3}\b)|,(?= )", cell)
        }
        if not defaults & as_documented(field.default):
            wrong.append((name, field.default, defaults))
    assert wrong == []


def test_the_documented_default_retention_is_that_of_the_code() -> None:
    kept = {row[0]: row[1] for row in table_rows(OPERATIONS) if len(row) == 2}
    settings = Settings.model_fields
    assert [settings[name].default for name in ("keep_spans_days", "keep_runs_days", "keep_gb")] == [None] * 3
    assert (kept["spans, steps, events"], kept["runs"][:8]) == ("for ever", "for ever")
    assert f"({settings['max_runs'].default:,})" in kept["runs"]
    assert kept["the ids of a deleted run's processes, so that it stays deleted"] == f"{retention._DELETED_DAYS} days"
    assert kept["fingerprints of a process and module"] == f"the first and the latest {fingerprints.KEPT}"


def test_the_documented_defaults_of_the_training_side_are_those_of_the_code() -> None:
    documented = {
        row[0].strip("`").removeprefix("DDPOBS_").lower(): row[2]
        for row in table_rows((ROOT / "docs" / "settings.md").read_text())
        if len(row) == 3
    }
    code = {field.name: field.default for field in fields(TelemetryConfig)}
    assert {name for name in code if documented.get(name) not in as_documented(code[name])} == {
        "collector",
        "run",
        "spool",
    }


def test_the_bounds_of_the_collectors_memory_add_up_to_the_stated_sum() -> None:
    section = OPERATIONS.partition("## Memory of a collector\n")[2].partition("\n## ")[0]
    (stated_gb,) = re.findall(r"Their sum is (\d+) GB", section)
    parts = {
        row[0]: int(row[1].replace(",", ""))
        for row in table_rows(OPERATIONS)
        if row[-1].replace(",", "").isdecimal() and row[0] in section and len(row) == 2
    }
    assert round(sum(parts.values()) / 1000) == int(stated_gb)
    assert (
        parts["batches from arrival to commit (`DDPOBS_SERVER_MAX_UNDER_WAY_MB`)"]
        == Settings.model_fields["max_under_way_mb"].default
    )
    assert f"reads that are computed ({concurrency._READS}) or unread ({concurrency._UNSENT_RESPONSES} and" in section


def in_line(pattern: str) -> list[tuple[str, str]]:
    """Document and text of each piece of code inside of a sentence or a table."""
    texts = {path.name: re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S) for path in DOCUMENTS}
    return [(name, span) for name, text in texts.items() for span in re.findall(rf"`({pattern})`", text)]


def unknown_words(command: str) -> list[str]:
    """Subcommands and options of a command line that the program does not have."""
    program, *words = re.sub(r"[\[\]\\|…]|COMMAND.*", " ", command.partition(" -- ")[0]).split()
    known: Any = get_command(cli.main if program == "ddpobs" else server_cli)
    while words and (commands := getattr(known, "commands", None)) and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in commands:
            return [name] if name.islower() else []
        known = commands[name]
    options = {option for parameter in known.params for option in [*parameter.opts, *parameter.secondary_opts]}
    return [word for word in words if word.startswith("-") and word.strip("-") and word not in options | {"--help"}]


def test_commands_in_a_sentence_or_a_table_have_existing_options() -> None:
    spans = in_line(r"ddpobs(?:-server)? (?!bucket \d)[^`]+")
    assert len(spans) > 80
    assert [(name, span) for name, span in spans if unknown_words(span)] == []
    assert unknown_words("ddpobs-server token list --nothing") == ["--nothing"]


def test_programs_and_targets_that_a_document_names_exist() -> None:
    modules = {span.split()[2] for _, span in in_line(r"python -m benchmarks[^`]*")}
    paths = [Path(name.replace(".", "/")) for name in modules]
    files = {path: (path.with_suffix(".py"), path / "__main__.py") for path in paths}
    assert [path for path, either in files.items() if not any((ROOT / one).exists() for one in either)] == []
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {span.split()[1] for _, span in in_line(r"make [a-z][^`]*")} <= targets
    assert len(modules) > 3


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 600


def commands_of(program: typer.Typer) -> dict[str, Any]:
    group: Any = get_command(program)
    commands: dict[str, Any] = group.commands
    return commands


def test_the_operators_guide_has_every_setting_and_command_of_the_collector() -> None:
    required = [rf"`DDPOBS_SERVER_{name.upper()}`" for name in Settings.model_fields]
    required += [f"ddpobs-server {command}" for command in commands_of(server_cli) if command != "serve"]
    assert [pattern for pattern in required if not re.search(pattern, OPERATIONS)] == []


def test_each_generated_part_has_its_place_in_a_page() -> None:
    marks = [line for page in ROOT.glob("docs/**/*.md") for line in page.read_text().splitlines() if line[:1] == "["]
    assert sorted(mark for mark in marks if mark.endswith("]")) == sorted(GENERATED)


def test_the_reference_has_each_alert_with_its_texts_and_without_the_marks_of_templates() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = {rule["alert"]: rule for group in rules for rule in group["rules"]}
    parts = dict(part.split("\n", 1) for part in re.split(r"^### ", alert_reference(), flags=re.MULTILINE)[1:])
    assert parts.keys() == alerts.keys()
    for name, part in parts.items():
        text, _, expression = part.partition("```text\n")
        assert f"**{alerts[name]['labels']['severity']}**" in text
        assert expression.startswith(alerts[name]["expr"])
        assert not re.search(r"[{}$|]|: *$", text, re.MULTILINE), text
        if "do: {{ $labels.remedy }}" in alerts[name]["annotations"]["description"]:
            assert "do: REMEDY" in text
    assert "rank RANKS is slow in PHASE" in parts["DdpobsStraggler"]
    assert "VALUE batches a second" in parts["DdpobsQueueFull"]


def test_the_terminal_page_has_every_command_and_the_reference_each_of_its_options() -> None:
    page, reference = (ROOT / "docs" / "terminal.md").read_text(), command_reference()
    missing = []
    for name, command in commands_of(cli.main).items():
        if command.hidden:
            continue
        missing += [] if re.search(rf"^\| `ddpobs {name}\b", page, re.MULTILINE) else [name]
        part = reference.partition(f"## ddpobs {name}\n")[2].partition("\n## ")[0]
        options = [parameter.opts[0] for parameter in command.params if parameter.param_type_name == "option"]
        missing += [f"{name} {option}" for option in options if f"| `{option}" not in part]
    assert missing == []


def test_every_extra_of_the_package_is_in_the_documents() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = "\n".join(document.read_text() for document in DOCUMENTS)
    named = {name for names in re.findall(r"\.\[([a-z,]+)\]", texts) for name in names.split(",")}
    assert extras.keys() - named <= {"dev"}


def test_the_settings_in_bold_are_the_flags_of_the_collector() -> None:
    bold = re.findall(r"^\| \*\*`DDPOBS_SERVER_([A-Z_]+)`\*\*", OPERATIONS, re.MULTILINE)
    flags = [parameter.name.upper() for parameter in commands_of(server_cli)["serve"].params]
    assert sorted(bold) == sorted(flags)


def test_the_guide_to_the_page_has_every_figure() -> None:
    rows = [row[0] for row in table_rows((ROOT / "docs" / "page.md").read_text())]
    titles = [kind.title.lower() for kind in figure_kinds().values()]
    assert [title for title in titles if not any(row.startswith(title) for row in rows)] == []


def test_the_wire_page_has_the_source_of_every_column_that_was_added_to_steps() -> None:
    cells = [row[0] for row in table_rows((ROOT / "docs" / "wire.md").read_text())]
    assert [name for name in wire.Steps.defaults if not any(f"`{name}`" in cell for cell in cells)] == []


def test_the_horovod_table_has_every_public_name() -> None:
    table = (ROOT / "docs" / "horovod.md").read_text().partition("## Which functions run")[2].partition("\n## ")[0]
    documented = set(re.findall(r"\w+", table)) | {f"grouped_{name}" for name in re.findall(r"allreduce\w*", table)}
    assert set(ddpobs.horovod.__all__) - documented == set()


def test_files_and_folders_that_a_document_names_exist() -> None:
    texts = "\n".join(document.read_text() for document in DOCUMENTS)
    names = set(re.findall(r"`((?:ddpobs|server|tests|docs|benchmarks|dashboards|deploy|examples)/[\w/.-]+)`", texts))
    assert len(names) > 20
    assert {name for name in names if not (ROOT / name).exists()} == set()


def test_every_path_in_the_guides_for_changes_exists() -> None:
    paths = re.findall(r"`([\w.]+(?:/[\w./-]+|\.(?:md|yml)))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 25
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_list_of_a_batchs_content_has_the_source_lines_that_a_traceback_sends() -> None:
    try:
        raise ValueError
    except ValueError as error:
        by_default, without = (describe(error, texts) for texts in (TelemetryConfig().traceback, False))
    assert "raise ValueError" in str(by_default["traceback"])
    assert set(without) == {"error"}
    content = " ".join(OPERATIONS.partition("## What a batch contains")[2].partition("\n## ")[0].split())
    assert "lines of source code" in content
    assert "last lines of a failed command's stderr" in content
    assert "`DDPOBS_TRACEBACK=0`" in content


def test_tables_are_whole() -> None:
    """A row after a blank line begins no table, unless a line of dashes follows it."""
    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
        firsts = re.findall(r"(?:^|\n\n)(\|.*\n.*)", text)
        assert [first for first in firsts if not re.search(r"\n\|[-|: ]+\|$", first)] == [], document.name


@pytest.mark.parametrize("page", measured.PAGES, ids=lambda page: page.stem)
def test_the_tables_of_the_measurements_are_those_of_the_newest_results(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- table: ") > (0 if page.stem in ("auto-buckets", "whatif") else 2)
    assert measured.filled(text) == text


def test_files_that_tests_start_first_exist() -> None:
    assert [path for path in FIRST if not (ROOT / path).exists()] == []


def test_links_into_another_document_name_one_of_its_headings() -> None:
    missing = []
    for document in DOCUMENTS:
        for path, anchor in re.findall(r"\]\(([^)#:]+\.md)#([\w-]+)\)", document.read_text()):
            headings = re.findall(r"^#+ (.+)$", (document.parent / path).read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            if anchor not in anchors:
                missing.append(f"{document.name}: {path}#{anchor}")
    assert missing == []


def test_the_page_on_horovod_has_the_names_that_do_not_exist() -> None:
    page = (ROOT / "docs" / "horovod.md").read_text()
    assert [name for name in ddpobs.horovod.REPLACEMENTS if not re.search(rf"`(hvd\.)?{name}`", page)] == []


def test_each_figure_of_the_paper_has_the_name_of_its_command() -> None:
    page = (ROOT / "docs" / "paper.md").read_text()
    assert [name for name in EXPERIMENTS if f"| {name} |" not in page] == []
