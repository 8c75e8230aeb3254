"""The homes that a shard is leaving or has left, for as long as they may still hold bytes of it.

A receipt says that something is gone everywhere. So no home of a shard is forgotten before one of three
things is known: its slots have been emptied by us; the agent says, after it has proved who it is, that
it has no such shard; or the shard there has other memory than the one that was left. Nor is it before
all that waited of the shard in front of the agent's tier 2 is behind: what is deleted meanwhile is
deleted there as well. A home that can't be reached is tried again for as long as it takes, or until
somebody vouches that the machine is gone (`removed`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvss_agent.client import Lost, ShardClient
from kvss_agent.data_plane.address import Address
from kvss_agent.data_plane.breach import Cause
from swdriver_shim.data_plane.homes import Home

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0  # between attempts to reach a home
FLUSH_SECONDS: Final = 0.2  # between questions whether what waits at a home is behind
TAGS_MAX: Final = 1 << 16  # of more orgs than that, anybody's bytes may be at a home

Connect = Callable[[], ShardClient]


@dataclass(eq=False)
class FormerHome:
    """One of them. `is_left`: nothing there is read any more; before that, `stale` slots are not."""

    connect: Connect
    client: ShardClient | None  # None: it is lost, or was never reached
    incarnation: bytes  # of its memory; empty if not known: then whatever is found there is emptied
    tags: frozenset[bytes] | None  # of those whose bytes may be there; None: anybody's
    is_left: bool = False
    stale: dict[int, int] = field(default_factory=dict)  # slots, with the last reading at each
    unsure: set[int] = field(default_factory=set)  # slots that a pull may bring from here, however late
    since: float = field(default_factory=time.time)
    may_wait: bool = True  # columns may be in front of tier 2 there, and nowhere else
    is_emptied: bool = False  # its slots
    reason: str = ""  # why it is not emptied yet
    tried_at: float = -RETRY_SECONDS
    flushed_at: float = -FLUSH_SECONDS

    def may_hold(self, tag: bytes | None) -> bool:
        """Whether something of this tag, or of any, may be here that the shard's home does not have."""
        if tag is not None and self.tags is not None and tag not in self.tags:
            return False
        return self.is_left or self.client is None or bool(self.stale)


