"""The training with a slow rank, and the collector's responses about it."""

from __future__ import annotations

from typing import Any

import httpx

SLOW_RANK = 1


def get(url: str, run: str, path: str = "", **query: Any) -> Any:
    answer = httpx.get(f"{url}/api/v1/runs/{run}{path}", params=query)
    answer.raise_for_status()
    return answer.json()


def stragglers(url: str, run: str) -> list[dict[str, Any]]:
    return [f for f in get(url, run, "/diagnostics")["findings"] if f["code"] == "straggler"]


def own_times(url: str, run: str) -> str:
    """Each rank's backward in ms, by step: what a wrong diagnosis was made from."""
    columns = get(url, run, "/steps")["columns"]
    times: dict[int, list[tuple[int, int]]] = {}
    for rank, step, ns in zip(columns["rank"], columns["step"], columns["backward_ns"], strict=True):
        times.setdefault(rank, []).append((step, round(ns / 1e6)))
    return "\n".join(f"rank {rank}, step and ms of backward: {sorted(steps)}" for rank, steps in times.items())
