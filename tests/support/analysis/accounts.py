"""Processes of an attempt and their phases."""

from __future__ import annotations

from typing import Any

from ddpobs_server.analysis.account.rank_account import Process
from ddpobs_server.analysis.account.run_account import AttemptAccount, RunAccount

from ddpobs import wire

S = 10**9


def process(
    rank: int,
    *,
    until_s: int = 100,
    stuck_s: int = 0,
    outside: dict[Any, int] | list[wire.Outside] | None = None,
    **fields: Any,
) -> Process:
    """A process that started at 0; its imports end after 5 s, its module is ready after 10 s."""
    if isinstance(outside, dict):
        outside = [wire.Outside(kind=kind, total_ns=s * S, count=1) for kind, s in outside.items()]
    known: dict[str, Any] = {"started_ns": 0, "imported_ns": 5 * S, "ready_ns": 10 * S, "until_ns": until_s * S}
    account = wire.Account(**known | {"phases_ns": [0] * len(wire.PHASES), "outside": outside or []} | fields)
    return Process(rank, account, stuck_ns=stuck_s * S)


def phases(**seconds: int) -> list[int]:
    return [seconds.get(phase, 0) * S for phase in wire.PHASES]


def seconds(account: RunAccount | AttemptAccount) -> dict[str, float]:
    return {part: ns / S for part, ns in account.parts.items()}
