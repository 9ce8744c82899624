"""The cause of a slow rank, on two real ranks of which one is slow by real means."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.causes import RIGHT, disturbance, findings_of, train, verdict
from tests.support.control_groups import quota_group

pytestmark = pytest.mark.alone
STEPS, TRIES = 60, 3
"""Steps of a training, and trainings of which one must be judged right: other programs may disturb the others.

`benchmarks/causes.py` measures how often the verdict is right.
"""
MARKS = dict.fromkeys(("longer", "longer+neighbour", "lengths", "garbage"), pytest.mark.wide)
DISTURBED = 0.5
"""Rank 0's time without a processor over its time on one, from which on it has busy neighbours, too."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=MARKS.get(case, ())) for case in RIGHT if case != "balanced"]
)
def test_the_real_cause_is_stated_and_no_other(case: str, tmp_path: Path) -> None:
    if "quota" in case:
        with quota_group(500):  # Skips the test where no group can be made.
            pass
    verdicts = []
    for attempt in range(TRIES):
        evidence = train(case, STEPS, tmp_path / str(attempt))
        findings = findings_of(evidence)
        if verdict(findings) == RIGHT[case]:
            return
        if "neighbour" not in case or disturbance(evidence) < DISTURBED:
            verdicts.append([finding.title for finding in findings])
    if not verdicts:
        pytest.skip("NO NEIGHBOUR WAS JUDGED: other programs took rank 0's processor in the same way in every run")
    pytest.fail(f"{case} was judged as {verdicts}")


def test_counters_and_sizes_of_a_real_run_are_recorded(tmp_path: Path) -> None:
    steps = train("balanced", 20, tmp_path).steps
    later = steps.step > 0
    for name in ("running_ns", "run_delay_ns", "preemptions", "major_faults", "throttled_ns", "collecting_ns"):
        assert (getattr(steps, name)[later] >= 0).all(), name
    window_ns = (steps.running_ns + steps.run_delay_ns)[later]
    assert (0.5 * steps.own_ns[later] < window_ns).mean() > 0.5
    assert (steps.elements == 8 * 256 * 128).all()
    assert (steps.longest == 256).all()
