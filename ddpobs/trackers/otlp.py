"""A run as OTLP over HTTP: spans and metrics, with the run and the rank as attributes of the resource.

Attributes have ddpobs' names and, beside them, those of NVIDIA's NeMo Lens (`nv.dl.`), as Megatron Core documents them.
Goodput and badput have the names of Google's ml-goodput-measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import ddpobs
from ddpobs.client.client import Run
from ddpobs.errors import CollectorError
from ddpobs.trackers.goodput_names import GOODPUT, times_by_name
from ddpobs.trackers.otel import opentelemetry

_SPANS = 512
"""Spans of a request, as in OpenTelemetry's own batches."""
_NS_PER_S = 1e9


def otlp(
    run: Run | None,
    endpoint: str,
    *,
    ranks: Sequence[int] = (0,),
    first: int | None = None,
    last: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a run to a receiver of OTLP over HTTP: metrics of the run, and of each rank spans and metrics.

    Args:
        run: The run; None is ignored.
        endpoint: Address of the receiver without `/v1/…`, such as `http://localhost:4318`.
        ranks: Ranks whose steps are sent.
        first: First step; None for the run's.
        last: Last step; None for the run's.
        headers: Further headers of the requests, such as a token.

    Raises:
        CollectorError: The collector does not answer, or the receiver does not accept the data.
    """
    if run is None:
        return
    summary, account = run.summary(), run.account()
    target = _Target(endpoint.rstrip("/"), dict(headers or {}))
    of_run = {
        "service.name": "ddpobs",
        "service.version": ddpobs.__version__,
        "ddpobs.run": run.name,
        "ddpobs.attempt": summary["attempt"],
        "nv.dl.run.uuid": summary["attempt"],
        "nv.dl.world_size": summary["world_size"],
        "nv.dl.role": "trainer",
    }
    target.send_metrics(of_run, [*_run_metrics(account), *_finding_counts(run.findings(first, last))])
    times_ns = _rank_times_ns(account)
    for rank in ranks:
        of_rank = of_run | {
            "service.instance.id": f"{summary['attempt']}-{rank}",
            "ddpobs.rank": rank,
            "nv.dl.rank": rank,
        }
        target.send_spans(of_rank, run, rank, (first, last))
        points = [(ns / _NS_PER_S, {"ddpobs.part": part}) for part, ns in times_ns.get(rank, {}).items()]
        target.send_metrics(of_rank, [("ddpobs.rank.time", "s", points)])


_Metric = tuple[str, str, list[tuple[float, dict[str, Any]]]]
"""Name, unit, and values with their attributes."""


def _run_metrics(account: Mapping[str, Any]) -> list[_Metric]:
    """Return goodput, and the wall time by category: rank time divided by the ranks. Empty if it is not known."""
    if account["goodput"] is None or not account["wall_ns"]:
        return []
    wall_s = account["wall_ns"] / _NS_PER_S
    times_s = times_by_name({part["part"]: part["share"] * wall_s for part in account["parts"]})
    badput = [(time_s, {"badput_source": name}) for name, time_s in times_s.items() if name != GOODPUT]
    return [
        ("ddpobs.goodput", "1", [(account["goodput"], {})]),
        ("goodput_time", "s", [(times_s.get(GOODPUT, 0.0), {"goodput_source": GOODPUT})]),
        ("badput_time", "s", badput),
    ]


def _finding_counts(findings: Sequence[Mapping[str, Any]]) -> list[_Metric]:
    counts = Counter((finding["code"], finding["severity"]) for finding in findings)
    points = [(float(n), {"ddpobs.code": code, "ddpobs.severity": level}) for (code, level), n in counts.items()]
    return [("ddpobs.findings", "1", points)]


def _rank_times_ns(account: Mapping[str, Any]) -> dict[int, dict[str, int]]:
    attempt = next((known for known in account["attempts"] if known["attempt"] == account["attempt"]), None)
    return {rank["rank"]: rank["parts_ns"] or {} for rank in attempt["ranks"]} if attempt else {}


class _Target:
    """A receiver. Each request is checked: the SDK's own processors drop what a receiver refuses, and only log it."""

    def __init__(self, endpoint: str, headers: dict[str, str]) -> None:
        self._endpoint, self._headers = endpoint, headers

    def send_spans(self, resource: dict[str, Any], run: Run, rank: int, bounds: tuple[int | None, int | None]) -> None:
        sdk, export = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.trace.export")
        memory = import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
        provider = sdk.TracerProvider(resource=_resource(resource), sampler=_always())
        provider.add_span_processor(export.SimpleSpanProcessor(memory))
        opentelemetry(run, provider, rank=rank, first=bounds[0], last=bounds[1])
        otlp_exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter
        exporter = otlp_exporter(f"{self._endpoint}/v1/traces", headers=self._headers)
        spans = memory.get_finished_spans()
        for start in range(0, len(spans), _SPANS):
            self._check(exporter.export(spans[start : start + _SPANS]))
        exporter.shutdown()

    def send_metrics(self, resource: dict[str, Any], metrics: Sequence[_Metric]) -> None:
        sdk, export = import_module("opentelemetry.sdk.metrics"), import_module("opentelemetry.sdk.metrics.export")
        reader = export.InMemoryMetricReader()
        meter = sdk.MeterProvider([reader], resource=_resource(resource)).get_meter("ddpobs", ddpobs.__version__)
        for name, unit, points in metrics:
            gauge = meter.create_gauge(name, unit)
            for value, attributes in points:
                gauge.set(value, attributes)
        data = reader.get_metrics_data()
        if data is None:  # No metric has a value.
            return
        otlp_exporter = import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter").OTLPMetricExporter
        exporter = otlp_exporter(f"{self._endpoint}/v1/metrics", headers=self._headers)
        self._check(exporter.export(data))
        exporter.shutdown()

    def _check(self, result: Any) -> None:
        if result.name != "SUCCESS":
            message = f"{self._endpoint} does not accept OTLP over HTTP: expected a receiver there, see its log"
            raise CollectorError(message, self._endpoint)


def _resource(attributes: dict[str, Any]) -> Any:
    return import_module("opentelemetry.sdk.resources").Resource(attributes)


def _always() -> Any:
    """A sampler that keeps every span, whatever OTEL_TRACES_SAMPLER says."""
    return import_module("opentelemetry.sdk.trace.sampling").ALWAYS_ON
