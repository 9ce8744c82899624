"""The link of steps whose transfers move at once: measured ones, and known ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddpobs.whatif import link_of_step
from ddpobs.whatif.link import Floats, Link
from ddpobs.whatif.link_of_step import links_of_steps
from ddpobs.whatif.replay import replay
from tests.support.whatif import MS, moving_ns

SIZES = 1e6 * np.array([8.196, 31.502, 28.357, 26.288, 7.885])
READY_NS = MS * np.array([0.0, 28.666, 56.232, 138.856, 251.652])


def links(ready_ns: Floats, done_ns: Floats, moved_ns: Floats, sizes: Floats) -> tuple[Link, Link]:
    """Return the links of one step."""
    return links_of_steps(ready_ns[None], done_ns[None], moved_ns[None], sizes)


def replayed(link: Link, ready_ns: Floats, sizes: Floats) -> tuple[Link, Link]:
    timeline = replay(ready_ns, sizes, link)
    return links(ready_ns, timeline.done_ns, moving_ns(timeline), sizes)


def test_a_bucket_that_ends_late_beside_a_larger_one_shows_no_latency() -> None:
    """ResNet-50 with default buckets, two ranks, gloo on links of 1 Gbit/s: medians of 28 steps."""
    done_ns = MS * np.array([101.851, 554.731, 571.699, 858.728, 705.838])
    moved_ns = MS * np.array([101.814, 451.786, 16.793, 151.983, 133.773])
    least, most = links(READY_NS, done_ns, moved_ns, SIZES)
    assert (least.in_flight, least.alpha_ns) == (2, 0)
    assert least.beta_ns == pytest.approx(8.4, abs=0.05)
    assert most.alpha_ns < 10 * MS


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("alpha_ms", [0.0, 2.0, 20.0])
def test_the_link_is_found_by_which_the_transfers_were_made(alpha_ms: float, in_flight: int) -> None:
    link = Link(alpha_ms * MS, 8.0, is_separated=True, in_flight=in_flight)
    for found in replayed(link, READY_NS, SIZES):
        assert found.in_flight == in_flight
        assert found.alpha_ns == pytest.approx(link.alpha_ns, abs=0.5 * MS)
        assert found.beta_ns == pytest.approx(8.0, rel=0.01)


def test_one_size_does_not_separate_latency_from_bandwidth() -> None:
    least, most = replayed(Link(2 * MS, 8.0, is_separated=True), READY_NS, np.full(5, 1e7))
    assert least == most
    assert (least.alpha_ns, least.is_separated) == (0, False)
    assert least.beta_ns == pytest.approx(8.2, rel=0.01)
    small = replayed(Link(2 * MS, 8.0, is_separated=True), READY_NS, np.full(5, 1e4))[0]
    assert (small.beta_ns, small.is_separated) == (0, False)
    assert small.alpha_ns == pytest.approx(2.08 * MS, rel=0.01)


def test_one_larger_bucket_alone_does_not_separate_latency_from_bandwidth() -> None:
    """BERT-base with buckets of 25 MB, two ranks, gloo on links of 1 Gbit/s: medians of 32 steps on a busy machine.

    The embedding moves after backward, beside no computation. With 336 ms of latency the replay fits best.
    """
    sizes = 1e6 * np.array([28.4] * 12 + [97.7])
    ready_ns = MS * np.array([0, 199, 394, 604, 815, 978, 1076, 1256, 1327, 1421, 1563, 1771, 2054.0])
    done_ns = MS * np.array([394, 695, 951, 1235, 1581, 1756, 1961, 2154, 2258, 2369, 2661, 2920, 3763.0])
    moved_ns = MS * np.array([478, 293, 342, 244, 298, 239, 288, 195, 288, 205, 273, 209, 753.0])
    least, most = links(ready_ns, done_ns, moved_ns, sizes)
    assert least == most
    assert (least.alpha_ns, least.is_separated) == (0, False)


def test_of_many_buckets_the_first_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 64
    monkeypatch.setattr(link_of_step, "_MAX_BUCKETS", most)
    counts = []

    def counted(ready_ns: Floats, sizes: Floats, link: Link) -> object:
        counts.append(len(sizes))
        return replay(ready_ns, sizes, link)

    monkeypatch.setattr(link_of_step, "replay", counted)
    link = Link(0.3 * MS, 8.0, is_separated=True, in_flight=2)
    sizes = 1e5 * (1 + np.arange(1000.0) % 7)
    found = replayed(link, MS * np.arange(1000.0), sizes)[0]
    assert set(counts) == {most}
    assert found.beta_ns == pytest.approx(8.0, rel=0.05)
    assert replace(found, alpha_ns=0.0, beta_ns=0.0) == replace(link, alpha_ns=0.0, beta_ns=0.0)
