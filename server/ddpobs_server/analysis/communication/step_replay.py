"""What-if: the exposed communication of a typical step with other buckets, bytes, or order.

A parameter is ready when its slowest rank is. Buckets are filled in order, and move as the run's own link moves them.
The replay of the run's own buckets against its measurement gives the error.

Source: dPRO (arXiv 2205.02473) replays a step from its own trace; here only its communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs.whatif.link import Link
from ddpobs.whatif.link_of_step import links_of_steps
from ddpobs.whatif.replay import replay
from ddpobs_server.analysis.communication.transfers import Transfers, latest_transfers
from ddpobs_server.analysis.evidence import MIN_STEPS, ColumnsTooLargeError, Evidence
from ddpobs_server.analysis.finding import Gain
from ddpobs_server.analysis.steps.joined_steps import Floats

MIN_GAIN = 0.03
"""Minimum predicted saving, as a share of the step, that is reported."""
DISTURBED_SHARE = 0.5
"""Share of the transfers' time beyond their fastest tenth above which the link does not explain them."""


@dataclass(frozen=True)
class Replay:
    """A typical step, and its replay.

    Attributes:
        transfers: The measured transfers.
        model: The run's own link.
        ready_ns: Readiness of each bucket on its slowest rank, in launch order, shape [buckets].
        sizes: Bytes, same shape.
        now_ns: Replayed exposed time.
        error_ns: Difference between the replayed and the measured exposed time.
        step_ns: Typical step.
    """

    transfers: Transfers
    model: Link
    ready_ns: Floats
    sizes: Floats
    now_ns: float
    error_ns: float
    step_ns: float

    def gain(self, ready_ns: Floats, sizes: Floats, extra_ns: float = 0.0) -> Gain | None:
        """Return the gain of other buckets; None unless it is at least `MIN_GAIN` of the step after its error.

        Args:
            ready_ns: Readiness of each bucket in launch order.
            sizes: Their bytes.
            extra_ns: Time that the change itself costs.
        """
        return self.saving(self.now_ns - replay(ready_ns, sizes, self.model).exposed_ns - extra_ns, self.error_ns)

    def saving(self, saved_ns: float, error_ns: float, least: float = MIN_GAIN) -> Gain | None:
        """Return a gain; None unless it is at least the share `least` of the step after its error."""
        if saved_ns - error_ns < least * self.step_ns:
            return None
        return Gain(round(saved_ns), round(saved_ns / self.step_ns, 4), round(error_ns / saved_ns, 4))


def replay_of(evidence: Evidence) -> Replay | str:
    """Return the replay of the latest steps, or why there is none."""
    if "replay" not in evidence.shared:
        evidence.shared["replay"] = _replay(evidence)
    result: Replay | str = evidence.shared["replay"]
    return result


def _replay(evidence: Evidence) -> Replay | str:
    if evidence.columns is None:
        return "bucket spans are not available"
    if evidence.is_sharded:
        return "the replay is of DDP's buckets, and this model has none"
    try:
        transfers = latest_transfers(evidence, evidence.columns)
    except ColumnsTooLargeError as error:
        return str(error)
    if transfers.steps < MIN_STEPS:
        return f"only {transfers.steps} of the {MIN_STEPS} steps that a judgement needs have bucket spans of all ranks"
    rows = transfers.rows_of_steps
    if not len(rows):
        return "no step has the spans of all buckets"
    sizes = transfers.size_bytes[rows[0]].astype(np.float64)
    times = (transfers.ready_ns[rows], transfers.done_ns[rows], transfers.moving_ns[rows])
    model, ready_ns = links_of_steps(*times, sizes)[0], np.median(transfers.ready_ns[rows], axis=0)
    now_ns = replay(ready_ns, sizes, model).exposed_ns
    error_ns = abs(now_ns - float(np.median(transfers.exposed_by_step_ns)))
    return Replay(transfers, model, ready_ns, sizes, now_ns, error_ns, float(np.median(evidence.joined.step_ns)))


def disturbed_share(times_ns: Floats) -> float:
    """Return the part of the steps' mean time that goes beyond the time of their fastest tenth.

    A link takes equally long for the same bytes. A process that waits for a processor does not.
    """
    mean_ns = float(np.minimum(times_ns, 4 * np.median(times_ns)).mean())
    return 1 - float(np.quantile(times_ns, 0.1)) / max(1.0, mean_ns)


def steady_replay_of(evidence: Evidence) -> Replay | str:
    """Return the replay of the latest steps if the link explains the transfers, or why there is none."""
    replay = replay_of(evidence)
    if isinstance(replay, str):
        return replay
    disturbed = disturbed_share(replay.transfers.exposed_by_step_ns)
    if disturbed > DISTURBED_SHARE:
        times = f"{1 / (1 - disturbed):.0f}"
        return f"transfers take {times} times as long as their fastest tenth, so the link alone does not explain them"
    return replay
