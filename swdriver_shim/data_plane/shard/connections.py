"""The connections of a shard: to its home, and to the home that it is leaving."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from kvss_agent.client import Lost, NotApplied, ShardClient
from swdriver_shim.cache.snapshot import ShardSnapshot, read_once, write
from swdriver_shim.data_plane.paths import PathSpec
from swdriver_shim.data_plane.shard.former_homes import TAGS_MAX, Connect, FormerHome, FormerHomes
from swdriver_shim.data_plane.shard.slots import SlotTable
from telemetry.units import counted

log = logging.getLogger(__name__)

RECONNECT_SECONDS: Final = 1.0  # between attempts


class HomeConnections:
    """Opened, lost and opened again. `lock` guards all fields and is never held while bytes move, so
    that refills wait for no evict. `writing` is held by whoever evicts, clears or changes the home."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        notes: Path | None,
        path: PathSpec | None,
        earlier: Sequence[Connect],
        clear_here: Callable[[Collection[int]], bool],
    ) -> None:
        """`clear_here` as in `FormerHomes`; the others as in `Shard`."""
        self.name = name
        self.on_change: Callable[[], None] = lambda: None
        self.lost_because = "not connected yet"
        self.moves = 0
        self.memory_resets = 0
        self.writing = threading.Lock()
        self.lock = threading.RLock()
        self.slots = SlotTable(self.lock)
        self.connect = connect
        self.client: ShardClient | None = None
        self.path = path
        self.number = 0  # of the last evict to the present home
        self.leaving: FormerHome | None = None
        self.old_path: PathSpec | None = None
        self.is_closed = threading.Event()
        self.former = FormerHomes(self.lock, clear_here)
        for place in earlier:
            self.former.add(FormerHome(place, None, b"", None, is_left=True))
        self._note = notes / name if notes else None
        self._incarnation = b""
        self._tried_at = -RECONNECT_SECONDS
        self.may_wait = True  # columns may be in front of its tier 2, and nowhere else
        self._tags: set[bytes] | None = None  # whose bytes may be at the home; None: anybody's

    @property
    def old(self) -> ShardClient | None:
        """The connection to the home that the shard is leaving, while there is one."""
        return self.leaving.client if self.leaving else None

    # Opening

    def open(self) -> bool:
        """Connect if not connected, at most once in `RECONNECT_SECONDS`. Returns whether connected.

        Requests never wait for this: housekeeping calls it.
        """
        client = self.client
        if client and client.lost:
            self.lose(client, client.lost)
        with self.lock:
            if self.client:
                return True
            if time.monotonic() < self._tried_at + RECONNECT_SECONDS:
                return False
            self._tried_at, connect = time.monotonic(), self.connect
        try:
            client = connect()
        except Lost as error:
            self.lost_because = str(error)
            return False
        try:
            if not self._incarnation and not self._resume(client):
                empty(client)
        except Lost as error:
            client.close()
            self.lost_because = str(error)
            return False
        with self.writing:
            is_settled = self._reconnect(client, connect)
        if not is_settled:
            client.close()
        self.on_change()
        return True

    def _resume(self, client: ShardClient) -> bool:
        """Go on with what an earlier process has noted. Returns False unless the agent's memory is as
        that process left it, to the last evict."""
        left = read_once(self._note, ShardSnapshot) if self._note else None
        if left is None or (client.incarnation, client.applied) != (left.incarnation, left.applied):
            return False
        with self.lock:
            self._incarnation = left.incarnation
            self.slots.restore(left.numbers)
        return True

    def _reconnect(self, client: ShardClient, connect: Connect) -> bool:
        """Use this connection, once slots are empty whose evicts were under way when the last one broke:
        those evicts never happened, and the slots hold columns that nobody knows. Returns False if the
        connection is lost again, or if the shard has moved."""
        with self.lock:
            if self.client or self.connect is not connect:
                return False
            never: list[int] = []
            if client.incarnation == self._incarnation:
                never = list(self.slots.written_after(client.applied))
        try:
            if never and client.delete(never, scrub=True):
                return False
        except Lost as error:
            self.lost_because = str(error)
            return False
        with self.lock:
            for slot in never:
                self.slots.clear(slot)
            self._use(client)
        return True

    def _use(self, client: ShardClient) -> None:
        if client.incarnation != self._incarnation:  # its memory is new, and empty
            self.slots.reset(client.slots)
            self.not_needed_at_old(set(self.slots.at_old_home))  # the numbers of its evicts are lost
            self._incarnation = client.incarnation
            self._tags = set()
            self.memory_resets += 1
        self.may_wait = client.may_wait_in_front
        client.on_slot_limit = client.on_lost = lambda *_: self.on_change()
        self.client, self.number, self.lost_because = client, client.applied, ""

    def change_address(self, connect: Connect, path: PathSpec | None) -> bool:
        """Connect to the agent of the home here from now on. Its memory may be as it was, or another.
        Returns whether it is reached."""
        with self.lock:
            self.connect, self.path = connect, path
            self._tried_at = -RECONNECT_SECONDS
            client = self.client
        if client:
            self.lose(client, Lost("its agent has another address"))
        return self.open()

    # Moving

    def change_home(
        self, client: ShardClient, connect: Connect, path: PathSpec | None
    ) -> tuple[FormerHome, list[int]]:
        """Make this the home. Returns the home that the shard is leaving, and the slots to pull from
        there. Needs `writing`."""
        with self.lock:
            old, tags = self.client, self._tags
            leaving = FormerHome(
                self.connect, old, self._incarnation, frozenset(tags) if tags is not None else None
            )
            leaving.may_wait = self.may_wait
            self.former.forget(connect)
            self.former.add(leaving)
            self.leaving, self.connect = leaving, connect
            self.old_path, self.path = self.path, path
            self.moves += 1
            slots: list[int] = []  # without the old home they are lost; tier 2 may have them
            if old:
                slots = self.slots.written()
                self._incarnation = client.incarnation  # its bytes are on their way
                self.slots.at_old_home = set(slots)
                self.former.mark_stale(leaving, set(range(old.slots)) - self.slots.at_old_home)
            self._use(client)
            return leaving, slots

    def finish_move(self, leaving: FormerHome) -> None:
        """Give up what has not been pulled. Housekeeping empties the old home."""
        with self.lock:
            lost = self.slots.at_old_home
            if lost:
                slots = counted(len(lost), "slot could", "slots could")
                log.warning("Shard %s: %s not be moved", self.name, slots)
                for slot in lost:
                    self.slots.clear(slot)
                lost.clear()
                self.memory_resets += not self.slots.written()
            leaving.is_left = True
            self.leaving = None
        self.on_change()

    def not_needed_at_old(self, slots: Iterable[int]) -> None:
        """What these slots have at the old home is stale. Needs the lock."""
        if self.leaving:
            slots = list(slots)
            self.slots.at_old_home.difference_update(slots)
            self.former.mark_stale(self.leaving, slots)

    def note_tag(self, tag: bytes) -> None:
        """Bytes of this tag are on their way to the home. Needs the lock."""
        if self._tags is not None:
            self._tags.add(tag)
            if len(self._tags) > TAGS_MAX:
                self._tags = None

    # Closing

    def lose(self, client: ShardClient, error: Exception) -> None:
        with self.lock:
            if self.client is client:
                log.warning("Shard %s is lost: %s", self.name, error)
                self.client, self.lost_because = None, str(error)
            elif self.leaving and self.leaving.client is client:
                log.warning("The old home of shard %s is lost during the move: %s", self.name, error)
                self.leaving.client, self.leaving.reason = None, str(error)
        client.close()
        self.on_change()

    def close(self) -> None:
        self.is_closed.set()
        if self._note:
            self._write_note(self._note)
        with self.lock:
            client, self.client, self.leaving = self.client, None, None
        if client:
            client.close()
        self.former.close()

    def _write_note(self, note: Path) -> None:
        with self.writing, self.lock:
            client, is_whole = self.client, not self.slots.at_old_home
            if client is None or not is_whole:
                return
            try:
                client.wait_applied(self.number)
                write(note, ShardSnapshot(client.incarnation, client.applied, self.slots.dump()))
            except (Lost, NotApplied, OSError) as error:
                log.warning("The state of shard %s can't be saved for a restart: %s", self.name, error)


def empty(client: ShardClient) -> None:
    """Empty all slots: another driver, or an earlier process, may have left columns there that no purge
    would find. Raises Lost."""
    if client.delete(range(client.slots)) is not None:
        raise Lost("its slots could not be emptied")
