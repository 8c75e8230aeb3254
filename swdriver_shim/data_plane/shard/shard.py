"""The data plane of one shard: bytes in and out of the slots that the ledger has chosen.

A shard knows which evict wrote each slot, so that a refill gets exactly those bytes, sealed, or a miss;
and where each slot's bytes are while it moves to another agent. A lost agent costs misses and nothing
else: no method raises because of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kvss_agent.client import Evict, Header, Lost, Miss, NotApplied, ShardClient
from swdriver_shim.data_plane.paths import PathSpec
from swdriver_shim.data_plane.shard.columns import RefillColumn
from swdriver_shim.data_plane.shard.connections import HomeConnections
from swdriver_shim.data_plane.shard.former_homes import Connect
from swdriver_shim.data_plane.shard.moves import Pull, ShardMover
from swdriver_shim.data_plane.shard.reads import ShardReader
from swdriver_shim.data_plane.shard.tier2 import ShardTier2
from swdriver_shim.data_plane.slow_transfers import TransferMetrics


class Shard:
    """`ShardControl`, where methods are described that are not described here; and evicts and refills.

    All methods may be called from any thread; evicts are taken one after the other.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        notes: Path | None = None,
        path: PathSpec | None = None,
        earlier_homes: Sequence[Connect] = (),
    ) -> None:
        """`notes`: a directory for what the next process continues with (`snapshot`). `path`: how bytes
        get to the home. `earlier_homes`: where an earlier process may have left bytes."""
        self.name = name
        self._homes = HomeConnections(name, connect, notes, path, earlier_homes, self._clear_unwritten)
        self._metrics = TransferMetrics()
        self._mover = ShardMover(self._homes, self._metrics.traffic)
        self._reader = ShardReader(self._homes, self._metrics)
        self.open = self._homes.open
        self.close = self._homes.close
        self.count_from = self._mover.count_from
        tier2 = ShardTier2(self._homes)
        self.exists, self.spill, self.recall = tier2.exists, tier2.spill, tier2.recall
        self.borrow, self.delete, self.purge = tier2.borrow, tier2.delete, tier2.purge
        self.fetch, self.view = self._reader.fetch, self._reader.view
        self.transfer = self._reader.transfer
        self.may_be_elsewhere = self._homes.former.may_hold
        self.empty_former_homes = self._homes.former.empty
        self.set_agents = self._homes.former.follow_agents
        self.traffic = self._metrics.traffic.counted
        self.take_slowest = self._metrics.slowest.take

    # State

    @property
    def on_change(self) -> Callable[[], None]:
        return self._homes.on_change

    @on_change.setter
    def on_change(self, callback: Callable[[], None]) -> None:
        self._homes.on_change = callback

    @property
    def slots(self) -> int | None:
        client = self._homes.client
        return client.slots if client else None

    @property
    def is_open(self) -> bool:
        client = self._homes.client
        return client is not None and client.lost is None

    @property
    def lost_because(self) -> str:
        return self._homes.lost_because

    @property
    def moves(self) -> int:
        return self._homes.moves

    @property
    def memory_resets(self) -> int:
        return self._homes.memory_resets

    # Evicts and refills

    def evict(self, columns: Sequence[Evict], request: str = "") -> bool:
        """Write these columns of one org to their slots, in this order. Returns False if the agent is
        lost. `request`: the name of the request that they are for, if it has one."""
        homes, slots = self._homes, self._homes.slots
        with homes.writing:
            with homes.lock:
                slots.wait_for_pull(column.slot for column in columns)
                client = homes.client
                if client is None:
                    return False
                slots.grow(max(column.slot for column in columns))
                homes.note_tag(columns[0].tag)
                path = homes.path
            began = time.perf_counter()
            try:
                last = client.evict_batch(columns)
            except Lost as error:
                homes.lose(client, error)
                return False
            seconds = time.perf_counter() - began
            with homes.lock:
                homes.number = last
                for number, column in enumerate(columns, last - len(columns) + 1):
                    slots.set_number(column.slot, number)
                if homes.leaving:
                    homes.not_needed_at_old(column.slot for column in columns)
        size = sum([len(column.payload) for column in columns])
        self._metrics.record("out", path, seconds, columns, size, request)
        return True

    def refill(self, columns: Sequence[RefillColumn], request: str = "") -> list[Miss | None]:
        """Read these columns of one org, and check them. For each returns None, or why it is missed; its
        memory may hold anything then."""
        found = self.fetch(columns, request)
        return [_checked(answer, column) for answer, column in zip(found, columns, strict=True)]

    # Clears

    def clear(self, slots: Sequence[int], *, scrub: bool) -> bool:
        """Empty these slots where their bytes are read from. Returns whether that is done. Other homes
        may still hold older bytes of them: `may_be_elsewhere`."""
        homes = self._homes
        with homes.writing:
            with homes.lock:
                homes.slots.wait_for_pull(slots)
                client, old = homes.client, homes.old
                if client is None:
                    return False
            # The old home has all of them, also those that have been pulled or evicted anew. It goes
            # first, so that a running pull brings nothing from there afterwards.
            if old and not self._clear_old(old, slots, scrub=scrub):
                return False
            if not self._delete(client, slots, scrub=scrub):
                return False
            with homes.lock:
                if homes.old is not old or old is None:
                    homes.not_needed_at_old(slots)
                for slot in slots:
                    homes.slots.at_old_home.discard(slot)
                    homes.slots.clear(slot)
            return True

    def _clear_old(self, old: ShardClient, slots: Sequence[int], *, scrub: bool) -> bool:
        homes = self._homes
        try:
            if old.delete(list(slots), scrub=scrub):
                return False
        except Lost as error:
            homes.lose(old, error)  # its bytes are the business of `FormerHomes` from here on
            return True
        with homes.lock:
            if homes.leaving:
                homes.former.emptied_there(homes.leaving, slots)
        return True

    def _clear_unwritten(self, slots: Collection[int]) -> bool:
        """Empty those of these slots to which no evict is known: a late pull may have written to them.
        Returns whether that is done."""
        homes = self._homes
        with homes.writing:
            with homes.lock:
                homes.slots.wait_for_pull(slots)
                client = homes.client
                late = [slot for slot in slots if not homes.slots.is_written(slot)]
            if client is None:
                return not late
            return self._delete(client, late, scrub=True)

    def _delete(self, client: ShardClient, slots: Sequence[int], *, scrub: bool) -> bool:
        try:
            return not client.delete(list(slots), scrub=scrub)
        except Lost as error:
            self._homes.lose(client, error)
            return False

    def wait_applied(self, seconds: float) -> bool:
        with self._homes.lock:
            client, number = self._homes.client, self._homes.number
        if not client:
            return False
        try:
            client.wait_applied(number, seconds)
        except (Lost, NotApplied):
            return False
        return True

    # Moves and former homes

    def move(self, home: Connect, pull: Pull, path: PathSpec | None = None) -> bool:
        return self._mover.move(home, pull, path)

    def end_move(self) -> None:
        """Before `close`: a move that is under way ends with what it has pulled, as soon as it can."""
        self._homes.is_closed.set()

    def left_to_move(self) -> int:
        return len(self._homes.slots.at_old_home)

    def set_path(self, path: PathSpec | None) -> None:
        self._homes.path = path

    @property
    def has_former_homes(self) -> bool:
        return bool(self._homes.former)

    @property
    def former_homes(self) -> list[str]:
        return self._homes.former.shown


def _checked(answer: Header | Miss, column: RefillColumn) -> Miss | None:
    if isinstance(answer, Miss):
        return answer
    return None if answer.tokens == column.tokens else Miss.STALE
