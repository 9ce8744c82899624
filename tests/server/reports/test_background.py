"""Diagnoses in the background: whose turn it is, and which comes first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait

import pytest
from ddpobs_server.reports.background import BackgroundDiagnoses
from ddpobs_server.web.run_faults import RunFaults

from benchmarks.rig import patience


class Recorded:
    """Diagnoses that end when they are told to, in the order in which they began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.may_end = threading.Event()

    def __call__(self, run: str, _attempt: str) -> None:
        self.began.append(run)
        assert self.may_end.wait(patience.HANG_S)
        if run == "damaged":
            raise ValueError(run)


@pytest.fixture
def diagnose() -> Recorded:
    return Recorded()


@pytest.fixture
def background(diagnose: Recorded) -> Iterator[BackgroundDiagnoses]:
    started = BackgroundDiagnoses(diagnose, RunFaults())
    yield started
    diagnose.may_end.set()
    started.close()


def test_a_workspaces_run_waits_for_one_of_another_workspace(
    diagnose: Recorded, background: BackgroundDiagnoses
) -> None:
    background.begin({(f"many/{number}", "a"): False for number in range(200)})
    patience.until(lambda: diagnose.began)
    futures = background.begin({("few/run", "a"): False})
    diagnose.may_end.set()
    wait([futures["few/run", "a"]], patience.HANG_S)
    assert diagnose.began.index("few/run") <= 2


def test_a_run_that_failed_comes_before_the_healthy_runs_of_its_workspace(
    diagnose: Recorded, background: BackgroundDiagnoses
) -> None:
    background.begin({(f"run-{number}", "a"): False for number in range(20)})
    patience.until(lambda: diagnose.began)
    futures = background.begin({("failed", "a"): True})
    diagnose.may_end.set()
    wait([futures["failed", "a"]], patience.HANG_S)
    assert diagnose.began[:2] == ["run-0", "failed"]


def test_an_error_ends_no_other_diagnosis(diagnose: Recorded, background: BackgroundDiagnoses) -> None:
    diagnose.may_end.set()
    futures = background.begin({("damaged", "a"): False, ("whole", "a"): False})
    assert not wait(futures.values(), patience.HANG_S).not_done
    assert diagnose.began == ["damaged", "whole"]
