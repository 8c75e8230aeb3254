"""What lies in front of a store, what of it waits to be copied behind, and what is on its way there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvss_agent.tier2.address import Address, Part, part_of
from kvss_agent.tier2.backend import Found
from kvss_agent.tier2.index import Caps, Index, Ticket


@dataclass(frozen=True, slots=True)
class Lone:
    """A column that is in front alone."""

    since: float  # it was written
    bytes: int


@dataclass(slots=True)
class Promotion:
    """What was read behind and is on its way to the front."""

    bytes: int
    content: memoryview | None = None  # None: it is being copied


class Contents:
    """Changed with the lock of the claims held: no method here takes it. Where a column is may be asked
    without it; who has no claim of the column knows how that was a moment ago."""

    def __init__(self, cap_bytes: int, *, can_displace_waiting: bool) -> None:
        self.index = Index(Caps(cap_bytes, cap_bytes))
        self.lone: dict[Address, Lone] = {}  # what is waiting, the oldest first
        self.promotions: dict[Address, Promotion] = {}
        self.promoting_bytes = 0
        self._can_displace_waiting = can_displace_waiting
        self._lone_bytes: Counter[bytes] = Counter()  # of each org, those being written included

    @property
    def waiting_bytes(self) -> int:
        return self._lone_bytes.total()

    def addresses(self) -> Iterator[Address]:
        return (address for address, _ in self.index.sizes())

    def parts(self) -> set[Part]:
        """The shards with columns here."""
        return set(map(part_of, self.addresses()))

    def set_caps(self, caps: Caps) -> None:
        total = self.index.caps.total
        orgs = {tag: min(total, cap) for tag, cap in caps.orgs.items()}
        self.index.set_caps(Caps(total, min(total, caps.org), orgs))

    # Coming

    def adopt(self, found: Found, *, waits: bool) -> None:
        """Its file has been listed."""
        is_new = self.index.adopt(found.address, found.bytes, written=found.modified, beyond_caps=True)
        if is_new and waits:
            self._lone_bytes[found.address.tag] += found.bytes
            self._wait(found.address, Lone(found.modified, found.bytes))

    def reserve(self, address: Address, size: int, *, waits: bool) -> Ticket | None:
        """Room for a column that is not here. None: there is none."""
        if self.index.knows(address) or self.index.is_busy(address):
            return None
        if waits and not self._may_wait(address.tag, size):
            return None
        ticket = self.index.reserve(address, size)
        if ticket is not None and waits:
            self._lone_bytes[address.tag] += size
        return ticket

    def commit(self, ticket: Ticket, now: float, *, waits: bool) -> None:
        self.index.commit(ticket, now)
        if waits:
            self._wait(ticket.address, Lone(now, ticket.bytes))

    def cancel(self, ticket: Ticket, *, waits: bool) -> None:
        """It has not come."""
        self.index.cancel(ticket)
        if waits:
            self._free_lone(ticket.address.tag, ticket.bytes)

    def _may_wait(self, tag: bytes, size: int) -> bool:
        """Whether an org would have no more waiting then than nobody's waiting columns leave."""
        if self._can_displace_waiting:
            return True  # they make room
        left = self.index.caps.total - self._lone_bytes.total()
        return self._lone_bytes[tag] + size <= left - size

    def _wait(self, address: Address, lone: Lone) -> None:
        """What is to be copied behind makes no room before."""
        self.lone[address] = lone
        if not self._can_displace_waiting:
            self.index.begin_read(address)

    # Leaving

    def waits_no_more(self, address: Address) -> None:
        if lone := self.lone.pop(address, None):
            self._free_lone(address.tag, lone.bytes)
            if not self._can_displace_waiting:
                self.index.end_read(address)

    def conclude(self, victim: Address, *, has_left: bool) -> None:
        """Its removal was begun."""
        if has_left:
            self.waits_no_more(victim)
            self.index.finish_removal(victim)
        else:
            self.index.cancel_removal(victim)

    def lose(self, address: Address) -> None:
        """Its file is gone from the front."""
        self.index.remove(address)
        self.waits_no_more(address)

    def _free_lone(self, tag: bytes, size: int) -> None:
        self._lone_bytes[tag] -= size
        if not self._lone_bytes[tag]:
            del self._lone_bytes[tag]

    # On its way

    def begin_promotion(self, address: Address, size: int) -> Promotion:
        promotion = self.promotions[address] = Promotion(size)
        self.promoting_bytes += size
        return promotion

    def drop_promotion(self, address: Address) -> None:
        if (promotion := self.promotions.pop(address, None)) is not None:
            self.promoting_bytes -= promotion.bytes
