"""Copying behind in the background what waits in front."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from typing import Final

from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed
from kvss_agent.tier2.front.disk import FrontDisk
from kvss_agent.tier2.front.faults import BEHIND
from kvss_agent.tier2.front.workers import Workers

FLUSHES: Final = 256  # that are begun by one `tidy`; one, as long as the store behind fails


class Flushes:
    """The threads rest for the budget of what is written behind."""

    def __init__(self, disk: FrontDisk) -> None:
        self._disk = disk
        self._contents = disk.contents
        self._workers = Workers("tier2-flush")
        self._ended = threading.Event()
        self._flushing: set[Address] = set()  # queued, or at it
        self.is_failing = False  # what was copied last

    def begin_some(self, addresses: Iterable[Address]) -> None:
        self.begin(itertools.islice(addresses, 1 if self.is_failing else FLUSHES))

    def begin_idle(self) -> None:
        """What waits and is not queued."""
        with self._disk.lock:
            left = [one for one in self._contents.lone if one not in self._flushing]
        self.begin_some(left)

    def begin(self, addresses: Iterable[Address]) -> None:
        for address in addresses:
            with self._disk.lock:
                if address not in self._contents.lone or address in self._flushing:
                    continue
                self._flushing.add(address)
            self._workers.submit(self._flush, address)

    def _flush(self, address: Address) -> None:
        with self._disk.lock:
            lone = self._contents.lone.get(address)
            if lone is None:
                self._flushing.discard(address)
                return
        rest = self._disk.background.book(lone.bytes, time.monotonic())
        if self._ended.wait(rest):
            return  # it waits in front for the next life
        with self._disk.lock:
            lone = self._contents.lone.get(address)
            if lone is None or not self._disk.claims.take([address]):
                self._flushing.discard(address)
                return  # it is gone, or its turn comes with the next `tidy`
        is_behind = is_lost = False
        try:
            if self._disk.copy_behind(address, lone.since):
                self._disk.waiting.hand_over(address.name, self._disk.copies)
                is_behind = True
            else:
                self._disk.waiting.delete([address.name])
                is_lost = True
            self.is_failing = False
        except Failed as failed:
            self.is_failing = True
            self._disk.faults.note(failed, BEHIND)
        finally:
            with self._disk.lock:
                self._flushing.discard(address)
                if is_behind:
                    self._contents.waits_no_more(address)
                elif is_lost:
                    self._contents.lose(address)
                self._disk.claims.release([address])

    def close(self) -> None:
        self._ended.set()
        self._workers.close()
