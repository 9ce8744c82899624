"""Times for which something may be silent, until others go on without it."""

from __future__ import annotations

_S = 10**9
KEY_SILENCE_NS = 7 * _S
"""A rank is silent if its key in the ranks' store does not change for this long; pulses come every two seconds."""
PULSE_SILENCE_NS = 10 * _S
"""A rank is silent if the collector has no pulse of it for this long: its process is stopped, dead or cut off."""
COMPARED_STEPS_SILENCE_NS = 15 * _S
"""A rank is not compared if its latest steps arrived this much earlier than other ranks': more than two flushes."""
SUMMED_STEPS_SILENCE_NS = 60 * _S
"""Sums and bins of steps wait no longer for a rank whose latest step arrived this much earlier than other ranks'."""
PLACE_SILENCE_NS = 3600 * _S
"""A process without a note of its place for this long counts as dead if its number means nothing on this host."""
