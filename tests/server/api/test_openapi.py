"""The OpenAPI document: descriptions, units, null, and a client that a generator makes of it."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from ddpobs_server import api
from ddpobs_server.analysis.findings.registry import FACTS
from ddpobs_server.app import create_app
from ddpobs_server.settings import Settings
from fastapi import APIRouter
from fastapi.routing import APIRoute

from benchmarks.rig import patience
from benchmarks.rig.collector import Collector
from ddpobs import wire
from tests.support.server.batches import MS, batch, get, hello, layout, put, spans, steps

UNITS = {"ns": "nanoseconds", "bytes": "bytes", "permille": "parts of a thousand", "mhz": "MHz", "milli": "Thousand"}
UNITS |= {
    "s": "a second",
    "gb": "GB",
    "days": "Days",
    "hours": "Hours",
    "hour": "hour",
    "ratio": "share|Relative|Share",
}
COUNTERS = ("running_ns", "run_delay_ns", "preemptions", "major_faults", "throttled_ns", "collections", "elements")


@pytest.fixture(scope="module")
def document() -> Any:
    return create_app(Settings()).openapi()


def properties(document: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each field with its schema's name, and the fields of objects without a name."""

    def below(name: str, schema: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
        if isinstance(schema, dict):
            for field, definition in schema.get("properties", {}).items():
                yield name, field, definition
            for value in schema.values():
                yield from below(name, value)
        elif isinstance(schema, list):
            for value in schema:
                yield from below(name, value)

    for name, schema in document["components"]["schemas"].items():
        yield from below(name, schema)


def kinds(field: dict[str, Any]) -> set[str]:
    """JSON types of a field, and of the elements if it is a list."""
    options = [field, *field.get("anyOf", [])]
    return {kind for option in options for part in (option, option.get("items", {})) for kind in types_of(part)}


def types_of(schema: dict[str, Any]) -> Iterator[str]:
    for option in [schema, *schema.get("anyOf", [])]:
        if "type" in option:
            yield option["type"]


def test_every_field_has_a_description_that_names_its_unit_and_the_reason_for_null(document: Any) -> None:
    fields = list(properties(document))
    assert len(fields) > 500
    texts = {(schema, name): field.get("description", "") for schema, name, field in fields}
    assert [key for key, text in texts.items() if not text.endswith(".") or text != text.strip()] == []
    numbers = [(schema, name) for schema, name, field in fields if kinds(field) & {"integer", "number"}]
    missing = [
        (key, texts[key])
        for key in numbers
        if (unit := UNITS.get(key[1].rpartition("_")[2])) and not any(word in texts[key] for word in unit.split("|"))
    ]
    assert missing == []
    nullable = [(schema, name) for schema, name, field in fields if "null" in kinds(field)]
    assert len(nullable) > 100
    assert [key for key in nullable if "null" not in texts[key]] == []


def test_the_document_has_the_routes_of_every_router_in_the_folder_of_the_api(document: Any) -> None:
    modules = map(importlib.import_module, api.MODULES)
    routers = [value for module in modules for value in vars(module).values() if isinstance(value, APIRouter)]
    paths = {route.path for router in routers for route in router.routes if isinstance(route, APIRoute)}
    assert "/api/v1/runs/{run}/account" in paths
    assert paths - set(document["paths"]) == set()


def test_every_operation_has_a_short_id_and_every_parameter_a_description(document: Any) -> None:
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert sorted(set(ids)) == sorted(ids)
    assert {"list_runs", "get_run", "compare_runs", "put_batch"} <= set(ids)
    assert max(map(len, ids)) < 20
    parameters = [(op["operationId"], p) for op in operations for p in op.get("parameters", [])]
    assert [
        (name, p["name"]) for name, p in parameters if not (p.get("description") or p["schema"].get("description"))
    ] == []


def test_the_evidence_of_a_finding_is_one_of_the_registered_classes(document: Any) -> None:
    schemas = document["components"]["schemas"]
    options = schemas["FindingResponse"]["properties"]["evidence"]["anyOf"]
    assert [option["$ref"].rpartition("/")[2] for option in options] == [facts.__name__ for facts in FACTS]
    assert schemas["SlowRankFacts"]["properties"]["lost_ns"]["type"] == "integer"


def fill(url: str, run: str) -> None:
    """Send two ranks whose own time, counters and backend's begin are partly unknown, and a pulse in no bucket."""
    own = {name: getattr(steps(0, 4), name).copy() for name in ("own_ns", *(f"own_{p}_ns" for p in wire.OWN_PHASES))}
    for values in own.values():
        values[0] = wire.UNKNOWN
    own["own_data_ns"][2] = -1  # A difference of times, in a step whose own time is known.
    for rank in range(2):
        facts: dict[str, Any] = {"hello": hello(), "layouts": [layout()], "spans": spans(0, 4)}
        pulse = wire.Pulse(at_ns=5, phase="data", step=4, machine=wire.Machine(processors=4))
        unknown = dict.fromkeys(COUNTERS, wire.UNKNOWN)
        put(url, batch(run, rank=rank, steps=steps(0, 4, **own, **unknown), pulse=pulse, **facts))


def reads(document: Any, run: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Route, query and schema of each read of a run, with each variant of the steps."""
    for path, operations in document["paths"].items():
        content = operations.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        if path.startswith("/api/v1/") and schema:
            route = path.removeprefix("/api/v1").format(run=run, figure="phases")
            variants: list[dict[str, Any]] = [{}, {"points": 2}, {"mean": True}] if route.endswith("/steps") else [{}]
            for query in variants:
                yield route, query | ({"with": run} if route.endswith("/compare") else {}), schema


def numbers(document: Any) -> Iterator[float]:
    if isinstance(document, dict | list):
        for value in document.values() if isinstance(document, dict) else document:
            yield from numbers(value)
    elif isinstance(document, int | float):
        yield document


def test_answers_have_the_documented_fields_alone_and_null_for_unknown(
    document: Any, on_sqlite: Collector, run: str
) -> None:
    fill(on_sqlite.url, run)
    closed = json.loads(json.dumps(document["components"]))
    for schema in closed["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    answers = {}
    for route, query, schema in reads(document, run):
        answer = get(on_sqlite.url, route, **query)
        jsonschema.validate(answer, schema | {"components": closed})
        answers[(route, *query)] = answer
        if not route.endswith(("/trace", "/figures/phases")) and (query or not route.endswith("/steps")):
            assert -1 not in numbers(answer), route
    columns = answers[(f"/runs/{run}/steps",)]["columns"]
    assert columns["own_ns"] == [None, None] + [95 * MS] * 6
    assert columns["own_data_ns"] == [None, None, 10 * MS, 10 * MS, -1, -1, 10 * MS, 10 * MS]
    assert columns["preemptions"] == [None] * 8
    assert set(answers[(f"/runs/{run}/spans",)]["columns"]["started_ns"]) == {None}
    assert answers[(f"/runs/{run}/ranks",)]["ranks"][0]["pulse"]["machine"]["device_busy_permille"] is None


def generator() -> Path:
    program = Path(sys.prefix) / "tools" / "bin" / "openapi-python-client"
    if not program.exists():
        reason = f"no generator of clients at {program}: scripts/setup.sh test"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return program


def test_a_generated_client_reads_runs_findings_and_steps(
    on_sqlite: Collector, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(on_sqlite.url, run)
    source = tmp_path / "openapi.json"
    source.write_text(httpx.get(f"{on_sqlite.url}/openapi.json").text)
    config = tmp_path / "config.json"
    options = {"package_name_override": "generated_collector", "post_hooks": []}
    config.write_text(json.dumps(options | {"content_type_overrides": {wire.MSGPACK: "application/octet-stream"}}))
    command = f"{generator()} generate --path {source} --config {config} --meta none --fail-on-warning"
    done = subprocess.run(
        [*command.split(), "--output-path", str(tmp_path / "generated_collector")],
        capture_output=True, text=True, check=False, timeout=patience.HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.syspath_prepend(tmp_path)

    def operation(tag: str, name: str) -> Any:
        return importlib.import_module(f"generated_collector.api.{tag}.{name}")

    client = importlib.import_module("generated_collector").Client(base_url=on_sqlite.url)
    page = operation("runs", "list_runs").sync(client=client, limit=500)
    assert run in [listed.run for listed in page.runs]
    diagnostics = operation("diagnosis", "get_diagnostics").sync(run, client=client)
    assert (diagnostics.steps_seen, len(diagnostics.missing) > 0) == (4, True)
    read = operation("runs", "get_steps").sync(run, client=client, rank=1, from_=1)
    assert (read.columns.step, read.columns.own_ns, read.next_) == ([1, 2, 3], [95 * MS] * 3, None)
    assert operation("runs", "get_steps").sync(run, client=client, rank=1, to=0).columns.own_ns == [None]
    again = asyncio.run(operation("runs", "get_run").asyncio(run, client=client))
    assert (again.state.value, again.ranks) == ("running", 2)
