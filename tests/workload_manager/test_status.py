"""Who waits for the status of an instance."""

from __future__ import annotations

import asyncio

from msgspec import structs

from workload_manager.status import Board, Status

READY = Status("chat-0", "chat-0", 1, "ready", "", "", since=0.0, goal="RUN")


def test_who_waits_has_the_next_status() -> None:
    async def told() -> Status:
        board = Board(READY)
        waiting = asyncio.create_task(board.next(board.status.version, 60.0))
        await asyncio.sleep(0)
        board.put(structs.replace(READY, state="stopping"))
        return await waiting

    assert asyncio.run(told()).state == "stopping"


def test_at_the_end_nobody_waits_for_another_status() -> None:
    async def told() -> list[Status]:
        board = Board(READY)
        board.put(structs.replace(READY, state="gone"))
        waiting = asyncio.create_task(board.next(board.status.version, 60.0))
        await asyncio.sleep(0)
        board.end()
        return [await waiting, await board.next(board.status.version, 60.0)]

    async def soon() -> list[Status]:
        async with asyncio.timeout(30):
            return await told()

    assert [status.state for status in asyncio.run(soon())] == ["gone", "gone"]
