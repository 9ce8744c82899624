"""Parts of the account under the category names of Google's ml-goodput-measurement 0.2.

Source: `BadputType` and `GoodputType` in its module `goodput_utils`; the metrics' names are of its module `monitoring`.
"""

from __future__ import annotations

from collections.abc import Mapping

GOODPUT = "TOTAL"
"""Name of all productive time."""
_BADPUT = {
    "DATA_LOADING_SYNC": ("data", "first_batch"),
    "TRAINING_PREP": ("model", "prepare"),
    "PROGRAM_STARTUP": ("import", "compile", "recompile", "waiting_for_compile"),
    "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME": ("checkpoint",),
    "WASTED_PROGRESS_FROM_DISRUPTION": ("repeated_steps",),
    "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": ("restart",),
    "CUSTOM_BADPUT_EVENTS.EVALUATION": ("evaluation",),
    "OTHER": (
        *("waiting", "waiting_in_steps", "unexplained", "start_waiting"),
        *("stuck", "unfinished_step", "finish", "idle"),
    ),
}
_PRODUCTIVE = ("forward", "backward", "waiting_for_ranks", "exposed_comm", "optimizer", "other", "resting", "open_step")
UNKNOWN = ("unrecorded", "not_known")
"""Parts under neither name: nothing is known about this time."""
NAMES = {part: name for name, parts in _BADPUT.items() for part in parts} | dict.fromkeys(_PRODUCTIVE, GOODPUT)
"""Name of each part: `GOODPUT`, or a category of badput."""


def times_by_name(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of each category; `parts` are times by part, in any unit. Parts of `UNKNOWN` are left out.

    Raises:
        KeyError: A part is not known here: the collector is newer.
    """
    sums: dict[str, float] = {}
    for part, time in parts.items():
        if part not in UNKNOWN:
            sums[NAMES[part]] = sums.get(NAMES[part], 0.0) + time
    return sums
