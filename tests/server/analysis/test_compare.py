"""Two runs compared: changes are found, noise is not, and too few steps are stated."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from ddpobs_server.analysis.comparison.compare import Change, Comparison, RunTimes, Verdict, compare
from ddpobs_server.analysis.comparison.facts import (
    differences,
    facts_of,
    findings_that_changed,
    of_one_model,
    same_buckets,
)
from ddpobs_server.analysis.comparison.words import change_words, headline, limit_words, not_the_same_job
from ddpobs_server.analysis.statistics.dependent_mean import dependent_mean

from ddpobs import wire

Floats = npt.NDArray[np.float64]
MS = 1e6
BASE_MS = {"data": 5.0, "forward": 20.0, "backward": 40.0, "exposed_comm": 10.0, "optimizer": 8.0, "other": 2.0}


def series(count: int, seed: int, memory: float = 0.8) -> Floats:
    """Values around 1, a twentieth of it apart, each like the one before."""
    random = np.random.default_rng(seed)
    values = np.zeros(count + 100)
    for index, shock in enumerate(random.normal(size=count + 100)):
        values[index] = memory * values[index - 1] + shock
    return np.asarray(1 + 0.05 * np.sqrt(1 - memory**2) * values[100:])


def times(seed: int, count: int = 1500, slower: dict[str, float] | None = None) -> RunTimes:
    """A run; `slower` has factors of phases."""
    phases = {
        phase: (slower or {}).get(phase, 1.0) * ms * MS * series(count, 10 * seed + index)
        for index, (phase, ms) in enumerate(BASE_MS.items())
    }
    step_ns = np.sum(list(phases.values()), axis=0)
    return RunTimes(np.arange(count), step_ns, phases, np.zeros(count))


def change(result: Comparison, name: str) -> Change:
    return next(change for change in result.changes if change.name == name)


def verdicts(result: Comparison) -> dict[str, str]:
    return {change.name: change.verdict for change in result.changes if change.kind in ("step", "phase")}


def test_a_slower_phase_is_found_with_its_amount_and_the_others_are_not() -> None:
    result = compare(times(1), times(2, slower={"backward": 1.05}))
    assert verdicts(result) == dict.fromkeys(BASE_MS, "same") | {"step": "slower", "backward": "slower"}
    backward = change(result, "backward")
    assert backward.low_ns < 2 * MS < backward.high_ns
    assert result.exceeded(0.01) == ["step", "backward"]
    assert result.exceeded(0.1) == []
    assert result.is_decided(0.1)


def test_equal_runs_differ_in_nothing_and_the_smallest_visible_change_is_stated() -> None:
    result = compare(times(1), times(2))
    assert set(verdicts(result).values()) == {"same"}
    assert result.exceeded(0.0) == []
    step = change(result, "step")
    assert 0 < step.smallest_ns < 0.03 * step.a_ns
    longer = change(compare(times(1, 6000), times(2, 6000)), "step")
    assert 1.4 < step.smallest_ns / longer.smallest_ns < 2.8  # The error falls with the root of the steps.


def test_a_phase_that_loses_what_another_gains_exceeds_no_limit() -> None:
    result = compare(times(1), times(2, slower={"backward": 1.1, "forward": 0.8}))
    assert (verdicts(result)["backward"], verdicts(result)["step"]) == ("slower", "same")
    assert result.exceeded(0.03) == []


def test_few_steps_decide_a_large_change_alone() -> None:
    result = compare(times(1, 60), times(2, 60, slower=dict.fromkeys(BASE_MS, 2.2)))
    step = change(result, "step")
    assert (step.verdict, result.too_few) == ("slower", "")
    assert result.exceeded(0.03)[0] == "step"
    assert result.is_decided(0.03)
    assert headline("after", result).startswith("after is slower by 2.2× (1.")
    assert step.high_ns - step.low_ns > 0.3 * step.b_ns  # Wider than that of many steps.
    small = compare(times(1, 60), times(2, 60, slower=dict.fromkeys(BASE_MS, 1.1)))
    assert (verdicts(small)["step"], small.exceeded(0.03), small.is_decided(0.03)) == ("too-few", [], False)
    assert "are too few for this difference: about" in small.too_few


def test_a_limit_is_undecided_only_if_the_interval_spans_it() -> None:
    result = compare(times(1, 60), times(2, 60, slower=dict.fromkeys(BASE_MS, 1.1)))
    assert re.fullmatch(
        r"not decided, the interval of the step spans it: -\d+\.\d to \+\d\d\.\d %", limit_words(result, 0.03)
    )
    assert (limit_words(result, 0.9), result.is_decided(0.9)) == ("kept", True)
    short = compare(times(1, 25), times(2, 25))
    assert limit_words(short, 0.9) == "not decided, too few steps"


def test_a_large_change_of_a_phase_is_decided_although_that_of_the_step_is_not() -> None:
    result = compare(times(1, 60), times(2, 60, slower={"forward": 2.5, "backward": 0.4}))
    assert {name: verdicts(result)[name] for name in ("step", "forward", "backward", "data")} == {
        "step": "too-few",
        "forward": "slower",
        "backward": "faster",
        "data": "too-few",
    }
    assert result.exceeded(0.03) == []


def test_very_few_steps_are_not_judged() -> None:
    result = compare(times(1, 25), times(2, 25, slower=dict.fromkeys(BASE_MS, 5.0)))
    assert verdicts(result)["step"] == "too-few"
    assert (result.exceeded(0.03), result.is_decided(0.03)) == ([], False)
    assert headline("after", result).endswith("but 15 and 15 typical steps are too few: 20 of each run are needed")
    assert compare(times(1, 5), times(2)).changes[0].verdict == "too-few"


@pytest.mark.parametrize("memory", [0.0, 0.8, 0.95])
def test_equal_runs_of_few_dependent_steps_seldom_differ(memory: float) -> None:
    def run(seed: int) -> RunTimes:
        step_ns = 100 * MS * series(70, seed, memory) ** 3
        return RunTimes(np.arange(70), step_ns, dict.fromkeys(BASE_MS, step_ns / 6), np.zeros(70))

    wrong = sum(
        compare(run(seed), run(seed + 1)).changes[0].verdict in ("slower", "faster") for seed in range(0, 80, 2)
    )
    assert wrong <= 2


@pytest.mark.parametrize(
    ("b_ms", "low_ms", "high_ms", "verdict", "words"),
    [
        (309, 264, 348, "slower", "slower by 2.2× (1.9 to 2.5)"),
        (145, 144, 146, "slower", "slower by 4.3 % (3.6 to 5.0 %)"),
        (70, 60, 80, "faster", "faster by 50 % (42 to 57 %)"),
        (139, 138, 140, "same", "no difference seen, and one of 1.4 % would have been"),
        (200, 100, 400, "same", "1.4× (0.7 to 2.9), not decided: it may be faster or slower"),
        (200, 100, 400, "too-few", "1.4× (0.7 to 2.9), not decided: it may be faster or slower"),
        (930, 1, 99_000, "too-few", "6.7× (0.007 to 712), not decided: it may be faster or slower"),
        (9, 0, 10**9, "too-few", "0.06× (under 0.001 to over 1,000), not decided: it may be faster or slower"),
        (200, 150, 400, "too-few", "1.4× (1.1 to 2.9), not decided: too few steps"),
        (0, 0, 0, "too-few", "not decided: too few steps"),
    ],
)
def test_a_change_in_words(b_ms: float, low_ms: float, high_ms: float, verdict: Verdict, words: str) -> None:
    step = Change("step", "step", 139, b_ms, low_ms - 139, high_ms - 139, 2 if high_ms < 390 else 261, verdict)
    assert change_words(step) == words


def test_a_headline_of_noisy_steps_decides_nothing() -> None:
    step = Change("step", "step", 20 * MS, 30 * MS, -10 * MS, 40 * MS, 30 * MS, "same")
    noisy = Comparison([step], (500, 500), (0, 0), "")
    assert headline("b", noisy) == "Not decided: 20.0 → 30.0 ms a step, 1.5× (0.5 to 3.0): it may be faster or slower"


def test_long_steps_and_the_first_steps_are_compared_apart() -> None:
    run = times(2)
    spikes = np.zeros(1500)
    spikes[:10], spikes[50::50] = 5000 * MS, 2000 * MS
    result = compare(times(1), replace(run, step_ns=run.step_ns + spikes))
    assert verdicts(result)["step"] == "same"
    assert (result.steps, result.long_steps) == ((1490, 1461), (0, 29))
    cost = change(result, "long steps")
    assert (cost.verdict, round(cost.b_ns / MS)) == ("too-few", 39)  # The first run has none to compare with.


def test_a_change_that_other_programs_may_explain_decides_nothing() -> None:
    slow = times(2, slower=dict.fromkeys(BASE_MS, 1.5))
    result = compare(times(1), replace(slow, run_delay_ns=np.full(1500, 30 * MS)))
    assert (result.is_disturbed, result.is_decided(0.03)) == (True, False)
    assert compare(times(1), slow).is_decided(0.03)


def test_the_error_of_dependent_values_is_about_that_of_repeated_runs() -> None:
    runs = [series(500, seed) for seed in range(100, 160)]
    actual = float(np.std([values.mean() for values in runs]))
    estimated = float(np.median([dependent_mean(values).error for values in runs]))
    assert 0.75 * actual < estimated < 1.5 * actual
    independent = float(np.median([values.std() / np.sqrt(500) for values in runs]))
    assert estimated > 2 * independent


@pytest.mark.parametrize("values", [np.ones(100), np.zeros(50)])
def test_constant_values_have_no_error(values: Floats) -> None:
    mean = dependent_mean(values)
    assert (mean.mean, mean.error, mean.block_length) == (values[0], 0.0, 1.0)


def layout(*buckets: list[str], revision: int = 0) -> wire.Layout:
    return wire.Layout(
        module=0,
        name="model",
        revision=revision,
        comm="all_reduce",
        buckets=[
            wire.Bucket(
                size_bytes=4 * len(names), dtype="float32", parameters=[wire.Parameter(name=n, size=1) for n in names]
            )
            for names in buckets
        ],
    )


def test_settings_versions_and_the_latest_layout_that_differ_are_listed() -> None:
    hello = wire.Hello(host="n", pid=1, device="cpu", backend="gloo", versions={"torch": "2.11"}, settings={"cap": 25})
    other = msgspec.structs.replace(hello, settings={"cap": 1, "tags": "x"}, host="m")
    a = facts_of(hello, [layout(["a"], ["b"]), layout(["a", "b"], revision=1)])
    rows = differences(a, facts_of(other, [layout(["a"], ["b"])]))
    assert [(row.name, row.a, row.b) for row in rows if "mb" not in row.name and "bytes" not in row.name] == [
        ("settings.cap", 25, 1),
        ("layout.model.buckets", 1, 2),
    ]
    assert differences(a, a) == []


def test_another_model_or_number_of_ranks_is_not_the_same_job() -> None:
    world = {"world_size": 2, "settings.group_ranks": 2}
    a, b = world | facts_of(None, [layout(["a"], ["b"])]), world | facts_of(None, [layout(["a", "b"])])
    assert not_the_same_job("a", "b", differences(a, b)) == ""  # Other buckets of the same model.
    other = facts_of(None, [layout(["a"], ["b"], ["c"])]) | {"world_size": 4, "settings.group_ranks": 4}
    rows = differences(a, other)
    assert "settings.group_ranks" not in [row.name for row in rows]
    assert not_the_same_job("a", "b", rows) == (
        "Not the same job: 2 ranks in a, 4 in b; model has 8 bytes of gradients in a, 12 in b"
    )
    renamed = facts_of(None, [msgspec.structs.replace(layout(["a"], ["b"]), name="Other")])
    assert not_the_same_job("a", "b", differences(a, world | renamed)) == (
        "Not the same job: model model in a, Other in b"
    )


def test_different_models_are_in_one_row() -> None:
    one = facts_of(None, [layout(["a"], ["b"])])
    other = facts_of(None, [msgspec.structs.replace(layout(["a"], ["b"], ["c"]), name="a.Other")])
    rows = differences(*of_one_model(one, other))
    assert [(row.name, row.a, row.b) for row in rows if "mb" not in row.name] == [
        ("layout.model.buckets", 2, 3),
        ("layout.model.size_bytes", 8, 12),
        ("layout.model.parameters", 2, 3),
    ]
    two = facts_of(None, [layout(["a"]), msgspec.structs.replace(layout(["a"]), name="Second", module=1)])
    assert of_one_model(two, other) == (two, other)


def test_buckets_are_the_same_by_their_parameters() -> None:
    assert same_buckets([layout(["a"], ["b", "c"])], [layout(["c", "b"], ["d"], ["a"])]) == {
        (0, 0): (0, 1),
        (0, 2): (0, 0),
    }


def test_findings_come_and_go_by_code_phase_and_ranks() -> None:
    def finding(rank: int, title: str) -> dict[str, object]:
        return {"code": "straggler", "phase": "data", "ranks": [rank], "title": title}

    stated_elsewhere = finding(3, "e") | {"code": "scaling-loss"}
    a = {"findings": [finding(0, "a"), finding(1, "b"), stated_elsewhere]}
    b = {"findings": [finding(1, "c"), finding(2, "d"), stated_elsewhere]}
    result = findings_that_changed(a, b)
    assert {kind: [row["title"] for row in rows] for kind, rows in result.items()} == {
        "came": ["d"],
        "went": ["a"],
        "stayed": ["c"],
    }
