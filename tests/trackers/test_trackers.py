"""A run's verdict in experiment trackers; the OpenTelemetry receiver decodes OTLP with the protocol's own classes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from ddpobs import Client, trackers, wire
from ddpobs.client.client import Run
from ddpobs.wire import PHASES
from tests.support.integration.collectors import Reply, collector

BEGAN_NS = 1_700_000_000 * 10**9
FINDING = {
    "code": "straggler",
    "severity": "critical",
    "verdict": "Rank 1 is slow",
    "measure": "",
    "cause": "its processor",
    "remedy": "Look.",
    "ranks": [1],
    "buckets": [],
    "parameters": [],
    "intervals": [{"began_ns": BEGAN_NS + 5}],
    "gain": {"ratio": 0.25, "text": "25 % of a step"},
}
STEPS: dict[str, list[int]] = {
    "first": [0, 1],
    "last": [0, 4],
    "began_ns": [BEGAN_NS, BEGAN_NS + 10],
    "ended_ns": [BEGAN_NS + 10, BEGAN_NS + 30],
} | {f"{phase}_median_ns": [7, 8] for phase in PHASES}
ACCOUNT = {"goodput": 0.5, "lost_hours": 2, "parts": [{"part": "forward", "share": 0.125}]}


UNKNOWN = dict.fromkeys(wire.Machine.__struct_fields__)
MACHINE = {
    "busy_permille": 900,
    "load_milli": 1500,
    "throttled_ns": 2_500_000_000,
    "available_bytes": 5000,
    "resident_bytes": 300,
    "device_slowdowns": [],
}
GPU = {"device_clock_mhz": 1200, "device_busy_permille": 500, "device_slowdowns": ["hw_thermal"]}


def rank(number: int, host: str | None, machine: dict[str, Any] | None, last_seen_ns: int = 1) -> dict[str, Any]:
    pulse = {"machine": None if machine is None else UNKNOWN | {"device_slowdowns": []} | machine}
    return {"rank": number, "host": host, "last_seen_ns": last_seen_ns, "pulse": pulse}


RANKS = [
    rank(0, "node 1", MACHINE),
    rank(1, "node 1", MACHINE | {"throttled_ns": 1_000_000_000, "available_bytes": 4000}),
    rank(2, "gpu2", GPU),
    rank(2, "gpu2", GPU | {"device_clock_mhz": 100}, last_seen_ns=0),
    rank(3, None, MACHINE),
    rank(4, "silent", None),
    rank(5, "silent", {}) | {"pulse": None},
]
COUNTERS = {
    "ddpobs/host/node_1/busy_ratio": 0.9,
    "ddpobs/host/node_1/load": 1.5,
    "ddpobs/host/node_1/throttled_seconds": 2.5,
    "ddpobs/host/node_1/memory_available_bytes": 4000.0,
    "ddpobs/host/node_1/memory_resident_bytes": 600.0,
    "ddpobs/host/gpu2/device_clock_mhz": 1200.0,
    "ddpobs/host/gpu2/device_busy_ratio": 0.5,
    "ddpobs/host/gpu2/device_slowdowns": 1.0,
}


def answer(path: str) -> Reply:
    documents = {"ranks": {"ranks": RANKS}} | {
        "diagnostics": {"findings": [FINDING]},
        "account": ACCOUNT,
        "steps": {"columns": STEPS, "next": None},
    }
    return 200, {}, json.dumps(documents[path.partition("?")[0].rpartition("/")[2]]).encode()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with collector(answer) as server:
        yield Client(server.url).run("r")


@contextmanager
def receiver() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP receiver: its address, and the spans that arrived."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(span for part in request.resource_spans for scope in part.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        server.server_close()


def test_the_summary_has_numbers_and_findings_with_a_link(run: Run) -> None:
    numbers, text = trackers.summary(run)
    assert numbers == {
        "ddpobs/goodput": 0.5,
        "ddpobs/lost_hours": 2.0,
        "ddpobs/gain_ratio": 0.25,
        "ddpobs/findings/critical": 1.0,
        "ddpobs/findings/warning": 0.0,
        "ddpobs/findings/info": 0.0,
        "ddpobs/share/forward": 0.125,
        **COUNTERS,
    }
    assert text == f"[r]({run.address})\n\n- **critical**: Rank 1 is slow" + (
        "\n    - cause: its processor\n    - do: Look.\n    - saves: 25 % of a step"
    )


def test_tensorboard_shows_numbers_and_findings(run: Run, tmp_path: Path) -> None:
    with SummaryWriter(tmp_path) as writer:
        trackers.tensorboard(run, writer, 80)
        trackers.tensorboard(None, writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("ddpobs/goodput")] == [(80, 0.5)]
    (text,) = events.Tensors("ddpobs/findings/text_summary")
    assert b"Rank 1 is slow" in text.tensor_proto.string_val[0]


def test_opentelemetry_gets_steps_as_spans_and_findings_as_events(run: Run) -> None:
    with receiver() as (endpoint, spans):
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        trackers.opentelemetry(run, provider)
        provider.shutdown()
    root = next(span for span in spans if not span.parent_span_id)
    assert (root.name, root.start_time_unix_nano, root.end_time_unix_nano) == ("r", BEGAN_NS, BEGAN_NS + 30)
    assert [(event.name, event.time_unix_nano) for event in root.events] == [("Rank 1 is slow", BEGAN_NS + 5)]
    facts = {attribute.key: attribute.value.string_value for attribute in root.events[0].attributes}
    assert facts["ddpobs.cause"] == "its processor"
    assert facts["ddpobs.gain"] == "25 % of a step"
    assert "ddpobs.measure" not in facts
    children = [span for span in spans if span.parent_span_id == root.span_id]
    assert [(span.name, span.end_time_unix_nano - span.start_time_unix_nano) for span in children] == [
        ("step 0", 10),
        ("steps 1 to 4", 20),
    ]
    values = {attribute.key: attribute.value.int_value for attribute in children[1].attributes}
    assert values == {"ddpobs.step": 1} | {f"ddpobs.{phase}_ns": 8 for phase in PHASES}


def test_wandb_gets_a_summary_offline(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb.init(dir=tmp_path, project="p") as active:
        trackers.wandb(run)
        assert (active.summary["ddpobs/goodput"], active.summary["ddpobs/url"]) == (0.5, run.address)
        assert {name: active.summary[name] for name in COUNTERS} == COUNTERS
    wandb.teardown()  # Its service would outlive the tests by seconds.


def test_mlflow_gets_metrics_a_text_and_a_tag(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # A database's migrations take seconds.
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    with mlflow.start_run() as active:
        trackers.mlflow(run)
    stored = mlflow.get_run(active.info.run_id).data
    assert (stored.metrics["ddpobs/goodput"], stored.tags["ddpobs.url"]) == (0.5, run.address)
    assert {name: stored.metrics[name] for name in COUNTERS} == COUNTERS
    assert "Rank 1 is slow" in mlflow.artifacts.load_text(f"{active.info.artifact_uri}/ddpobs.md")
