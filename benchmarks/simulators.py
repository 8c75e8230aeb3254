"""Caches to compare the policies with: plain ones that know no prefixes, and one that knows the future.

A request hits its longest prefix of blocks that are present; then all its blocks are stored. The plain
ones may drop a block before the ones behind it, which then lie idle; that is part of what they cost.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import takewhile
from typing import Protocol

Blocks = Sequence[int]


class Plain(Protocol):
    def __contains__(self, block: object) -> bool: ...

    def touch(self, block: int) -> None:
        """It is hit or stored."""


class Lru:
    """The textbook's."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def touch(self, block: int) -> None:
        self._blocks[block] = None
        self._blocks.move_to_end(block)
        if len(self._blocks) > self._size:
            self._blocks.popitem(last=False)


class Arc:
    """Adaptive replacement (Megiddo, Modha 2003): recency and frequency share as ghosts tell."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._wanted = 0.0  # how many blocks those seen once should have
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._once_gone: OrderedDict[int, None] = OrderedDict()
        self._often_gone: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._once or block in self._often

    def touch(self, block: int) -> None:
        if block in self._once or block in self._often:
            self._once.pop(block, None)
            self._often.pop(block, None)
            self._often[block] = None
        elif block in self._once_gone:
            step = max(1.0, len(self._often_gone) / len(self._once_gone))
            self._wanted = min(self._size, self._wanted + step)
            self._displace(often_comes_back=False)
            del self._once_gone[block]
            self._often[block] = None
        elif block in self._often_gone:
            step = max(1.0, len(self._once_gone) / len(self._often_gone))
            self._wanted = max(0.0, self._wanted - step)
            self._displace(often_comes_back=True)
            del self._often_gone[block]
            self._often[block] = None
        else:
            self._forget()
            self._once[block] = None

    def _forget(self) -> None:
        """Room for a block that nobody remembers."""
        once = len(self._once) + len(self._once_gone)
        everything = once + len(self._often) + len(self._often_gone)
        if once >= self._size:
            if len(self._once) < self._size:
                self._once_gone.popitem(last=False)
                self._displace(often_comes_back=False)
            else:
                self._once.popitem(last=False)
        elif everything >= self._size:
            if everything >= 2 * self._size:
                self._often_gone.popitem(last=False)
            self._displace(often_comes_back=False)

    def _displace(self, *, often_comes_back: bool) -> None:
        if len(self._once) + len(self._often) < self._size:
            return
        once = len(self._once)
        if once and (once > self._wanted or (often_comes_back and once == self._wanted)):
            self._once_gone[self._once.popitem(last=False)[0]] = None
        else:
            self._often_gone[self._often.popitem(last=False)[0]] = None


PLAIN: dict[str, Callable[[int], Plain]] = {"plain lru": Lru, "plain arc": Arc}


def plain(requests: Iterable[Blocks], cache: Plain) -> int:
    """Blocks that were hit. Later blocks are touched first: so they are the older ones."""
    hits = 0
    for blocks in requests:
        hits += _prefix(blocks, cache)
        for block in reversed(blocks):
            cache.touch(block)
    return hits


def _prefix(blocks: Blocks, present: Container[object]) -> int:
    """How many blocks from the start are there."""
    return sum(1 for _ in takewhile(present.__contains__, blocks))


def optimum(requests: Sequence[Blocks], size: int) -> int:
    """The most blocks that anybody could hit: the one whose next use is furthest goes (Belady, 1966).

    That is leaf-first by itself: whoever wants a block wants those before it, so these are not wanted
    later; among equals the deeper one goes. So what is present is always whole prefixes, and that each
    block counts only as part of a prefix takes nothing from the optimum of single blocks. A block that
    is not worth its room goes at once, which no policy of ours may do.
    """
    following = _next_uses(requests)
    present: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for blocks, nexts in zip(requests, following, strict=True):
        hits += _prefix(blocks, present)
        for depth, (block, use) in enumerate(zip(blocks, nexts, strict=True)):
            present[block] = use
            heapq.heappush(heap, (-use, -depth, block))
        while len(present) > size:
            use, _, block = heapq.heappop(heap)
            if present.get(block) == -use:
                del present[block]
    return hits


def who_comes_back(requests: Sequence[Blocks], size: int) -> int:
    """Blocks that are hit by who knows of each whether it will be used again, and not when.

    One that will not goes at once, the others go in the order of their last uses. A policy guesses
    what is known here.
    """
    following = _next_uses(requests)
    present: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks, nexts in zip(requests, following, strict=True):
        hits += _prefix(blocks, present)
        for block, use in reversed(list(zip(blocks, nexts, strict=True))):
            present.pop(block, None)
            if use < len(requests):
                present[block] = None
        while len(present) > size:
            present.popitem(last=False)
    return hits


def _next_uses(requests: Sequence[Blocks]) -> list[list[int]]:
    """For each block of each request, the number of the next request that has it."""
    never = len(requests)
    latest: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        found.append([latest.get(block, never) for block in requests[number]])
        latest.update(dict.fromkeys(requests[number], number))
    return found[::-1]
