"""Every route of the OpenAPI document with valid and invalid requests, and its entry in the reference."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from ddpobs_server.analysis.findings.registry import FACTS
from ddpobs_server.api import diagnosis, ranks, runs
from ddpobs_server.api.layout import Bucket
from ddpobs_server.app import create_app
from ddpobs_server.settings import Settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from benchmarks.rig import patience
from benchmarks.rig.collector import Collector
from scripts import docs_site
from tests.support.server.batches import batch, hello, layout, put, spans, steps

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
ROUNDS = [
    pytest.param("sqlite", POSITIVE, id="sqlite-positive"),
    pytest.param("postgresql", NEGATIVE, id="postgresql-negative"),
    pytest.param("sqlite", NEGATIVE, id="sqlite-negative", marks=pytest.mark.wide),
    pytest.param("postgresql", POSITIVE, id="postgresql-positive", marks=pytest.mark.wide),
]
"""`make test` has each kind of request once, and each database."""


def document(running: Collector) -> Any:
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    for rank in range(2):
        facts: dict[str, Any] = {"hello": hello(), "layouts": [layout()]}
        put(running.url, batch("known", rank=rank, steps=steps(0, 40), spans=spans(0, 40), **facts))
    return schema


def test_every_response_and_body_has_a_schema_and_every_reference_resolves(shared: Collector) -> None:
    text = requests.get(f"{shared.url}/openapi.json", timeout=patience.HANG_S).text
    described = json.loads(text)
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            bodies = operation.get("requestBody", {"content": {}})["content"].values()
            assert all(body["schema"] for body in bodies), (method, path)
            good = [answer for status, answer in operation["responses"].items() if status in ("200", "201")]
            for content in good:
                as_json = content.get("content", {}).get(
                    "application/json", {"schema": path.endswith(("/metrics", ".html"))}
                )
                assert as_json["schema"], (method, path)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names == set(described["components"]["schemas"])


def test_every_rest_route_is_in_the_reference_with_its_parameters() -> None:
    sections = re.split(r"^## ", docs_site.field_reference(), flags=re.MULTILINE)
    for path, operations in create_app(Settings()).openapi()["paths"].items():
        for method, operation in operations.items():
            (section,) = [text for text in sections if text.startswith(f"{method.upper()} `{path}`\n")]
            queries = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
            assert [name for name in queries if f"\n| `{name}=` | " not in section] == [], path


def test_every_field_of_a_rank_and_a_run_is_in_the_reference() -> None:
    reference = docs_site.field_reference()
    for schema in (ranks.Rank, runs.RunDetails, runs.ListedRun, diagnosis.Stragglers, Bucket):
        missing = [name for name in schema.__annotations__ if f"| `{name}` | " not in reference]
        assert missing == [], schema.__name__


def test_every_field_of_a_findings_evidence_is_in_the_reference_with_its_meaning() -> None:
    lines = [line for line in docs_site.evidence_reference().splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert [name for name, _, meaning in rows if meaning] == [
        f"`{each.name}`" for facts in FACTS for each in fields(facts)
    ]


def test_the_guides_examples_use_routes_and_parameters_that_exist() -> None:
    guide = (ROOT / "docs" / "rest.md").read_text()
    paths = create_app(Settings()).openapi()["paths"]
    examples = re.findall(r"curl -s ([^|\n]*)http://collector:8321/api/v1(/[\w/.-]+)(?:\?([^\"' ]+))?", guide)
    assert len(examples) > 10
    for options, path, query in examples:
        route = re.sub(r"^(/runs/)[A-Z]+", r"\1{run}", f"{path}")
        method = (re.search(r"-X (\w+)", options) or ["", "get"])[1].lower()
        operation = paths[f"/api/v1{route}"][method]
        known = {each["name"] for each in operation.get("parameters", [])}
        assert {part.partition("=")[0] for part in query.split("&") if part} <= known, path


@pytest.mark.parametrize(("database", "mode"), ROUNDS)
def test_no_request_causes_a_server_error_and_every_response_is_as_documented(
    request: pytest.FixtureRequest, database: str, mode: GenerationMode
) -> None:
    running: Collector = request.getfixturevalue(f"on_{database}")
    with requests.Session() as session:
        for result in document(running).get_all_operations():
            operation = result.ok()
            has_input = any(operation.iter_parameters()) or len(operation.body)
            if operation.method != "delete" and (has_input or mode is GenerationMode.POSITIVE):
                call_often(operation, mode, session)


def call_often(operation: Any, mode: GenerationMode, session: requests.Session) -> None:
    strategy = operation.as_strategy(generation_mode=mode)

    @settings(
        max_examples=EXAMPLES,
        derandomize="FUZZ_EXAMPLES" not in os.environ,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy, existing=st.booleans())
    def responds_as_documented(case: Any, existing: bool) -> None:
        if existing and "run" in case.path_parameters:
            case.path_parameters["run"] = "known"
        case.call_and_validate(session=session, checks=CHECKS, timeout=patience.HANG_S)

    responds_as_documented()
