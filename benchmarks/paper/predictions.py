"""What a launch with telemetry predicts of other settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.paper.tables import Launches
from benchmarks.rig.collector import push, running_collector, spooling
from benchmarks.whatif.__main__ import asked

STEPS = 30
"""Least steps of a launch that predicts: the model is fitted to twenty, without the first ones."""
_RUN = "predicting"


def environ(folder: Path) -> dict[str, str]:
    """Return the environment of ranks whose telemetry `predict` reads."""
    return spooling(_RUN, folder)


def predict(folder: Path, questions: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[list[float | None]]]:
    """Return seconds of a batch and the ends of its interval, by line, shape [questions, 3].

    A prediction that the run does not allow is None.

    Raises:
        RuntimeError: The run allows none.
    """
    with running_collector(folder) as url:
        push(folder / "spool", url)
        return {line: [_predicted(url, dict(each)) for each in asked_of] for line, asked_of in questions.items()}


def _predicted(url: str, change: dict[str, Any]) -> list[float | None]:
    document = asked(url, _RUN, change)
    if not document["answers"]:
        raise RuntimeError(f"no predictions: {document['missing']}")
    answer = document["answers"][0]
    if answer["prediction"] is None:
        return [None] * 3
    return [round(answer["prediction"][name] / 1e9, 6) for name in ("step_ns", "low_ns", "high_ns")]


def together(launches: Launches, line: str) -> npt.NDArray[np.float64]:
    """Return the median of the launches' predictions, and the ends of all their intervals, shape [questions, 3].

    All are NaN where a launch allowed no prediction.
    """
    each = np.array([launch["predicted"][line] for launch in launches], np.float64)
    return np.stack([np.median(each[..., 0], axis=0), each[..., 1].min(axis=0), each[..., 2].max(axis=0)], axis=1)
