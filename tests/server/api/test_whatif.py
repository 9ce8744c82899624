"""Predictions over HTTP, by the command, and by the client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from ddpobs_server.reports.whatif import saving_in_words
from typer.testing import CliRunner

import ddpobs
from benchmarks.rig.collector import Collector
from ddpobs.cli import main
from ddpobs.whatif.model import Prediction
from ddpobs.whatif.strategies import HOST_NS
from tests.support.analysis.link_scenario import Run
from tests.support.server.batches import assert_problem, batch, get, hello, put
from tests.support.server.whatif_run import MB, RUN, send


def step_ns(run: Run) -> float:
    return float(np.median(run.evidence().joined.step_ns))


@pytest.fixture(scope="module")
def url(shared: Collector) -> str:
    """The address of a collector with the run `whatif`."""
    send(shared.url, "whatif", RUN)
    return shared.url


def answers(url: str, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get(url, "/runs/whatif/whatif", **query)["answers"]
    return found


def test_the_model_and_the_present_step_are_those_of_the_run(url: str) -> None:
    response = get(url, "/runs/whatif/whatif")
    assert response["now"]["step_ns"] == step_ns(RUN)
    assert response["now"]["bucket_bytes"] == [4 * MB, MB]
    assert response["model"]["beta_bytes_per_s"] == pytest.approx(125e6, rel=0.01)
    assert response["missing"] == []


def test_an_answer_for_each_cap_and_strategy(url: str) -> None:
    found = answers(url, bucket_cap_mb="2,25", compression="all_reduce,fp16")
    assert [answer["change"] for answer in found] == [
        f"bucket_cap_mb={cap}, comm='{name}'" for cap in (2, 25) for name in ("all_reduce", "fp16")
    ]
    halved = replace(RUN, sizes=[2 * MB, MB // 2])
    predicted = found[1]["prediction"]
    assert predicted["step_ns"] == pytest.approx(step_ns(halved) + 0.5 * 5 * MB, rel=0.02)
    assert predicted["words"].startswith("saves ")


def test_a_list_of_caps_and_another_link_hold_together(url: str) -> None:
    (answer,) = answers(url, bucket_cap_mb="1:25", first_bucket_mb=0.5, link_gbps=0.5)
    slower = replace(RUN, rate=1 / (16 + HOST_NS))
    assert answer["caps_mb"] == [0.5, 1, 25]
    assert answer["prediction"]["step_ns"] == pytest.approx(step_ns(slower), rel=0.01)
    assert answer["prediction"]["words"].startswith("costs ")


def test_what_the_run_does_not_show_is_refused_with_the_reason(url: str) -> None:
    found = answers(url, bucket_cap_mb="0.5", compression="powersgd")
    assert "do not follow from the gradients' sizes" in found[0]["refused"]
    assert found[0]["prediction"] is None
    (answer,) = answers(url, find_unused="false")
    assert "find_unused_parameters is off" in answer["refused"]


def test_a_run_without_spans_says_what_is_missing(shared: Collector, run: str) -> None:
    evidence = RUN.evidence()
    for rank in range(2):
        put(shared.url, batch(run, rank=rank, hello=hello(), steps=evidence.steps.select(evidence.rank == rank)))
    response = get(shared.url, f"/runs/{run}/whatif", accumulate=4)
    assert (response["model"], response["answers"]) == (None, [])
    assert response["missing"] == ["no layout of buckets is recorded"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"bucket_cap_mb": "five"}, "expected numbers"),
        ({"bucket_cap_mb": "0"}, "expected numbers"),
        ({"bucket_cap_mb": "nan"}, "expected numbers"),
        ({"bucket_cap_mb": ",".join(["1"] * 65)}, "at most 64 answers"),
        ({"link_gbps": 1, "link_factor": 2}, "expected one of"),
        ({"first_bucket_mb": 1}, "expected caps in bucket_cap_mb"),
        ({"halve": "backward"}, "expected a rank in repair"),
        ({"accumulate": 0}, "greater than or equal to 1"),
    ],
)
def test_an_impossible_change_is_a_problem(url: str, query: dict[str, Any], words: str) -> None:
    problem = assert_problem(httpx.get(f"{url}/api/v1/runs/whatif/whatif", params=query), 422)
    assert words in problem["detail"]


def test_the_command_prints_a_line_for_each_change(url: str) -> None:
    def printed(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["whatif", "whatif", *arguments, "--collector", url])
        assert result.exit_code == 0, result.output
        return result.output

    first, *lines = printed("--strategy", "fp16,bf16", "--accumulate", "4").splitlines()
    assert first == "whatif: 55.2 ms a step now"
    assert [line.split("  ")[1] for line in lines] == [f"comm='{name}', 4 batches a step" for name in ("fp16", "bf16")]
    assert all("saves " in line for line in lines)
    assert "a link 2 times as fast" in printed("--link", "2x")
    assert "bucket_cap_mb" in printed()
    assert "not known, because the own time of rank 9 is not recorded" in printed("--repair", "9")


def test_the_client_returns_the_response(url: str) -> None:
    response = ddpobs.Client(url).run("whatif").whatif(accumulate=4, find_unused=None)
    assert response["answers"][0]["change"] == "4 batches a step"
    assert "a batch" in response["answers"][0]["prediction"]["words"]


@pytest.mark.parametrize(
    ("step_ns", "words"),
    [(100_010, "no difference seen: ± 5.0 %"), (102_000, "no difference seen: 2.0 % more, ± 5.0 %")],
)
def test_a_change_that_is_not_seen_has_its_error_and_no_share_of_nothing(step_ns: float, words: str) -> None:
    none = np.zeros(0)
    now_ns, error_ns = 100_000, 5_000
    ends = step_ns - error_ns, step_ns + error_ns
    assert saving_in_words(Prediction(step_ns, *ends, now_ns, 0, none, none, none, none)) == words
