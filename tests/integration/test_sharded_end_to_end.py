"""A balanced, fully sharded training: its steps and units, and no finding that blames a rank."""

from __future__ import annotations

import httpx
import pytest

from tests.support.integration.sharded import findings, train
from tests.support.integration.slow_ranks import get, stragglers_unless_preempted

pytestmark = pytest.mark.alone
OF_BUCKETS = {"bucket-size", "bucket-order", "compression-pays", "accumulation-pays"}


@pytest.mark.wide
def test_a_training_that_computes_most_of_the_time_is_not_bound_by_communication(url: str) -> None:
    done = train(url, "busy", "busy", steps=30)
    assert done.returncode == 0, done.stderr
    assert get(url, "busy", "/diagnostics")["steps_seen"] == 30
    assert "comm-bound" not in findings(url, "busy")


def test_a_balanced_training_has_steps_and_units_and_no_finding_of_a_rank_or_of_buckets(url: str) -> None:
    done = train(url, "balanced")
    assert done.returncode == 0, done.stderr
    found = findings(url, "balanced")
    assert get(url, "balanced", "/diagnostics")["steps_seen"] == 60
    assert stragglers_unless_preempted(url, "balanced") == []
    assert not {"hang", "crash", "not-reduced", "replicas-differ", *OF_BUCKETS} & set(found), found
    units = {bucket["unit"] for bucket in get(url, "balanced", "/layout")["layouts"][0]["buckets"]}
    assert units == {"(root)", "blocks.0", "blocks.1", "blocks.2"}
    # What shows the run says unit where it says bucket of another.
    picture = get(url, "balanced", "/figures/buckets")
    assert (picture["title"], picture["table"]["columns"][0]) == ("Units", "unit")
    assert "all-gather in backward of unit blocks.1" in {row[0] for row in picture["table"]["rows"]}
    events = get(url, "balanced", "/trace")["traceEvents"]
    assert "reduce-scatter of unit blocks.0" in {event["name"] for event in events}
    assert {"(root)", "blocks.2"} <= {event.get("args", {}).get("unit") for event in events}
    assert 'bucket="reduce-scatter of unit blocks.0"' in httpx.get(f"{url}/metrics").text
