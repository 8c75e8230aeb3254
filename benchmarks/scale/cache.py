"""A model of what a driver's ledger keeps: chunks in place of columns, and the same rule for what is
displaced.

A million columns for each replica, with the real ledger, would not fit and would take days. As there,
the org with the most gives up a chunk; as with its policy `lru`, the chunk that was used longest ago
goes first, and the deeper one of a prompt. (A driver's default is a competition, which has more hits.)
`of_ledger` and `of_model` play the same requests to both.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.scale import traffic
from benchmarks.scale.sizes import CHUNK_TOKENS
from benchmarks.scale.traffic import Ask
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache_map.codec import (
    CHUNK,
    NAME_BYTES,
    PREFIX,
    SPACE_BYTES,
    CachePath,
    Section,
    entry,
    pack_values,
)
from swdriver_shim.cache_map.follower import Follower
from swdriver_shim.cache_map.messages import MessageLog
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.keys import Keys, Named
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import OrgPolicies, Policy
from swdriver_shim.replay.emulator import run_housekeeping

LAYOUT: Final = Layout((Group("a", (1,)),))
WALL: Final = 1_700_000_000.0  # wall time when virtual time is 0
DAY: Final = 24 * 3600
KEPT: Final = Policy(ttl_last_use_seconds=DAY)
PERIOD: Final = 0.5  # between two messages of a map

Chunks = list[bytes]  # the keys of the last columns of a prompt's chunks


def chunks(keys: Sequence[bytes]) -> Chunks:
    return list(keys[CHUNK - 1 :: CHUNK])


class Cache:
    """Of one replica, with room for so many chunks."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.pending: dict[int, dict[bytes, bool]] = {}  # by org: whether a chunk is there
        self.kept: dict[int, OrderedDict[bytes, None]] = {}  # by org, used longest ago first
        self._used = 0  # with those that are being written
        self._writing: set[bytes] = set()
        self._largest: list[tuple[int, int]] = []  # less how many an org has, or had, and the org
        self._noted: dict[int, int] = {}  # how many an org has, by its newest entry there

    @property
    def size(self) -> int:
        return sum(map(len, self.kept.values()))

    def match(self, org: int, keys: Chunks) -> int:
        """How many of them are there, from the first on. They are used."""
        its = self.kept.get(org)
        if not its:
            return 0
        count = 0
        for key in keys:
            if key not in its:
                break
            count += 1
        for key in reversed(keys[:count]):
            its.move_to_end(key)
        return count

    def begin_store(self, org: int, keys: Chunks) -> Chunks:
        """Make room for those that are not there. Returns them."""
        its = self.kept.setdefault(org, OrderedDict())
        new = [key for key in keys if key not in its and key not in self._writing][: self.room]
        self._used += len(new)
        while self._used > self.room and self._displace():
            pass
        if self._used > self.room:  # all that there is, is being written
            self._used -= len(new)
            return []
        self._writing.update(new)
        return new

    def finish_store(self, org: int, keys: Chunks, new: Chunks, *, failed: bool = False) -> None:
        self._writing.difference_update(new)
        if failed:
            self._used -= len(new)
            return
        its, pending = self.kept[org], self.pending.setdefault(org, {})
        for key in new:
            its[key] = None
            pending[key] = True
        for key in reversed(keys):
            if key in its:
                its.move_to_end(key)
        self._note(org)

    def _note(self, org: int) -> None:
        count = self._noted[org] = len(self.kept[org])
        heapq.heappush(self._largest, (-count, org))

    def _displace(self) -> bool:
        while self._largest:
            count, org = self._largest[0]
            its = self.kept[org]
            if self._noted[org] != -count or not its:
                heapq.heappop(self._largest)  # there is a newer one, or nothing to take
                continue
            key, _ = its.popitem(last=False)
            self.pending.setdefault(org, {})[key] = False
            self._noted[org] = len(its)
            heapq.heapreplace(self._largest, (-len(its), org))
            self._used -= 1
            return True
        return False


