"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# Machines are noisy: no test fails for being slow.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
