"""Values of the runs' metrics, and their entry in the guide."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import numpy as np

from ddpobs import wire
from tests.collector import Collector
from tests.server.batches import batch, put, steps


def peers(first: int, last: int) -> wire.Peers:
    """Rank 1 is late by 3 ns in each of these steps."""
    count = last - first + 1
    columns = dict.fromkeys(wire.Peers.__struct_fields__[3:], np.zeros(2, np.int64))
    columns |= {"rank": np.arange(2), "delay_ns": np.array([0, 3 * count]), "wait_ns": np.array([3 * count, 0])}
    return wire.Peers(first_collective=first, last_collective=last, steps=count, **columns)


def test_delay_and_waiting_have_the_number_of_steps_they_cover(shared: Collector) -> None:
    put(shared.url, batch("fast", seq=0, steps=steps(0, 40), peers=[peers(30, 39)]))
    put(shared.url, batch("fast", seq=1, steps=steps(40, 40), peers=[peers(60, 79)]))
    text = httpx.get(f"{shared.url}/metrics", params={"only": "runs"}).text
    for rank in (0, 1):
        assert f'ddpobs_compared_steps_total{{rank="{rank}",run="fast"}} 30\n' in text
    assert 'ddpobs_steps_total{rank="0",run="fast"} 80\n' in text
    assert 'ddpobs_rank_delay_seconds_total{rank="1",run="fast"} 9e-08\n' in text
    assert 'ddpobs_comm_wait_seconds_total{rank="0",run="fast"} 9e-08\n' in text


def test_every_metric_of_runs_is_in_the_guide(shared: Collector) -> None:
    guide = (Path(__file__).resolve().parents[3] / "docs" / "diagnostics.md").read_text()
    text = httpx.get(f"{shared.url}/metrics", params={"only": "runs"}).text
    families = re.findall(r"^# TYPE ddpobs_(\w+)", text, re.MULTILINE)
    assert "compared_steps_total" in families
    assert [name for name in families if f"`{name}`" not in guide] == []
