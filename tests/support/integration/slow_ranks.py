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
