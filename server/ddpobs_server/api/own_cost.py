"""What telemetry costs the run, in responses."""

from __future__ import annotations

from typing import Annotated

from typing_extensions import TypedDict

from ddpobs_server.api.fields import RankId, doc


class TelemetryCost(TypedDict):
    """What telemetry adds to a step, as shares of a step without it. All ranks rest in the same steps."""

    cost_ratio: Annotated[float, doc("What it adds, as a share.")]
    low_ratio: Annotated[float, doc("Lower bound of this share; negative where noise hides the cost.")]
    high_ratio: Annotated[float, doc("Upper bound of this share.")]
    rests: Annotated[int, doc("Number of rests.")]
    rank: RankId


Telemetry = Annotated[
    TelemetryCost | None, doc("Cost of telemetry; null where it does not rest, or has rested too seldom.")
]
