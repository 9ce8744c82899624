"""Families of the runs' metrics: names, help texts and the format of their lines.

No metric has both a rank and a bucket label: there would be too many series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

END = b"# EOF\n"
"""Last line of OpenMetrics; it must appear once, after all families."""
Render = Callable[[CollectorRegistry], bytes]
Families = dict[str, bytes]
"""Lines of a run by family."""
_RANK, _HANG = ("rank", "run"), ("place", "ranks", "run")
_FINDING = ("code", "phase", "ranks", "run", "severity")
# Labels are in alphabetical order, as prometheus_client writes them.
_COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("steps", "Steps finished.", _RANK),
    ("phase_seconds", "Time by phase; the phases of a step add up to its wall time.", ("phase", *_RANK)),
    ("comm_seconds", "Time with communication in progress.", _RANK),
    ("comm_exposed_seconds", "Communication that backward did not hide.", _RANK),
    ("comm_wait_seconds", "Time spent waiting for the last rank.", _RANK),
    ("allreduce_bytes", "Bytes of gradient buckets reduced.", _RANK),
    ("bucket_ready_seconds", "From the previous bucket's readiness to this one's.", ("bucket", "run")),
    ("bucket_comm_seconds", "From launch to completion.", ("bucket", "run")),
    ("bucket_exposed_seconds", "Communication after the step's last gradient.", ("bucket", "run")),
    (
        "compared_steps",
        "Steps in which the ranks were compared; delay, waiting and lateness are counted over these.",
        _RANK,
    ),
    ("rank_delay_seconds", "Delay that this rank caused while it was last.", _RANK),
    ("straggler_steps", "Steps in which this rank was last by more than a tenth of the step.", ("phase", *_RANK)),
    ("telemetry_dropped", "Records lost before they reached the collector.", _RANK),
)
_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("run_info", "1; the run's facts are labels.", ("attempt", "backend", "device", "run", "torch", "world_size")),
    ("bucket_bytes", "Size of a bucket.", ("bucket", "run")),
    ("unused_parameters", "Parameters without a gradient on some rank.", ("run",)),
    ("last_step", "Number of the last step.", _RANK),
    ("last_step_timestamp_seconds", "Time at which the collector received the last step, Unix time.", _RANK),
    ("findings", "Findings by code and severity.", ("code", "run", "severity")),
    ("finding_gain_ratio", "Gain that a finding predicts, as a share of the step or run; 0 if none.", _FINDING),
    ("goodput_ratio", "Time in steps that no restart repeated, as a share of the run's wall time.", ("run",)),
    ("time_share_ratio", "Share of a group of the account in the run's wall time.", ("group", "run")),
    ("run_state", "1; the run's state is a label.", ("run", "state")),
    ("hang_info", "1 while the run hangs; the ranks that the others wait for and their place are labels.", _HANG),
)
DURATIONS = "step_duration_seconds"


def _formats() -> dict[str, str]:
    formats = {}
    for suffix, families in (("_total", _COUNTERS), ("", _GAUGES)):
        for name, _, labels in families:
            pairs = ",".join(f'{label}="%s"' for label in labels)
            formats[name] = f"ddpobs_{name}{suffix}{{{pairs}}} %r\n"
    return formats


FORMATS = _formats()
"""Line of each family: its labels and the value. prometheus_client takes ten times as long to format a line."""


@cache
def headers(render: Render) -> dict[str, bytes]:
    """Help and type of each family in the requested format, in the order of the answer."""
    by_name = {}
    for kind, families in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
        for name, help_text, labels in families:
            by_name[name] = _render_family(render, kind(f"ddpobs_{name}", help_text, labels=labels))
    durations = HistogramMetricFamily(f"ddpobs_{DURATIONS}", "Wall time of steps, all ranks.", labels=["run"])
    return by_name | {DURATIONS: _render_family(render, durations)}


class _SingleFamily(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    @override
    def collect(self) -> Iterable[Metric]:
        return [self._family]


def _render_family(render: Render, family: Metric) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SingleFamily(family))
    return render(registry).removesuffix(END)
