"""Places that workspaces share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ddpobs_server.web.fair_queue import FairQueue
from ddpobs_server.web.fair_slots import FairSlots


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def test_a_workspace_at_its_share_leaves_places_to_another() -> None:
    async def scenario() -> None:
        slots = FairSlots(4, lambda _: 0.5)
        for _ in range(2):
            await slots.acquire("loud")
        third = asyncio.create_task(slots.acquire("loud"))
        await asyncio.sleep(0)
        assert not third.done()
        await slots.acquire("quiet")
        slots.release("loud")
        await third
        assert slots.in_use == {"loud": 2, "quiet": 1}

    run(scenario())


def test_waiting_workspaces_take_turns() -> None:
    async def scenario() -> None:
        slots = FairSlots(1, lambda _: 1.0)
        order: list[str] = []

        async def hold(workspace: str) -> None:
            async with slots.place(workspace):
                order.append(workspace)
                await asyncio.sleep(0)

        await slots.acquire("first")
        tasks = [asyncio.create_task(hold(name)) for name in ("loud", "loud", "loud", "quiet")]
        await asyncio.sleep(0)
        slots.release("first")
        await asyncio.gather(*tasks)
        assert order.index("quiet") == 1

    run(scenario())


def test_a_request_that_gives_up_leaves_no_place_taken() -> None:
    async def scenario() -> None:
        slots = FairSlots(1, lambda _: 1.0)
        await slots.acquire("a")
        waiting = [asyncio.create_task(slots.acquire("b")) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        slots.release("a")
        waiting[1].cancel()  # It was given the place a moment before.
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (slots.waiting(), dict(slots.in_use)) == (0, {})

    run(scenario())


def test_batches_of_workspaces_are_written_in_turns() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(3):
        queue.put("loud", number)
    queue.put("quiet", 9)
    assert [queue.get() for _ in range(4)] == [("loud", 0), ("quiet", 9), ("loud", 1), ("loud", 2)]
    queue.close()
    assert queue.get() is None


def test_an_urgent_item_is_the_next_of_its_workspace_and_takes_no_others_turn() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(3):
        queue.put("many", number)
    queue.put("few", 10)
    queue.put("many", 3, urgent=True)
    assert [queue.get() for _ in range(5)] == [("many", 3), ("few", 10), ("many", 0), ("many", 1), ("many", 2)]
