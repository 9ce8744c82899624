"""A rank that is slow in the nested passes of a cached loss is named, with our DDP and with torch's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.rig.training import TORCHRUN, train
from tests.support.integration.slow_ranks import get, stragglers

SCRIPT = Path(__file__).with_name("scripts") / "cached_loss.py"
STEPS, PASSES, RANKS = 60, 4, 2


@pytest.mark.parametrize("kind", ["ours", pytest.param("torch", marks=pytest.mark.wide)])
def test_a_rank_that_is_slow_in_nested_passes_is_named(url: str, kind: str, tmp_path: Path) -> None:
    run, script = f"nested-{kind}", SCRIPT
    launcher: tuple[str, ...] = ()
    if kind == "torch":
        script = tmp_path / "cached_loss.py"
        script.write_text(SCRIPT.read_text().replace("from ddpobs import", "from torch.nn.parallel import"))
        ddpobs = Path(sys.executable).with_name("ddpobs")
        launcher = (str(ddpobs), "run", "--collector", url, "--run", run, "--", *TORCHRUN)
    train(url, run, slow_rank=1, phase="forward", steps=STEPS, launcher=launcher, script=script)
    assert get(url, run)["steps"] == STEPS
    assert [(f["ranks"], f["phase"]) for f in stragglers(url, run)] == [([1], "forward")]
    spans = get(url, run, "/spans", **{"from": 1})["columns"]
    buckets = len(get(url, run, "/layout")["layouts"][-1]["buckets"])
    assert len(spans["step"]) == (STEPS - 1) * RANKS * PASSES * buckets
