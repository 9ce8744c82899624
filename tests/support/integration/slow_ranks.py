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


def stragglers_unless_preempted(url: str, run: str) -> list[dict[str, Any]]:
    """The slow ranks of a balanced training, without those that the kernel saw waiting for a processor.

    A balanced training on a machine that another program shares has a slow rank: the finding is right there.
    """
    return [finding for finding in stragglers(url, run) if not _is_preempted(finding["evidence"])]


def _is_preempted(evidence: dict[str, Any]) -> bool:
    waited_ns = (evidence["counter_excess"] or {}).get("run_delay_ns", 0)
    return bool(evidence["cause"] == "preempted" and waited_ns > evidence["excess_ns"] / 2)


def own_times(url: str, run: str) -> str:
    """Each rank's backward in ms, by step: what a wrong diagnosis was made from."""
    columns = get(url, run, "/steps")["columns"]
    times: dict[int, list[tuple[int, int]]] = {}
    for rank, step, ns in zip(columns["rank"], columns["step"], columns["backward_ns"], strict=True):
        times.setdefault(rank, []).append((step, round(ns / 1e6)))
    return "\n".join(f"rank {rank}, step and ms of backward: {sorted(steps)}" for rank, steps in times.items())
