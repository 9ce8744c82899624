"""Admission of new runs: what one workspace begins never delays another."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ddpobs_server.ingest.admission import Admission
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from ddpobs_server.web.workspace_limits import WorkspaceLimits


def test_a_new_run_does_not_wait_for_the_count_of_another_workspace(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, counted, begun, proceed = Settings(), store.count_sources, threading.Event(), threading.Event()

    def count(run: str, source: str) -> tuple[int, bool]:
        if run.startswith("loud/"):
            begun.set()
            assert proceed.wait(30)
        return counted(run, source)

    monkeypatch.setattr(store, "count_sources", count)
    admission = Admission(settings, WorkspaceLimits(settings, store), store)

    async def both() -> None:
        loud = asyncio.create_task(admission.check("loud", "loud/run", "a" * 16))
        await asyncio.to_thread(begun.wait, 30)
        await asyncio.wait_for(admission.check("quiet", "quiet/run", "b" * 16), 20)
        assert not loud.done()
        proceed.set()
        await loud

    asyncio.run(both())
