"""The originals of copies in front: others may have removed them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Backend, Failed, look_at
from kvss_agent.tier2.front.disk import FrontDisk
from kvss_agent.tier2.front.faults import LOOKING
from kvss_agent.tier2.front.workers import Workers

LOOKS: Final = 8  # by one `tidy`


class Originals:
    """They are looked for, some in turn: copies go whose originals are gone."""

    def __init__(self, disk: FrontDisk, behind: Backend, workers: Workers) -> None:
        self._disk, self._behind, self._workers = disk, behind, workers
        self._left: Iterator[Address] = iter(())  # to be looked for in this round
        self._looking: set[Address] = set()
        self._is_failing = False  # what was looked for last

    def begin(self) -> None:
        """Nothing while the last ones are under way."""
        if self._looking:
            return
        with self._disk.lock:
            looking = [*itertools.islice(self._left, 1 if self._is_failing else LOOKS)]
            if not looking:
                self._left = iter([*self._disk.contents.addresses()])
            self._looking.update(looking)
        for address in looking:
            self._workers.submit(self._look_for, address)

    def _look_for(self, address: Address) -> None:
        is_claimed = self._disk.claims.take([address])
        try:
            if is_claimed and address not in self._disk.contents.lone:
                if look_at(self._behind, address.name) is None:
                    self._disk.forget([address])
                self._is_failing = False
        except Failed as failed:
            self._is_failing = True
            self._disk.faults.note(failed, LOOKING)
        finally:
            with self._disk.lock:
                self._looking.discard(address)
                if is_claimed:
                    self._disk.claims.release([address])
