"""The collector's own metrics."""

from __future__ import annotations

from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families


def metrics(url: str, only: str = "collector", **headers: str) -> Callable[..., float]:
    """Read /metrics; return a function from a sample's name (without prefix) and labels to its value."""
    answer = httpx.get(f"{url}/metrics", params={"only": only}, headers=headers)
    assert answer.status_code == 200, answer.text
    samples = [s for family in text_string_to_metric_families(answer.text) for s in family.samples]

    def value(name: str, **labels: str) -> float:
        values = [s.value for s in samples if s.name == f"ddpobs_server_{name}" and labels.items() <= s.labels.items()]
        assert len(values) == 1, f"{name} {labels}: {values}"
        return values[0]

    return value