class FormerHomes:
    """Of one shard, the oldest first. A home is emptied only when those before it are: until then it may
    still be given bytes by a pull from them that nobody has seen end.

    `lock` is the shard's, held for no I/O here. `clear_here(slots)` empties slots of the present home to
    which nothing is known to be written; whether that is done.
    """

    def __init__(self, lock: threading.RLock, clear_here: Callable[[Collection[int]], bool]) -> None:
        self._lock = lock
        self._clear_here = clear_here
        self.emptying = threading.Lock()  # by one thread at a time, and not while the shard moves
        self._homes: list[FormerHome] = []
        self._readings: dict[int, frozenset[ShardClient]] = {}  # that are under way, by number
        self._reading = 0  # the number of the last
        self._removed: frozenset[str] = frozenset()  # addresses of agents that are no more
        self._moved: Mapping[str, str] = {}  # addresses of agents that had others, by key

    # Who reads

    def begin_reading(self, clients: frozenset[ShardClient]) -> int:
        with self._lock:
            self._reading += 1
            self._readings[self._reading] = clients
            return self._reading

    def end_reading(self, number: int) -> None:
        with self._lock:
            del self._readings[number]

    def is_read(self, client: ShardClient) -> bool:
        return any(client in clients for clients in self._readings.values())

    # What is known, under the lock

    def add(self, home: FormerHome) -> None:
        home.connect = self._followed(home.connect)
        self._homes.append(home)

    def follow_agents(self, removed: Collection[str], moved: Collection[str]) -> None:
        """As `ShardControl.set_agents`."""
        with self._lock:
            self._removed = frozenset(removed)
            self._moved = {Address.parse(one).key: one for one in moved}
            for home in self._homes:
                home.connect = self._followed(home.connect)

    def _followed(self, connect: Connect) -> Connect:
        return connect.at(self._moved) if isinstance(connect, Home) else connect

    def mark_stale(self, home: FormerHome, slots: Iterable[int]) -> None:
        """What these slots have there is needed no more: it is at the present home, or nowhere."""
        for slot in slots:
            home.stale[slot] = self._reading

    def forget(self, connect: Connect) -> None:
        """It is the present home again, and has been emptied as that."""
        again = [home for home in self._homes if home.connect == connect]
        self._homes = [home for home in self._homes if home.connect != connect]
        for home in again:
            if home.client:
                home.client.close()

    def __bool__(self) -> bool:
        return bool(self._homes)

    def emptied_there(self, home: FormerHome, slots: Iterable[int]) -> None:
        """These slots have nothing there any more that a pull could bring."""
        for slot in slots:
            home.stale.pop(slot, None)
            home.unsure.discard(slot)

    @property
    def shown(self) -> list[str]:
        """For people: those that are left and not confirmed to be empty."""
        with self._lock:
            return [
                f"left {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(home.since))}, not emptied yet"
                + (f": {home.reason}" if home.reason else "")
                for home in self._homes
                if home.is_left
            ]

    @property
    def with_waiting(self) -> list[FormerHome]:
        """Those where columns may be in front of tier 2 that are nowhere else."""
        with self._lock:
            homes = [home for home in self._homes if home.may_wait]
        return [home for home in homes if not self._is_removed(home)]

    def lose(self, home: FormerHome, client: ShardClient, error: Lost) -> None:
        with self._lock:
            if home.client is client:
                home.client, home.reason = None, str(error)
        client.close()

    def may_hold(self, tag: bytes | None) -> bool:
        """Whether something of this tag, or of any, may be at another home than the one that the shard
        reads it from."""
        with self._lock:
            return any(home.may_hold(tag) for home in self._homes)

    # What is done about it

    def empty(self, *, scrub: bool) -> None:
        """Empty what can be emptied now. Takes as long as agents take to answer."""
        with self.emptying:
            with self._lock:
                homes = list(self._homes)
            for home in homes:
                if not self._empty(home, scrub=scrub):
                    return

    def close(self) -> None:
        with self._lock:
            homes, self._homes = self._homes, []
        for home in homes:
            if home.client:
                home.client.close()

    def _empty(self, home: FormerHome, *, scrub: bool) -> bool:
        """Whether nothing is left there that is not needed."""
        with self._lock:
            client, is_left = home.client, home.is_left
            if is_left and client and self.is_read(client):
                return False
            oldest = next(iter(self._readings), self._reading + 1)
            stale = [slot for slot, moment in home.stale.items() if moment < oldest]
        if not is_left:
            done = client is not None and (not stale or self._delete(home, client, stale, scrub=scrub))
            if done:
                self._no_longer_stale(home, stale)
            return done and not home.stale
        if not self._is_gone(home, scrub=scrub) or not self._clear_here(home.unsure):
            return False
        with self._lock:
            if home in self._homes:
                self._homes.remove(home)
            client, home.client = home.client, None
        if client:
            client.close()
        return True

    def _no_longer_stale(self, home: FormerHome, slots: Collection[int]) -> None:
        """They are empty there. So what a late pull may have brought from them is here by now, or never
        comes."""
        with self._lock:
            unsure = home.unsure.intersection(slots)
        if unsure and not self._clear_here(unsure):
            return
        with self._lock:
            home.unsure -= unsure
            for slot in slots:
                home.stale.pop(slot, None)

    def _is_gone(self, home: FormerHome, *, scrub: bool) -> bool:
        """All that a home that is left has held."""
        if self._is_removed(home):
            return True
        client = home.client
        if client is None or client.lost:
            if time.monotonic() < home.tried_at + RETRY_SECONDS:
                return False
            home.tried_at = time.monotonic()
            try:
                found = home.connect()
            except Lost as error:
                home.reason = str(error)
                return error.cause is Cause.ABSENT
            with self._lock:
                is_known = home in self._homes
                client, home.client = found, found if is_known else None
            if not is_known:  # the shard was closed meanwhile
                found.close()
                return False
            if home.incarnation and found.incarnation != home.incarnation:
                home.is_emptied = True
        if not home.is_emptied:
            home.is_emptied = self._delete(home, client, range(client.slots), scrub=scrub)
        return home.is_emptied and self._is_flushed(home, client)

    def _is_flushed(self, home: FormerHome, client: ShardClient) -> bool:
        """Whether nothing waits there in front of tier 2. Asked now and then, it is soon."""
        if not home.may_wait:
            return True
        if time.monotonic() < home.flushed_at + FLUSH_SECONDS:
            return False
        home.flushed_at = time.monotonic()
        try:
            left = client.flush()
        except Lost as error:
            self.lose(home, client, error)
            return False
        home.reason = f"{'some' if left is None else left} columns wait in front of its tier 2"
        home.may_wait = left != 0
        return not home.may_wait

    def _is_removed(self, home: FormerHome) -> bool:
        return getattr(home.connect, "address", None) in self._removed

    def _delete(
        self, home: FormerHome, client: ShardClient, slots: Collection[int], *, scrub: bool
    ) -> bool:
        try:
            if reason := client.delete(list(slots), scrub=scrub):
                home.reason = f"its slots can't be emptied: {reason}"
                return False
        except Lost as error:
            self.lose(home, client, error)
            return False
        return True
