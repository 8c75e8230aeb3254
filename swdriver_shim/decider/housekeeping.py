"""The threads that keep the ledger in step with agents and with time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvss_agent.shard.core import BATCH_MAX
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.slots import Clear
from swdriver_shim.data_plane.shard.control import ShardControl
from swdriver_shim.data_plane.tier2 import Tier2Transfers
from swdriver_shim.decider.shard_threads import ShardThreads
from swdriver_shim.fair_lock import FairLock

log = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS: Final = 0.2
CLEARS_AT_ONCE: Final = 64


class Housekeeper:
    def __init__(
        self,
        ledger: Ledger,
        lock: FairLock,
        shards: ShardThreads,
        tier2: Tier2Transfers,
        *,
        clock: Callable[[], float],
        woken: threading.Event,
    ) -> None:
        """`lock` is the ledger's. `woken` is set when there is something to do."""
        self._ledger = ledger
        self._lock = lock
        self._shards = shards
        self._tier2 = tier2
        self._clock = clock
        self._woken = woken
        self.wake = woken.set
        self._stop = threading.Event()
        self._progress = threading.Condition()  # notified after each round
        self._resets = [[0] * len(of) for of in shards.groups]
        self._moves = 0
        self._unknown: dict[int, list[int]] = {}  # slots to empty before anything is served, by group
        self._emptiers = ThreadPoolExecutor(shards.count, thread_name_prefix="former homes")
        self._emptying: set[str] = set()  # shards
        self._threads = [
            threading.Thread(target=self._run, name="housekeeping", daemon=True),
            threading.Thread(target=self._run_sweeper, name="sweeping", daemon=True),
        ]

    def start(self, unknown: dict[int, list[int]]) -> None:
        """`unknown`: slots of each group that have to be emptied before anything is served."""
        self._unknown = unknown
        self._follow_shards()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads. Nothing is served from here on, and `wait_for` returns."""
        self._stop.set()
        self.wake()
        for thread in self._threads:
            thread.join()
        with self._lock:
            self._ledger.is_reachable = False
        self._notify()

    def close(self) -> None:
        self._emptiers.shutdown(cancel_futures=True)

    @property
    def has_begun(self) -> bool:
        """Whether all slots of unknown content have been emptied."""
        return not self._unknown

    def wait_for(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Wait until it is done, at most so long. Whether it is."""
        self.wake()
        with self._progress:
            self._progress.wait_for(lambda: self._stop.is_set() or is_done(), max(0.0, seconds))
        return not self._stop.is_set() and is_done()

    def _notify(self) -> None:
        with self._progress:
            self._progress.notify_all()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._woken.wait(HOUSEKEEPING_SECONDS)
            self._woken.clear()
            try:
                self._follow_shards()
                until = self._clock() + HOUSEKEEPING_SECONDS
                while not self._stop.is_set() and self._reclaim_some():
                    time.sleep(0)  # who waits for the interpreter, and not for the lock, has it now
                    if self._clock() >= until:  # shards and tier 2 have their turn
                        self.wake()
                        break
                self._tier2.keep_house()
                self._empty_former_homes()
            except Exception:
                log.exception("Housekeeping has failed, and continues")
                self._stop.wait(HOUSEKEEPING_SECONDS)
            self._notify()

    def _run_sweeper(self) -> None:
        """Apart from all that waits for shards: a slow path, or an agent that does not answer, makes no
        column outlive its TTL, no org exceed its quota, and no prompt be served that is deleted."""
        while not self._stop.wait(HOUSEKEEPING_SECONDS):
            try:
                has_more = True
                while has_more and not self._stop.is_set():
                    with self._lock:
                        has_more = self._ledger.sweep(self._clock())
                    time.sleep(0)  # as in `_run`
            except Exception:
                log.exception("Sweeping has failed, and continues")

    # Slots

    def _reclaim_some(self) -> bool:
        """Some of the long work; whether there is more. Requests come in between."""
        with self._lock:
            has_more = self._ledger.reclaim()
            clears = self._ledger.take_clears(CLEARS_AT_ONCE)
        if clears:
            has_more |= self._clear(clears)
        return has_more

    def _clear(self, clears: list[Clear]) -> bool:
        """Have agents empty these slots of one group. Whether all have."""
        group, scrub = clears[0].group, clears[0].scrub
        slots = [clear.slot for clear in clears]

        def clear_there(of: int, index: int) -> float | None:
            is_clear = self._shards.groups[of][index].clear(slots, scrub=scrub)
            return self._clock() if is_clear else None

        removals = {id(clear.removal): clear.removal for clear in clears if clear.removal}.values()
        times: dict[tuple[int, int], float | None] = {}
        is_done = False
        try:
            times = self._shards.each(clear_there, [group])
            is_done = None not in times.values()
        finally:
            with self._lock:
                for removal in removals:
                    for (of, index), at in times.items():
                        if at is not None:
                            removal.confirmed[self._shards.groups[of][index].name] = at
                self._ledger.finish_clears(clears, is_done=is_done)
        if any(removal.done for removal in removals):  # its caller does not wait for the rest
            self._notify()
        return is_done

    def _empty(self, group: int) -> None:
        """Empty slots of unknown content, which an earlier driver has left."""
        slots, shards = self._unknown[group], self._shards.groups[group]
        if any(shard.slots is None for shard in shards):
            return
        while slots:
            some = slots[-BATCH_MAX:]
            if not all(shard.clear(some, scrub=False) for shard in shards):
                return
            del slots[-BATCH_MAX:]
        del self._unknown[group]

    # Shards

    def _follow_shards(self) -> None:
        """Follow agents that come, leave, restart empty, and change the number of slots."""
        self._shards.open_lost()
        with self._lock:
            for group, shards in enumerate(self._shards.groups):
                resets = [shard.memory_resets for shard in shards]
                new = {
                    index for index, count in enumerate(resets) if count != self._resets[group][index]
                }
                if new:
                    self._resets[group] = resets
                    self._ledger.lose(group, frozenset(new))
                limits = [shard.slots for shard in shards if shard.slots is not None]
                if len(limits) == len(shards) and min(limits) != self._ledger.pools[group].limit:
                    self._ledger.set_slot_limit(group, min(limits))
            if (moves := sum(shard.moves for shard in self._shards.all)) != self._moves:
                self._moves = moves
                self._ledger.tier2.repeat_deletes()
        for group in list(self._unknown):
            self._empty(group)
        with self._lock:
            is_reachable = all(shard.slots is not None for shard in self._shards.all)
            self._ledger.is_reachable = is_reachable and not self._unknown

    def _empty_former_homes(self) -> None:
        """Each shard's in a thread of its own: one that can't be reached delays no other."""
        with self._lock:
            scrub = any(account.policy.scrub for account in self._ledger.accounts.values())
        for shard in self._shards.all:
            if shard.has_former_homes and shard.name not in self._emptying:
                self._emptying.add(shard.name)
                self._emptiers.submit(self._empty_homes_of, shard, scrub)

    def _empty_homes_of(self, shard: ShardControl, scrub: bool) -> None:  # noqa: FBT001
        try:
            shard.empty_former_homes(scrub=scrub)
        except Exception:
            log.exception("Former homes of %s can't be emptied; they are tried again", shard.name)
        finally:
            self._emptying.discard(shard.name)
        self._notify()
