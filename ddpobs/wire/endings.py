"""How a process ended, by the event that reports it, and which of several processes ended a run.

| end | the process | event |
|---|---|---|
| `died` | was killed or crashed outside of Python; another process reports it | `died` |
| `finished` | ended in order | `goodbye` |
| `terminated` | got SIGTERM | `terminated` |
| `interrupted` | got SIGINT, or raised KeyboardInterrupt | `interrupted` |
| `failed` | ended by an error | `failed` |
| `imported` | was recorded by others: `ddpobs import` made it of a file | none: its hello has the setting `imported` |

The first cause decides: a run is interrupted if an interrupt came before any process failed or died. The others are its
victims.
"""

from __future__ import annotations

from typing import Literal

from ddpobs.wire.facts import EndFacts, facts_of
from ddpobs.wire.schema import Event

End = Literal["died", "finished", "terminated", "interrupted", "failed"]
IMPORTED = "imported"
"""The end of an imported process, and the setting that names the format of its file."""
ENDS: dict[str, End] = {
    "died": "died",
    "goodbye": "finished",
    "terminated": "terminated",
    "interrupted": "interrupted",
    "failed": "failed",
}
"""End of a process by the kind of its event, the weakest first: of several from one process the last counts."""
RESUMED = "resumed"
"""Kind of the event by which a process trains again after it was interrupted."""
_VICTIMS_SIGNALS = frozenset({"", "SIGINT", "SIGKILL", "SIGTERM"})
_SEEN_BEFORE_NS = 1_500_000_000


def end_of_event(event: Event) -> End | None:
    """How the process of an event ended; None for an event of another kind.

    Older clients report an interrupt as the error KeyboardInterrupt.
    """
    end = ENDS.get(event.kind)
    return "interrupted" if end == "failed" and facts_of(event, EndFacts).error == "KeyboardInterrupt" else end


def delay_ns(event: Event) -> int:
    """Time after an end until which an interrupt still counts as its cause.

    Nobody may have seen a death but by the last sign of life before it. A launcher kills ranks by a few signals only.
    """
    if event.kind != "died":
        return 0
    facts = facts_of(event, EndFacts)
    return 0 if facts.oom_kills or facts.signal not in _VICTIMS_SIGNALS else _SEEN_BEFORE_NS
