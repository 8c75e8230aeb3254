"""Who may be connected: many places for peers that have proved who they are, few for strangers.

Every connection begins as a stranger. A stranger never takes a place of a proven peer, so a flood of
strangers costs strangers only: it is always possible to enter, since the oldest stranger of the origin
that has the most makes way. Whoever proves an owner's name (a driver, an org, the controller) moves to
the places of the proven, of which some are reserved for each owner.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Places:
    """How many connections there may be."""

    strangers_max: int = 128
    strangers_per_origin: int = 32
    proven_max: int = 1024
    reserved_per_owner: int = 16  # which nobody else can take; fewer where there are many owners


P = TypeVar("P", bound=Hashable)


class Admission(Generic[P]):
    """The places, and who has them. All methods may be called from any thread."""

    def __init__(
        self, places: Places | None = None, owners: Callable[[], Collection[str]] = tuple
    ) -> None:
        """`owners`: for whom places are reserved, as of now."""
        self.places = places or Places()
        self.displaced = 0  # strangers that had to make way
        self.refused = 0  # proven peers for whom there was no place
        self._owners = owners
        self._lock = threading.Lock()
        self._origins: dict[str, dict[P, None]] = {}  # strangers, the oldest first
        self._where: dict[P, str] = {}  # the origin of each stranger
        self._proven: dict[P, str] = {}  # the owner of each
        self._held: Counter[str] = Counter()  # by owner

    @property
    def strangers(self) -> int:
        return len(self._where)

    @property
    def proven(self) -> int:
        return len(self._proven)

    def enter(self, peer: P, origin: str) -> P | None:
        """Give this peer a stranger's place. Whom it displaces: the caller has to end that one."""
        with self._lock:
            displaced = self._in_the_way(origin)
            if displaced is not None:
                self._forget_stranger(displaced)
                self.displaced += 1
            self._origins.setdefault(origin, {})[peer] = None
            self._where[peer] = origin
            return displaced

    def prove(self, peer: P, owner: str) -> bool:
        """This peer is who it says. False if it was displaced meanwhile, or its owner has no place left:
        the caller has to end it. A peer that is proven already keeps its place."""
        with self._lock:
            if peer in self._proven:
                return True
            if peer not in self._where or not self._has_place(owner):
                self.refused += peer in self._where
                return False
            self._forget_stranger(peer)
            self._proven[peer] = owner
            self._held[owner] += 1
            return True

    def leave(self, peer: P) -> None:
        """Its connection has ended. Does nothing if it was displaced."""
        with self._lock:
            if peer in self._where:
                self._forget_stranger(peer)
            owner = self._proven.pop(peer, None)
            if owner is not None:
                self._held[owner] -= 1
                self._held += Counter()  # drops those that hold nothing

    def _in_the_way(self, origin: str) -> P | None:
        """The stranger that has to go before one more of this origin comes; None if there is room."""
        places = self.places
        if len(self._origins.get(origin, ())) >= places.strangers_per_origin:
            return next(iter(self._origins[origin]))
        if len(self._where) >= places.strangers_max:
            largest = max(self._origins, key=lambda one: len(self._origins[one]))
            return next(iter(self._origins[largest]))
        return None

    def _forget_stranger(self, peer: P) -> None:
        origin = self._where.pop(peer)
        del self._origins[origin][peer]
        if not self._origins[origin]:
            del self._origins[origin]

    def _has_place(self, owner: str) -> bool:
        owners = {*self._owners(), owner}
        reserved = min(self.places.reserved_per_owner, self.places.proven_max // len(owners))
        free = self.places.proven_max - len(self._proven)
        if self._held[owner] >= reserved:
            free -= sum(max(0, reserved - self._held[one]) for one in owners if one != owner)
        return free > 0
