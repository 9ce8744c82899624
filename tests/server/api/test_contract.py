"""Every route of the OpenAPI document, called as it allows and as it does not: never a server error."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.collector import Collector
from tests.server.batches import batch, hello, layout, put, spans, steps

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def document(shared: Collector) -> Any:
    schema = schemathesis.openapi.from_url(f"{shared.url}/openapi.json")
    for rank in range(2):
        told = {"hello": hello(), "layouts": [layout()]}
        put(shared.url, batch("known", rank=rank, steps=steps(0, 40), spans=spans(0, 40), **told))
    return schema


def test_every_answer_and_every_json_body_has_a_schema_and_no_reference_leads_nowhere(shared: Collector) -> None:
    text = requests.get(f"{shared.url}/openapi.json", timeout=60).text
    described = json.loads(text)
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            bodies = [operation["requestBody"]] if "requestBody" in operation else []
            good = [answer for status, answer in operation["responses"].items() if status in ("200", "201")]
            for told in [*good, *bodies]:
                as_json = told.get("content", {}).get("application/json", {"schema": path == "/metrics"})
                assert as_json["schema"], (method, path)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names == set(described["components"]["schemas"])


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_no_request_makes_a_server_error_and_every_answer_is_as_documented(document: Any, mode: GenerationMode) -> None:
    with requests.Session() as session:
        for found in document.get_all_operations():
            operation = found.ok()
            given_something = any(operation.iter_parameters()) or len(operation.body)
            if operation.method != "delete" and (given_something or mode is GenerationMode.POSITIVE):
                call_often(operation, mode, session)


def call_often(operation: Any, mode: GenerationMode, session: requests.Session) -> None:
    strategy = operation.as_strategy(generation_mode=mode)

    @settings(
        max_examples=EXAMPLES,
        derandomize="FUZZ_EXAMPLES" not in os.environ,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy, known=st.booleans())
    def answers_as_documented(case: Any, known: bool) -> None:
        if known and "run" in case.path_parameters:
            case.path_parameters["run"] = "known"
        case.call_and_validate(session=session, checks=CHECKS, timeout=60)

    answers_as_documented()
