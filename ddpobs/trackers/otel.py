"""A run as an OpenTelemetry trace: steps as spans, findings as events."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import ddpobs
from ddpobs.client.client import Run
from ddpobs.shared.words import finding_parts
from ddpobs.wire import PHASES


def opentelemetry(
    run: Run | None, provider: Any = None, *, rank: int = 0, first: int | None = None, last: int | None = None
) -> None:
    """Emit one span for the run, a child span for each step, and an event for each finding.

    Args:
        run: The run; None is ignored.
        provider: Tracer provider with the exporter; None for the global one.
        rank: Rank whose steps are emitted.
        first: First step; None for the run's.
        last: Last step; None for the run's.
    """
    if run is None:
        return
    trace = import_module("opentelemetry.trace")
    tracer = trace.get_tracer("ddpobs", ddpobs.__version__, tracer_provider=provider)
    steps = run.step_times(rank, first, last)
    if not steps.rows:
        return
    began_ns, ended_ns = int(steps["began_ns"][0]), int(steps["ended_ns"][-1])
    root = tracer.start_span(
        run.name, start_time=began_ns, attributes={"ddpobs.run": run.name, "ddpobs.rank": rank, "url.full": run.address}
    )
    for finding in run.findings(first, last):
        times = [interval["began_ns"] for interval in finding["intervals"] if interval["began_ns"] is not None]
        root.add_event(finding["verdict"], _attributes(finding), timestamp=min(times, default=ended_ns))
    context = trace.set_span_in_context(root)
    rows = {name: steps[name].tolist() for name in steps}
    for row in range(steps.rows):
        phases = {f"ddpobs.{phase}_ns": rows[f"{phase}_median_ns"][row] for phase in PHASES}
        begin, end = rows["first"][row], rows["last"][row]
        span = tracer.start_span(
            f"step {begin}" if begin == end else f"steps {begin} to {end}",
            context,
            start_time=rows["began_ns"][row],
            attributes={"ddpobs.step": begin, **phases},
        )
        span.end(rows["ended_ns"][row])
    root.end(ended_ns)


def _attributes(finding: dict[str, Any]) -> dict[str, Any]:
    facts = {name: finding[name] for name in ("code", "severity", "ranks", "buckets", "parameters")}
    return {f"ddpobs.{name}": value for name, value in (facts | finding_parts(finding)).items()}
