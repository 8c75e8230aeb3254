"""Lets long requests start one by one, so that others go on in between."""

from __future__ import annotations

import asyncio
from collections import deque


class Starts:
    """Of one event loop, which reads all that has come before it goes on with any of it. Without turns
    an answer is passed on only after all requests that were read with it have been prepared.

    One request starts in each round of the loop, seldom two. In between the loop reads what has come,
    and goes on with what does not need a turn. Orgs have their turns one after the other: one that
    sends many at once waits for itself.
    """

    def __init__(self) -> None:
        self._is_taken = False  # this round
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by org, whose turn is next first

    async def turn(self, org: str) -> None:
        """Wait until this request may start: of an org, who came first is first."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        mine = loop.create_future()
        self._waiting.setdefault(org, deque()).append(mine)
        await mine

    def _next(self) -> None:
        self._is_taken = False
        while self._waiting and not self._is_taken:
            org = next(iter(self._waiting))
            its = self._waiting.pop(org)
            first = its.popleft()
            if its:
                self._waiting[org] = its  # behind the others
            if not first.done():  # else it was cancelled
                first.set_result(None)
                self._is_taken = True
                asyncio.get_running_loop().call_soon(self._next)
