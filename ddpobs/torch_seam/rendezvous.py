"""Torch's rendezvous: its handlers by scheme, and its default timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import rendezvous
from torch.distributed.constants import default_pg_timeout as default_timeout

__all__ = ["default_timeout", "replace_handler"]


def replace_handler(scheme: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the handler of a scheme by `around(handler)`. Torch itself can only add handlers."""
    handlers: dict[str, Callable[..., Any]] = rendezvous.__globals__["_rendezvous_handlers"]
    handlers[scheme] = around(handlers[scheme])
