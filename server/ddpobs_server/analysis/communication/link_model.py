"""The run's own link, fitted to the times of its transfers."""

from __future__ import annotations

import numpy as np

from ddpobs.whatif.link import Link, fit_link
from ddpobs_server.analysis.communication.transfers import Transfers


def fit_transfers(transfers: Transfers) -> Link:
    """Fit the model to these transfers, so that it gives the typical step's sum.

    Transfers that overlap share their time in any proportion. Only their sum is known.
    """
    sizes = transfers.size_bytes.astype(np.float64)
    model = fit_link(sizes, transfers.moving_ns)
    fitted_ns = float(np.median(transfers.by_step(model.time_ns(sizes))))
    return model.scaled(float(np.median(transfers.by_step(transfers.moving_ns))) / max(1.0, fitted_ns))
