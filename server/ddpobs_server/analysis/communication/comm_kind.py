"""Why communication is exposed, and what helps: what the judgements of buckets and of units have in common."""

from __future__ import annotations

from dataclasses import dataclass

from ddpobs_server.analysis.communication.processors import Shortage, shortage
from ddpobs_server.analysis.communication.step_replay import DISTURBED_SHARE, disturbed_share
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Gain
from ddpobs_server.analysis.steps.joined_steps import Floats

_PROCESSORS = (
    "Give the ranks more processors: fewer ranks or threads per host, no other programs beside them. "
    "A faster link or fewer bytes would not help."
)


@dataclass(frozen=True)
class CommKind:
    """Cause of the exposed communication; `reason` is set if it is not known.

    Attributes:
        name: `bandwidth`, `latency`, `processor`, `launch`, `outside` or `unknown`.
        words: The cause in words.
        remedy: What to do.
        gain: Of the remedy; None if none is predicted.
        reason: Why the cause is not known.
    """

    name: str
    words: str
    remedy: str
    gain: Gain | None = None
    reason: str = ""


def unknown_kind(reason: str) -> CommKind:
    """Return the kind of a cause that is not known."""
    return CommKind("unknown", f"not known: {reason}", "Look at the transfers in /spans.", reason=reason)


def disturbed_kind(evidence: Evidence, exposed_ns: Floats) -> CommKind | None:
    """Return the kind if the link does not explain the times of these steps; None if it does.

    Args:
        evidence: The run.
        exposed_ns: Exposed communication without waiting, shape [steps].
    """
    disturbed = disturbed_share(exposed_ns)
    if disturbed <= DISTURBED_SHARE:
        return None
    lack = shortage(evidence)
    if isinstance(lack, Shortage):
        return CommKind("processor", lack.sentence, _PROCESSORS)
    return unknown_kind(f"transfers take {1 / (1 - disturbed):.0f} times as long as their fastest tenth, and {lack}")
