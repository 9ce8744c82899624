"""Intervals cover the truth as often as they claim, and figures belong to one code and machine."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from benchmarks.pairs import ratio
from benchmarks.source import digest, keep, resumed
from benchmarks.switched import StoppableClock
from benchmarks.tables import tables


def test_the_cost_of_the_flag_is_a_ratio_within_each_reducer() -> None:
    seconds = {
        "torch": [0.1] * 4,
        "again": [0.1] * 4,
        "torch_finds": [0.12] * 4,
        "off": [0.08] * 4,
        "finds": [0.09] * 4,
    }
    launch = {"seconds": seconds, "steps_a_turn": 1, "others_cores": 0.0, "stolen_cores": 0.0}
    output = tables({"one": {"model": "tiny", "ranks": 2, "set": "unused", "launches": [launch] * 2}})
    row = next(line for line in output.splitlines() if "400 tiny" in line)
    assert re.findall(r"(\d\.\d{3}) \[", row) == ["1.000", "1.200", "1.125", "0.750"]


@pytest.mark.parametrize("medians", [False, True])
@pytest.mark.parametrize("launches", [2, 4, 12])
def test_the_interval_of_a_ratio_covers_the_truth_in_95_percent(launches: int, medians: bool) -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        truths = [random.normal(1.0, 0.02, 2) for _ in range(launches)]
        above, below = ([random.normal(truth[side], 0.05, 12) for truth in truths] for side in (0, 1))
        interval = ratio([list(row) for row in above], [list(row) for row in below], medians=medians)
        covered += interval.low <= 1.0 <= interval.high
    assert 0.92 <= covered / 400 <= 0.98


def test_figures_of_other_code_or_another_machine_are_refused(tmp_path: Path) -> None:
    file, facts = tmp_path / "results.json", {"machine": {"cores": 2}, "code": "a"}
    assert resumed(file, facts | {"settings": {}}) == facts | {"settings": {}}
    keep(facts | {"settings": {"kept": 1}}, file)
    assert resumed(file, facts | {"settings": {}})["settings"] == {"kept": 1}
    assert resumed(file, facts | {"settings": {}}, anew=True)["settings"] == {}
    for changed in ({"code": "b"}, {"machine": {"cores": 4}}):
        with pytest.raises(SystemExit, match=f"of another {next(iter(changed))}.* --anew"):
            resumed(file, facts | changed)


def test_the_digest_changes_with_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.source.ROOT", tmp_path)
    (tmp_path / "part").mkdir()
    digests = set()
    for text in ("a", "b", "a"):
        (tmp_path / "part" / "x.py").write_text(text)
        digests.add(digest("part"))
    assert len(digests) == 2


def test_a_ratio_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        ratio([[]], [[]])


def test_a_rare_burst_counts_in_totals_and_not_in_medians() -> None:
    bursty, steady = [[1.0] * 9 + [11.0]] * 3, [[1.0] * 10] * 3
    assert ratio(bursty, steady).middle == pytest.approx(2.0)
    assert ratio(bursty, steady, medians=True).middle == 1.0


def test_a_verdict_is_open_where_the_interval_holds_the_limit() -> None:
    slower = ratio([[1.1, 1.12, 1.11] * 5], [[1.0, 1.01, 1.0] * 5])
    assert (slower.verdict(1.0), slower.verdict(1.2), slower.verdict(slower.middle)) == ("fails", "holds", "open")


def test_a_stopped_clock_goes_on_where_it_stopped() -> None:
    with patch("benchmarks.switched.time") as machine:
        machine.monotonic.return_value, machine.time.return_value = 100.0, 5000.0
        clock = StoppableClock()
        clock.stop()
        machine.monotonic.return_value, machine.time.return_value = 107.0, 5007.0
        assert (clock.monotonic(), clock.time()) == (100.0, 5000.0)
        clock.go_on()
        machine.monotonic.return_value, machine.time.return_value = 108.0, 5008.0
        assert (clock.monotonic(), clock.time()) == (101.0, 5001.0)
