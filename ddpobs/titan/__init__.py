"""torchtitan's structured logger as a source of steps and phases.

TITAN_STRUCT_LOGGER_HANDLERS=ddpobs.titan.register ddpobs run -- torchrun … -m torchtitan.train …
"""

from __future__ import annotations

from ddpobs.titan.spans import register

__all__ = ["register"]