class ChunkFollower:
    """What `Follower` is to the messages of a cache map, for a cache of chunks: each has an entry."""

    def __init__(self, cache: Cache, makers: Sequence[Keys]) -> None:
        self.serves = True
        self.path: CachePath = "rail"
        self.wants_snapshot = True
        self.changes = 0  # of entries, that were reported
        self._cache = cache
        self._spaces = [one.tag + one.namespace.digest()[:SPACE_BYTES] for one in makers]
        self._expires = 0

    @property
    def size(self) -> int:
        return self._cache.size

    def follow(self, now: float, wall: float) -> None:  # noqa: ARG002
        """All that happens is noted by the cache."""
        self._expires = entry(wall + DAY, 0)

    def take(self, base: int) -> tuple[list[Section], list[bytes]]:
        sections = []
        for org, pending in self._cache.pending.items():
            self.changes += len(pending)
            there = [key[:NAME_BYTES] for key, is_there in pending.items() if is_there]
            removed = [key[:NAME_BYTES] for key, is_there in pending.items() if not is_there]
            sections.append(self._section(org, there, base, removed))
        self._cache.pending = {}
        return sections, []

    def everything(self, base: int) -> list[Section]:
        self.wants_snapshot = False
        self._cache.pending = {}
        return [
            self._section(org, [key[:NAME_BYTES] for key in kept], base)
            for org, kept in self._cache.kept.items()
            if kept
        ]

    def _section(
        self, org: int, there: list[bytes], base: int, removed: Sequence[bytes] = ()
    ) -> Section:
        values = pack_values([self._expires] * len(there), base)
        return Section(self._spaces[org], PREFIX, b"".join(there), values, b"".join(removed))


def log_of(cache: Cache, makers: Sequence[Keys]) -> tuple[ChunkFollower, MessageLog]:
    follower = ChunkFollower(cache, makers)
    return follower, MessageLog(follower)  # type: ignore[arg-type]


# Against the real ledger


@dataclass(slots=True)
class Compared:
    """Of one way to keep the same requests' columns. `cpu`: seconds in the ledger or its model, and in
    the making of messages."""

    hit: int = 0  # tokens, in whole chunks
    asked: int = 0
    entries: int = 0  # in the map, at the end
    kept: dict[int, int] = field(default_factory=dict)  # chunks by org, at the end
    bytes: int = 0  # of messages
    cpu: float = 0.0
    cpu_messages: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hit / self.asked


def of_ledger(
    requests: Sequence[Ask], makers: Sequence[Keys], columns: int, policy: Policy = KEPT
) -> Compared:
    """By a ledger of real columns and the follower of a driver."""
    ledger, result, lock = Ledger(LAYOUT, "compared"), Compared(), FairLock()
    ledger.set_slot_limit(0, columns)
    ledger.set_policies({one.org: OrgPolicies(policy=policy) for one in makers}, 0.0)
    follower = Follower(LAYOUT, ledger.accounts, lock, lambda: True)
    ledger.add_listener(follower)
    log, wrote = MessageLog(follower), -1.0
    for one in requests:
        keys = traffic.columns(one)
        prompt = Named(makers[one.org], keys[: len(keys) // CHUNK * CHUNK])
        began = time.thread_time()
        match = ledger.match(prompt, one.at)
        ledger.release(match)
        ledger.finish_store(ledger.begin_store(prompt, prompt.tokens, one.at), one.at)
        result.cpu += time.thread_time() - began
        result.hit += match.tokens // CHUNK_TOKENS * CHUNK_TOKENS
        result.asked += prompt.tokens
        if one.at - wrote >= PERIOD:
            wrote, began = one.at, time.thread_time()
            run_housekeeping(ledger, one.at)
            result.cpu += time.thread_time() - began
            _write(log, one.at, result)
    result.entries = follower.size
    accounts = [ledger.accounts.get(one.org) for one in makers]
    result.kept = {
        org: sum(1 for _ in account.columns(0)) // CHUNK
        for org, account in enumerate(accounts)
        if account
    }
    return result


def of_model(requests: Sequence[Ask], makers: Sequence[Keys], columns: int) -> Compared:
    cache, result = Cache(columns // CHUNK), Compared()
    follower, log = log_of(cache, makers)
    wrote = -1.0
    for one in requests:
        keys = chunks(traffic.columns(one))
        began = time.thread_time()
        result.hit += cache.match(one.org, keys) * CHUNK_TOKENS
        cache.finish_store(one.org, keys, cache.begin_store(one.org, keys))
        result.cpu += time.thread_time() - began
        result.asked += len(keys) * CHUNK_TOKENS
        if one.at - wrote >= PERIOD:
            wrote = one.at
            _write(log, one.at, result)
    result.entries = follower.size
    result.kept = {org: len(kept) for org, kept in cache.kept.items()}
    return result


def _write(log: MessageLog, now: float, result: Compared) -> None:
    began = time.thread_time()
    result.bytes += sum(map(len, log.write(now, now + WALL).messages))
    result.cpu_messages += time.thread_time() - began
