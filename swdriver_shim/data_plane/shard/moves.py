"""How a shard moves to another agent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvss_agent.client import Lost
from swdriver_shim.data_plane.agent_control import PullResult
from swdriver_shim.data_plane.paths import PathSpec, TrafficCounter, path_between
from swdriver_shim.data_plane.shard.connections import HomeConnections, empty
from swdriver_shim.data_plane.shard.former_homes import FLUSH_SECONDS, Connect, FormerHome

log = logging.getLogger(__name__)

# Slots that are pulled at once: evicts to them wait meanwhile, so more are as long as that is soon done.
# How fast it goes is the business of the agent.
PULL_SLOTS_FIRST: Final = 1  # nobody knows yet how fast it goes
PULL_SLOTS_MAX: Final = 64
PULL_SECONDS: Final = 0.2
FLUSH_AHEAD_SECONDS: Final = 10.0  # for what waits in front of the old home's tier 2, at most
PULL_TRIES: Final = 5  # before the rest is given up
PULL_AGAIN_SECONDS: Final = 1.0  # after a pull that has failed
COUNT_MARGIN: Final = 1 << 32  # evicts between the creation of the new home and the start of the move

# Fetch these slots, all written once so many evicts are applied there. What is not done is tried again.
Pull = Callable[[Sequence[int], int], PullResult]


class ShardMover:
    """Moves one shard, in one thread at a time."""

    def __init__(self, homes: HomeConnections, traffic: TrafficCounter) -> None:
        self._homes = homes
        self._traffic = traffic

    def count_from(self) -> int:
        with self._homes.lock:
            # Evicts whose slots were emptied since count as well.
            return max(self._homes.slots.last_number(), self._homes.number) + COUNT_MARGIN

    def move(self, connect: Connect, pull: Pull, path: PathSpec | None) -> bool:
        homes = self._homes
        if connect == homes.connect:
            return homes.change_address(connect, path)
        self._flush_ahead()
        with homes.former.emptying:
            client = None
            try:
                client = connect()
                empty(client)  # it may be a home that was left before, or an earlier process's
            except Lost as error:
                if client:
                    client.close()
                log.warning("Shard %s can't move: %s", homes.name, error)
                return False
            with homes.writing:
                leaving, slots = homes.change_home(client, connect, path)
                homes.on_change()  # before anything is evicted there
        try:
            at, most = 0, PULL_SLOTS_FIRST
            while at < len(slots):
                began = time.monotonic()
                rest = self._pull(leaving, slots[at : at + most], pull)
                if rest is None:
                    break
                at += most
                most = _fitting(most, time.monotonic() - began)
                homes.is_closed.wait(rest)  # now, when no evict waits for it
        finally:
            homes.finish_move(leaving)
        return True

    def _flush_ahead(self) -> None:
        """What waits in front of the old home's tier 2 is a miss at the new one: most of it is behind
        before the shard moves, and the rest soon after it."""
        homes = self._homes
        client, until = homes.client, time.monotonic() + FLUSH_AHEAD_SECONDS
        if client is None:
            return
        try:
            while (left := client.flush()) != 0:
                homes.may_wait = True
                if time.monotonic() > until or homes.is_closed.wait(FLUSH_SECONDS):
                    log.info("Shard %s moves while %s columns wait in front", homes.name, left or "some")
                    return
        except Lost as error:
            homes.lose(client, error)

    def _pull(self, leaving: FormerHome, slots: Sequence[int], pull: Pull) -> float | None:
        """Have the new home fetch what is still at the old one. Returns how long to rest then; None
        where that is given up."""
        homes = self._homes
        for _ in range(PULL_TRIES):
            with homes.writing, homes.lock:
                batch = [slot for slot in slots if slot in homes.slots.at_old_home]
                if not batch:
                    return 0.0
                if homes.old is None or homes.is_closed.is_set():
                    return None
                homes.slots.begin_pull(batch)
                after = homes.slots.last_number(batch)
            is_done = False
            try:
                is_done, size, rest = pull(batch, after)
                self._traffic.add(path_between(homes.old_path, homes.path), "pull", size)
            finally:
                with homes.lock:
                    if is_done:
                        homes.not_needed_at_old(batch)
                    else:
                        leaving.unsure.update(batch)  # it may still be running
                    homes.slots.end_pull()
            if is_done:
                return rest
            homes.is_closed.wait(PULL_AGAIN_SECONDS)
        return None


def _fitting(slots: int, seconds: float) -> int:
    """How many to pull next, after so many took so long: at most twice as many."""
    fits = int(slots * PULL_SECONDS / max(seconds, PULL_SECONDS / 2))
    return min(PULL_SLOTS_MAX, max(1, fits))
