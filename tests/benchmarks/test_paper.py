"""The paper's experiments: verdicts on claims, and plots; an experiment in its smallest form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pairs import Ratio
from benchmarks.paper import convergence, operations, order, readiness, scaling
from benchmarks.paper import losses as loss_tables
from benchmarks.paper.experiments import EXPERIMENTS, FROM_25_MB, LINES, RANKS, Claim
from benchmarks.paper.loss_plot import draw_losses
from benchmarks.paper.plots import draw
from benchmarks.paper.tables import claims, table, verdict
from tests.support.integration.tools import need
from tests.support.smoke import LIMIT_S, run


def results(experiment: str, step_s: dict[str, float]) -> dict[str, Any]:
    """Two launches of three equal steps for each variant, all of it backward."""
    launches = {
        variant.title: [
            {"seconds": [[0.0, backward_s, 0.0, backward_s]] * 3, "peak_mb": 100.0, "growth_mb": 10.0}
            for backward_s in [step_s.get(variant.title, 1.0)] * 2
        ]
        for variant in EXPERIMENTS[experiment].variants
    }
    questions = EXPERIMENTS[experiment].questions
    for variant in EXPERIMENTS[experiment].variants:
        for launch in launches[variant.title] if variant.predicts else []:
            launch["predicted"] = {line: [[3.0, 2.0, 4.0]] * len(asked) for line, asked in questions.items()}
    return {"experiment": experiment, "settings": {"tiny, 1gbit": launches}}


def test_a_verdict_needs_the_whole_interval() -> None:
    claim = Claim("fast", 0.0, 0.8, "somewhere")
    assert verdict(claim, Ratio(0.7, 0.65, 0.75)) == "holds"
    assert verdict(claim, Ratio(0.75, 0.7, 0.85)) == "open"
    assert verdict(claim, Ratio(0.95, 0.9, 1.0)) == "does not hold here"


def test_a_claim_is_judged_for_its_own_model() -> None:
    found = results("breakdown", {})
    assert "figure 6" not in str(claims(found))
    found["settings"] = {"bert, 1gbit": next(iter(found["settings"].values()))}
    assert "figure 6: BERT" in str(claims(found))
    assert "figure 6: ResNet-50" not in str(claims(found))


def test_a_batch_is_its_share_of_a_step() -> None:
    found = results("accumulation", {"every 8": 4.0})
    assert "| every 8 | 0.0 | 4000.0 | 0.0 | 500.0 | 0.500 [0.500, 0.500] | 100 | 2 |" in table(found)
    assert claims(found)[-1][2:] == ["every 8 against every 1: -50.0 (-50.0 to -50.0)", "holds"]


def test_a_claim_compares_with_the_variant_that_it_names() -> None:
    found = results("breakdown", {"one bucket, MPI": 2.0, "overlapped, MPI": 1.5})
    shorter = "overlapped, MPI against one bucket, MPI: -25.0 (-25.0 to -25.0)"
    assert [shorter, "holds"] in [row[2:] for row in claims(found)]


def test_an_older_result_has_no_row_of_a_later_variant() -> None:
    found = results("breakdown", {})
    for title in ("one bucket, MPI", "overlapped, MPI"):
        del found["settings"]["tiny, 1gbit"][title]
    assert "MPI" not in table(found) + str(claims(found))
    assert "| overlapped |" in table(found)


def test_predictions_are_multiples_of_one_rank_s_batch_over_all_launches() -> None:
    found = results("scaling", {"1 rank": 2.0, "4 ranks": 5.0})
    first, second = found["settings"]["tiny, 1gbit"]["2 ranks, 0.5 MB"]
    first["predicted"]["every 1"] = [[4.0, 3.5, 5.0]] * len(RANKS)
    second["predicted"]["every 1"] = [[6.0, 3.0, 7.0]] * len(RANKS)
    row = scaling.predictions(found).splitlines()[2]
    assert row == "| 400 tiny parameters, 1gbit | every 1 | 2.50 " + "| 2.50 (1.50 to 3.50) " * 3 + "|"


def test_a_bucket_is_complete_when_its_last_gradient_and_the_buckets_before_it_are() -> None:
    sizes = [2**20] * 4
    registered, rebuilt = (order.filled(each, sizes) for each in ([3, 2, 1, 0], [0, 1, 2, 3]))
    assert registered == [[3], [2, 1, 0]]
    assert order.complete(rebuilt, [0, 1, 2, 3], sizes) == (0.25 + 1) / 2
    assert order.complete(registered, [0, 1, 2, 3], sizes) == 1


def test_the_order_of_branches_follows_the_data_and_that_of_layers_their_registration() -> None:
    branches, layers = (order.judged(order.CASES[name], 6) for name in ("branches", "wide"))
    assert branches["orders"] > 1
    assert branches["rebuilt"] < branches["registered"]
    assert (layers["orders"], layers["elsewhere"], layers["rebuilt"]) == (1, 0.0, layers["registered"])


@pytest.mark.parametrize("experiment", ["breakdown", "buckets", "scaling"])
def test_a_plot_has_its_axes_variants_and_claims(experiment: str, tmp_path: Path) -> None:
    import matplotlib

    found = results(experiment, {})
    (launches,) = found["settings"].values()
    found["settings"] = {f"{model}, 1gbit": launches for model in EXPERIMENTS[experiment].models}
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(found, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    if experiment == "scaling":
        shown = ["ranks", "256", "abstract: near-linear", *(f"predicted, {line}" for line in LINES)]
    else:
        shown = [variant.title for variant in EXPERIMENTS[experiment].variants]
        shown += [claim.source for claim in EXPERIMENTS[experiment].claims]
        shown += [FROM_25_MB] * (experiment == "buckets")
    shown.append("seconds a batch")
    assert [text for text in shown if text not in drawn] == []


def losses(every_8: dict[int, float]) -> dict[str, Any]:
    """Two seeds of each training that end with a loss of 1 and 1.1, or with that times that of `every 8` by batch."""

    def result(batch: int, title: str, end: float) -> dict[str, Any]:
        return {"loss": [2.0, 1.5, 1.2, end * (every_8[batch] if title == "every 8" else 1.0)], "read": 0.9}

    return {
        f"batch {batch}": {each.title: [result(batch, each.title, end) for end in (1.0, 1.1)] for each in trainings}
        for batch, trainings in convergence.TRAININGS.items()
    }


def test_convergence_is_judged_by_the_last_losses() -> None:
    rows = loss_tables.claims(losses({8: 1.05, 256: 1.3}))
    small, large = [row[2:] for row in rows if "figure 11" in row[0]]
    assert small == ["every 8 against every 1: 5.0 (5.0 to 5.0)", "holds"]
    assert large == ["every 8 against every 1: 30.0 (30.0 to 30.0)", "holds"]
    assert [row[3] for row in loss_tables.claims(losses({8: 1.2, 256: 0.9}))].count("does not hold here") == 2


def test_the_plot_of_losses_has_its_axes_and_trainings(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_losses({"found": losses({8: 1.0, 256: 1.0})}, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    shown = ["iteration, a batch on each rank", "training loss", "batch 8, learning rate 0.02", "claim 11 (b)"]
    shown += [training.title for training in convergence.TRAININGS[8]]
    assert [text for text in shown if text not in drawn] == []


def test_the_table_of_readiness_has_shares_of_backward() -> None:
    row = readiness.table({"ready_s": [[0.1, 0.2, 0.3, 1.0], [0.2, 0.4, 0.6, 2.0]]}).splitlines()[-1]
    assert row == "| 4 | 10 % (10 to 10) | 20 % (20 to 20) | 30 % (30 to 30) | 70 % (70 to 70) |"


def test_the_plots_of_figure_2_have_their_axes_and_claims(tmp_path: Path) -> None:
    import matplotlib

    seconds = {name: {str(count): [1.0, 2.0] for count in operations.SHARES} for name in ("gloo", "MPI")}
    measured = {"seconds": seconds, "parameters": 60_000_000, "rate": "1gbit"}
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        operations.draw_operations(measured, tmp_path / "operations.svg")
        readiness.draw_readiness({"ready_s": [[0.1, 0.2, 0.3]] * 2}, tmp_path / "readiness.svg")
    drawn = (tmp_path / "operations.svg").read_text() + (tmp_path / "readiness.svg").read_text()
    shown = ["parameters an operation", "seconds to reduce 60,000,000 parameters", "claim of figure 2", "MPI: median"]
    shown += ["gradients that are ready", "seconds of a processor", "5th to 95th percentile", "figure 2 (c), (d)"]
    assert [text for text in shown if text not in drawn] == []


@pytest.mark.wide
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(("name", "row"), [("operations", "| 60,000 |"), ("readiness", "| 53 |")])
def test_each_part_of_figure_2_is_measured(name: str, row: str) -> None:
    need("tc", "iproute2")
    assert row in run(f"paper/{name}")


@pytest.mark.wide
@pytest.mark.timeout(LIMIT_S + 60)
def test_convergence_trains_each_way_with_each_seed(tmp_path: Path) -> None:
    run("paper/convergence", "--json", str(tmp_path / "results.json"))
    found = json.loads((tmp_path / "results.json").read_text())["found"]
    counts = {batch: {title: len(each) for title, each in trainings.items()} for batch, trainings in found.items()}
    assert counts == {
        f"batch {batch}": {training.title: 2 for training in trainings}
        for batch, trainings in convergence.TRAININGS.items()
    }


@pytest.mark.wide
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    ("experiment", "shown"),
    [
        ("accumulation", "| figure 10"),
        ("breakdown", "no figure over MPI"),
        ("delay", "| 400 tiny parameters, 10gbit 10ms | 100 MB"),
        ("scaling", "| 256, predicted |"),
    ],
)
def test_an_experiment_measures_each_variant_and_judges_the_claim(experiment: str, shown: str, tmp_path: Path) -> None:
    need("tc", "iproute2")
    output = run("paper/__main__", experiment, "--json", str(tmp_path / "results.json"))
    ((_, found),) = json.loads((tmp_path / "results.json").read_text())["settings"].items()
    titles = [variant.title for variant in EXPERIMENTS[experiment].variants]
    assert {title: len(launches) for title, launches in found.items()} == dict.fromkeys(titles, 2)
    assert shown in output
