"""What all tests share."""

from __future__ import annotations

from functools import cache

import httpx._transports.default as transports
from hypothesis import settings

# Machines are noisy: no test fails for being slow.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Each `httpx.get` would read all authorities' certificates, which takes longer than most of the answers.
transports.create_ssl_context = cache(transports.create_ssl_context)
