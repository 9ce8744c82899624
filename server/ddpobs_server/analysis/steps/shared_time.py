"""Time that the ranks of a step share: what no single rank causes."""

from __future__ import annotations

import numpy as np

from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps


def shared_ns(joined: JoinedSteps) -> Floats:
    """Return the time of each step that its ranks share: each phase on the lower median rank, the shortest wait."""
    shared = joined.lower_median_phases_ns.sum(axis=1) + joined.exposed_ns.min(axis=1)
    return np.asarray(np.minimum(shared, joined.window_ns))
