"""A scrape formats the ranks whose values have changed. Its text is that of the first scrape of a new collector."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from ddpobs_server.metrics import metric
from ddpobs_server.metrics.scrape import RunRenderer
from ddpobs_server.reports.reports import Reports
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store
from prometheus_client import generate_latest

from ddpobs import wire
from tests.support.server.batches import batch, hello, layout, pulse, spans, steps
from tests.support.server.peers import peers

RANKS = 3 * metric._BLOCK_RANKS
NOW_NS = 2 * 10**18

pytestmark = pytest.mark.usefixtures("no_time_passes")


@pytest.fixture
def renderer(store: Store, monkeypatch: pytest.MonkeyPatch) -> RunRenderer:
    """Renders the runs of the store, without findings."""
    monkeypatch.setattr("ddpobs_server.metrics.scrape.time.time_ns", lambda: NOW_NS)
    monkeypatch.setattr(Reports, "recent_diagnostics", lambda _, runs: [None] * len(runs))
    return RunRenderer(Settings(), store, Reports(store))


def scrape(renderer: RunRenderer, store: Store) -> str:
    """The text, which equals that of a new renderer with a new store."""
    text = renderer.render("default", generate_latest).text
    other = Store(store._engine.url.render_as_string(hide_password=False))
    try:
        assert RunRenderer(Settings(), other, Reports(other)).render("default", generate_latest).text == text
    finally:
        other.close()
    return text.decode()


@pytest.fixture
def formatted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Metric and ranks of each block that was formatted since."""
    blocks: list[tuple[str, tuple[int, ...]]] = []
    text = metric.RankMetric._text

    def record(self: metric.RankMetric[Any], run: str, block: metric.Block) -> bytes:
        blocks.append((block[0], block[2]))
        return text(self, run, block)

    monkeypatch.setattr(metric.RankMetric, "_text", record)
    return blocks


def send(store: Store, *batches: wire.Batch) -> None:
    arrivals = []
    for sent in batches:
        body = wire.encode(sent)
        arrivals.append(Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), NOW_NS))
    store.ingest(arrivals)


def sent(run: str, seq: int, rank: int, **fields: Any) -> wire.Batch:
    return batch(run, seq, rank, world_size=1000, **fields)


def fill(store: Store, run: str, ranks: int) -> None:
    records: dict[str, Any] = {"hello": hello(), "layouts": [layout()], "steps": steps(0, 9), "spans": spans(0, 9)}
    send(store, *(sent(run, 0, rank, **records) for rank in range(ranks)))


def sample(text: str, series: str) -> float:
    (line,) = (line for line in text.splitlines() if line.startswith(f"ddpobs_{series} "))
    return float(line.rpartition(" ")[2])


def test_the_text_after_any_change_is_that_of_a_new_collector(store: Store, renderer: RunRenderer) -> None:
    for run, ranks in (("wide", RANKS), ("small", 2)):
        fill(store, run, ranks)
    scrape(renderer, store)
    changes = (
        sent("wide", 1, 5, pulse=pulse("code")),
        sent("wide", 2, 5, dropped=7),
        sent("wide", 3, RANKS - 1, steps=steps(9, 3), spans=spans(9, 3)),
        sent("wide", 4, 0, steps=steps(9, 90), peers=[peers(0, 9)]),
        sent("wide", 5, RANKS, steps=steps(0, 1)),
        sent("wide", 6, 3, source="f" * 16, dropped=1),
        sent("small", 7, 1, steps=steps(9, 1)),
        sent("wide", 8, 0, attempt="b" * 16, source="b" * 16, anchor=wire.Anchor(wall_ns=NOW_NS, monotonic_ns=0)),
    )
    texts = []
    for change in changes:
        send(store, change)
        texts.append(scrape(renderer, store))
    assert sample(texts[1], 'telemetry_dropped_total{rank="5",run="wide"}') == 7
    assert sample(texts[2], f'steps_total{{rank="{RANKS - 1}",run="wide"}}') == 12
    assert sample(texts[3], 'straggler_steps_total{phase="data",rank="1",run="wide"}') == 0
    assert sample(texts[4], f'last_step{{rank="{RANKS}",run="wide"}}') == 0
    assert sample(texts[5], 'steps_total{rank="3",run="wide"}') == 9
    assert sample(texts[5], 'telemetry_dropped_total{rank="3",run="wide"}') == 1
    assert sample(texts[5], 'last_step{rank="3",run="wide"}') == 8
    assert sample(texts[6], 'steps_total{rank="1",run="small"}') == 10
    assert 'steps_total{rank="5",run="wide"}' not in texts[7]


def test_only_blocks_of_ranks_with_a_change_are_formatted(
    store: Store, renderer: RunRenderer, formatted: list[tuple[str, tuple[int, ...]]]
) -> None:
    fill(store, "wide", RANKS)
    renderer.render("default", generate_latest)
    assert formatted.count(("steps", tuple(range(64)))) == 1
    for change, changed in (
        (sent("wide", 1, 5, pulse=pulse("code")), set()),
        (sent("wide", 2, 5, dropped=1), {("telemetry_dropped", tuple(range(64)))}),
    ):
        formatted.clear()
        send(store, change)
        renderer.render("default", generate_latest)
        assert set(formatted) == changed
    formatted.clear()
    send(store, sent("wide", 3, 100, steps=steps(9, 1)))
    renderer.render("default", generate_latest)
    assert {ranks for _, ranks in formatted} == {tuple(range(64, 128))}
