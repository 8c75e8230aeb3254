"""Who changes the files of which columns: one thread at a time, and none while they are purged."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator

from kvss_agent.tier2.address import Address, Scope


class Claims:
    """Whoever waits here holds no claims, so nobody waits for ever.

    `changed` is the lock of all that goes with claims: what is known of a column is brought up to date
    and its claim is released without letting go of it in between.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._claimed: set[Address] = set()
        self._closed: list[Scope] = []

    @contextlib.contextmanager
    def of(self, addresses: Collection[Address]) -> Iterator[None]:
        """All of them, once they are free."""
        with self.changed:
            self.changed.wait_for(lambda: all(map(self.is_free, addresses)))
            self._claimed.update(addresses)
        try:
            yield
        finally:
            self.release(addresses)

    def take(self, addresses: Collection[Address]) -> bool:
        """All of them, or none if one is not free."""
        with self.changed:
            if not all(map(self.is_free, addresses)):
                return False
            self._claimed.update(addresses)
            return True

    def release(self, addresses: Collection[Address]) -> None:
        with self.changed:
            self._claimed.difference_update(addresses)
            self.changed.notify_all()

    def is_free(self, address: Address) -> bool:
        return address not in self._claimed and not self.is_closed(address)

    def is_closed(self, address: Address) -> bool:
        return any(scope.covers(address) for scope in self._closed)

    @contextlib.contextmanager
    def closed_to(self, scope: Scope) -> Iterator[None]:
        """From now on nobody gets a claim there; begins when those that there are have been released."""
        with self.changed:
            self._closed.append(scope)
            self.changed.wait_for(lambda: not any(map(scope.covers, self._claimed)))
        try:
            yield
        finally:
            with self.changed:
                self._closed.remove(scope)
                self.changed.notify_all()
