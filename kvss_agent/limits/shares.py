"""So much of something at once, shared fairly: bytes in flight, requests, passwords being hashed.

Each owner (an org, an address) waits in a queue of its own, and queues are served in turns. So whoever
asks for a lot waits behind itself, and nobody else does. Queues are bounded, and waiting has an end;
whoever gets nothing is refused (`NoShare`), and told when to ask again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field


class NoShare(Exception):
    """Too much is under way; asking again may help."""


@dataclass(frozen=True, slots=True)
class Shares:
    """`total` at once, of one owner `per_owner`. What an owner has up to `reserved` it gets though
    others have taken everything, so that `total` may be exceeded by that much for each owner."""

    total: int
    per_owner: int
    reserved: int = 0
    waiting: int = 256
    waiting_per_owner: int = 64


@dataclass(slots=True, eq=False)
class Claim:
    """An amount that an owner has, or waits for."""

    owner: str
    amount: int
    wake: Callable[[], None]  # called once, from any thread, when it is granted later
    granted: bool = field(default=False, init=False)


class FairShare:
    """All methods may be called from any thread."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.refused = 0
        self.used = 0
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[Claim]] = {}  # by owner; whose turn it is comes first
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        with self._lock:
            return self._count_waiting()

    def ask(self, owner: str, amount: int, wake: Callable[[], None]) -> Claim:
        """A claim that is granted, or that waits. `release` has to follow in either case. Raises NoShare
        if it can not even wait."""
        shares = self.shares
        claim = Claim(owner, amount, wake)
        with self._lock:
            if owner not in self._waiting and self._fits(claim):
                self._grant(claim)
                return claim
            queue = self._waiting.get(owner, ())
            if (
                amount > shares.per_owner
                or len(queue) >= shares.waiting_per_owner
                or self._count_waiting() >= shares.waiting
            ):
                self.refused += 1
                raise NoShare
            self._waiting.setdefault(owner, deque()).append(claim)
            return claim

    def release(self, claim: Claim) -> None:
        """It is not needed any more, or not waited for any more."""
        with self._lock:
            if claim.granted:
                self.used -= claim.amount
                self._held[claim.owner] -= claim.amount
                if not self._held[claim.owner]:
                    del self._held[claim.owner]
            elif claim.owner in self._waiting and claim in self._waiting[claim.owner]:
                self._waiting[claim.owner].remove(claim)
                self._drop_if_empty(claim.owner)
                self.refused += 1
            granted = self._serve()
        for one in granted:
            one.wake()

    @contextlib.contextmanager
    def held(self, owner: str, amount: int = 1, *, seconds: float) -> Iterator[None]:
        """Hold it; wait for it at most so long, in this thread. Raises NoShare."""
        is_granted = threading.Event()
        claim = self.ask(owner, amount, is_granted.set)
        try:
            if not claim.granted and not is_granted.wait(seconds) and not claim.granted:
                raise NoShare
            yield
        finally:
            self.release(claim)

    @contextlib.asynccontextmanager
    async def held_async(self, owner: str, amount: int = 1, *, seconds: float) -> AsyncIterator[None]:
        """Hold it; wait for it at most so long, on an event loop. Raises NoShare."""
        loop, is_granted = asyncio.get_running_loop(), asyncio.Event()
        claim = self.ask(owner, amount, lambda: _set_soon(loop, is_granted))
        try:
            if not claim.granted:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await is_granted.wait()
                if not claim.granted:
                    raise NoShare
            yield
        finally:
            self.release(claim)

    # Under the lock

    def _count_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _fits(self, claim: Claim) -> bool:
        held = self._held[claim.owner] + claim.amount
        if held > self.shares.per_owner:
            return False
        return held <= self.shares.reserved or self.used + claim.amount <= self.shares.total

    def _grant(self, claim: Claim) -> None:
        claim.granted = True
        self.used += claim.amount
        self._held[claim.owner] += claim.amount

    def _serve(self) -> list[Claim]:
        """Grant what fits now, one of each owner in turn."""
        granted: list[Claim] = []
        passed = 0
        while passed < len(self._waiting):
            owner = next(iter(self._waiting))
            queue = self._waiting.pop(owner)
            if self._fits(queue[0]):
                self._grant(queue[0])
                granted.append(queue.popleft())
                passed = 0
            else:
                passed += 1
            if queue:
                self._waiting[owner] = queue  # behind all others
        return granted

    def _drop_if_empty(self, owner: str) -> None:
        if not self._waiting[owner]:
            del self._waiting[owner]


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
        loop.call_soon_threadsafe(event.set)
