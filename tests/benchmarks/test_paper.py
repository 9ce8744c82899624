"""The paper's experiments: verdicts on claims, and plots; an experiment in its smallest form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pairs import Ratio
from benchmarks.paper.experiments import EXPERIMENTS, Claim
from benchmarks.paper.plots import draw
from benchmarks.paper.tables import claims, table, verdict
from tests.support.integration.tools import need
from tests.support.smoke import LIMIT_S, run


def results(experiment: str, step_s: dict[str, float]) -> dict[str, Any]:
    """Two launches of three equal steps for each variant, all of it backward."""
    launches = {
        variant.title: [
            {"seconds": [[0.0, backward_s, 0.0, backward_s]] * 3, "peak_mb": 100.0}
            for backward_s in [step_s.get(variant.title, 1.0)] * 2
        ]
        for variant in EXPERIMENTS[experiment].variants
    }
    return {"experiment": experiment, "settings": {"tiny, 1gbit": launches}}


def test_a_verdict_needs_the_whole_interval() -> None:
    claim = Claim("fast", 0.0, 0.8, "somewhere")
    assert verdict(claim, Ratio(0.7, 0.65, 0.75)) == "holds"
    assert verdict(claim, Ratio(0.75, 0.7, 0.85)) == "open"
    assert verdict(claim, Ratio(0.95, 0.9, 1.0)) == "does not hold here"


def test_a_claim_is_judged_for_its_own_model() -> None:
    found = results("breakdown", {})
    assert "figure 6" not in claims(found)
    found["settings"] = {"bert, 1gbit": next(iter(found["settings"].values()))}
    assert "figure 6: BERT" in claims(found)
    assert "figure 6: ResNet-50" not in claims(found)


def test_a_batch_is_its_share_of_a_step() -> None:
    found = results("accumulation", {"every 8": 4.0})
    assert "| every 8 | 0.0 | 4000.0 | 0.0 | 500.0 | 0.500 [0.500, 0.500] | 100 | 2 |" in table(found)
    assert claims(found).splitlines()[-1].endswith("| every 8: 0.500 [0.500, 0.500] | holds |")


@pytest.mark.parametrize("experiment", ["breakdown", "buckets"])
def test_a_plot_has_its_axes_variants_and_claims(experiment: str, tmp_path: Path) -> None:
    import matplotlib

    found = results(experiment, {})
    (launches,) = found["settings"].values()
    found["settings"] = {f"{model}, 1gbit": launches for model in EXPERIMENTS[experiment].models}
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(found, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    shown = [variant.title for variant in EXPERIMENTS[experiment].variants]
    shown += ["seconds a batch", *(claim.source for claim in EXPERIMENTS[experiment].claims)]
    assert [text for text in shown if text not in drawn] == []


@pytest.mark.wide
@pytest.mark.timeout(LIMIT_S + 60)
def test_an_experiment_measures_each_variant_and_judges_the_claim(tmp_path: Path) -> None:
    need("tc", "iproute2")
    output = run("paper/__main__", "accumulation", "--json", str(tmp_path / "results.json"))
    ((_, found),) = json.loads((tmp_path / "results.json").read_text())["settings"].items()
    assert {title: len(launches) for title, launches in found.items()} == {f"every {n}": 2 for n in (1, 2, 4, 8)}
    assert "| figure 10" in output
