"""Which columns tier 2 holds, and for whom there is room: the part that decides, without any I/O.

A column is *idle*, *read*, *written* or *leaving*. Only an idle one can be evicted. Bytes count from the
moment when somebody is promised them until their file is gone: a writer gets a ticket that says which
columns have to be gone first, and nobody else can take the room that they leave. So files never exceed
a cap, whatever the order in which writers come and finish.

An org over its cap evicts its own oldest columns. If the store is full, the org pays that fills most
of its cap. So nobody makes room for a writer that fills more and has all of it in use. Columns that the
index learns of afterwards (another agent wrote them) are adopted if there is room; nothing is evicted
for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import Final

from kvss_agent.tier2.address import Address, Scope

LOOKS_MAX: Final = 10_000  # at an org's oldest columns, in one go: others wait for it
STALE_MAX: Final = 100  # ages of columns that are gone, and as many more as there are columns


@dataclass(frozen=True, slots=True)
class Caps:
    """How many bytes of files: in all, per org, and for certain orgs."""

    total: int
    org: int
    orgs: Mapping[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.total, self.org, *self.orgs.values()) < 0:
            raise ValueError("a cap is not negative")

    def of(self, tag: bytes) -> int:
        return self.orgs.get(tag, self.org)


@dataclass(frozen=True, slots=True)
class Limits:
    """For how many seconds a column may lie here; None for as long as there is room. Per org, and for
    certain orgs."""

    org: int | None = None
    orgs: Mapping[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min([*self.orgs.values(), 1 if self.org is None else self.org]) <= 0:
            raise ValueError("a time to live is a second or more")

    def of(self, tag: bytes) -> int | None:
        return self.orgs.get(tag, self.org)


@dataclass(slots=True)
class _Account:
    """Bytes held against a cap. `leaving` is the part of them that will be free soon."""

    cap: int
    held: int = 0
    leaving: int = 0

    def free(self) -> int:
        """Negative after the cap was lowered, until so much has left."""
        return self.cap - self.held

    def staying(self) -> int:
        return self.held - self.leaving


@dataclass(slots=True)
class _Org(_Account):
    idle: OrderedDict[Address, int] = field(default_factory=OrderedDict)  # the oldest use first
    coming: int = 0  # bytes that writers are promised of what is leaving
    written: dict[Address, float] = field(default_factory=dict)  # when
    # The same as a heap, since what others wrote is learnt of late. What is gone stays for a while.
    ages: list[tuple[float, Address]] = field(default_factory=list)

    def filled(self, more: int = 0) -> float:
        return (self.staying() + self.coming + more) / self.cap if self.cap else float("inf")

    def note(self, address: Address, written: float) -> None:
        self.written[address] = written
        heappush(self.ages, (written, address))
        self._tidy()

    def unnote(self, address: Address) -> None:
        self.written.pop(address, None)
        self._tidy()

    def _tidy(self) -> None:
        if len(self.ages) > 2 * len(self.written) + STALE_MAX:
            self.ages = [(when, address) for address, when in self.written.items()]
            heapify(self.ages)

    def overdue(self, until: float, most: int) -> dict[Address, float]:
        """Idle columns that were written until then, and when; the oldest first."""
        found: dict[Address, float] = {}
        entries = []
        for _ in range(LOOKS_MAX):
            if not self.ages or self.ages[0][0] > until or len(found) == most:
                break
            written, address = entry = heappop(self.ages)
            if self.written.get(address) == written:
                entries.append(entry)
                if address in self.idle:
                    found[address] = written
        for entry in entries:  # they stay until their files are gone, which may fail
            heappush(self.ages, entry)
        return found


@dataclass(eq=False, slots=True)
class Ticket:
    """Room for one column, once `victims` are gone."""

    address: Address
    bytes: int
    victims: dict[Address, int]
    claimed: tuple[int, int]  # of what was free: in the store, in the org
    started: bool = False


@dataclass(slots=True)
class _Reading:
    readers: int
    bytes: int  # 0: the index does not know this column


class Index:
    """Not for several threads, unless it says so."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self._store = _Account(caps.total)
        self._orgs: dict[bytes, _Org] = {}
        self._reading: dict[Address, _Reading] = {}
        self._writing: dict[Address, Ticket] = {}
        self._leaving: dict[Address, int] = {}
        self.gone: set[Address] | None = None  # what has left, while somebody wants to know

    # What is there

    @property
    def held(self) -> int:
        """Bytes of files, and those promised to writers."""
        return self._store.held

    @property
    def columns(self) -> int:
        """Any thread may ask."""
        known = sum(1 for reading in list(self._reading.values()) if reading.bytes)
        return known + sum(len(org.idle) for org in list(self._orgs.values()))

    def orgs(self) -> dict[bytes, tuple[int, int]]:
        """For each tag: bytes held, and its cap. Any thread may ask."""
        return {tag: (org.held, org.cap) for tag, org in list(self._orgs.items())}

    def knows(self, address: Address) -> bool:
        """Whether this column is there to be read."""
        reading = self._reading.get(address)
        return reading.bytes > 0 if reading else self._is_idle(address)

    def is_read(self, address: Address) -> bool:
        return address in self._reading

    def is_written(self, address: Address) -> bool:
        return address in self._writing

    def being_written(self) -> list[Address]:
        return [*self._writing]

    def is_leaving(self, address: Address) -> bool:
        return address in self._leaving

    def is_busy(self, address: Address) -> bool:
        """Whether somebody reads, writes or removes it."""
        return address in self._reading or address in self._writing or address in self._leaving

    def any_busy(self, scope: Scope) -> bool:
        busy = (*self._reading, *self._writing, *self._leaving)
        return any(scope.covers(address) for address in busy)

    def idle(self, scope: Scope | None = None) -> Iterator[Address]:
        """The columns that nobody uses, of a scope or all."""
        for tag, org in self._orgs.items():
            if scope is None or scope.tag in (None, tag):
                yield from (address for address in org.idle if scope is None or scope.covers(address))

    def sizes(self) -> Iterator[tuple[Address, int]]:
        """All that can be read, with the bytes of its files."""
        for org in self._orgs.values():
            yield from org.idle.items()
        yield from ((a, reading.bytes) for a, reading in self._reading.items() if reading.bytes)

    def known(self) -> list[Address]:
        """All that can be read or is about to leave, as it is now."""
        return [*chain.from_iterable(org.written for org in self._orgs.values())]

    def seen(self, address: Address) -> tuple[int, float] | None:
        """The bytes of its file, and when that was written, since 1970: 0 if nobody knows. None if it
        can't be read."""
        org = self._orgs.get(address.tag)
        if org is None:
            return None
        reading = self._reading.get(address)
        size = reading.bytes if reading else org.idle.get(address, 0)
        return (size, org.written.get(address, 0.0)) if size else None

    # Reading

    def touch(self, address: Address) -> None:
        """It was asked for: it is the last of its org to be evicted."""
        if self._is_idle(address):
            self._orgs[address.tag].idle.move_to_end(address)

    def begin_read(self, address: Address) -> None:
        """It is not evicted until `end_read`. May be unknown; is neither written nor leaving."""
        if reading := self._reading.get(address):
            reading.readers += 1
        else:
            self._reading[address] = _Reading(1, self._pop_idle(address))

    def end_read(self, address: Address) -> None:
        reading = self._reading[address]
        reading.readers -= 1
        if not reading.readers:
            del self._reading[address]
            if reading.bytes:
                self._org(address.tag).idle[address] = reading.bytes

    def remove(self, address: Address) -> None:
        """Its file is not there: somebody else removed it. Not for what is written or leaving."""
        held = self._pop_idle(address)
        if reading := self._reading.get(address):
            held, reading.bytes = reading.bytes, 0
        self._unnote(address)
        self._free(address.tag, held)

    def adopt(
        self, address: Address, size: int, *, written: float = 0.0, beyond_caps: bool = False
    ) -> bool:
        """Its file is there, and the index learns of it now. False if it is busy or there is no room.

        `beyond_caps` is for the start, when everything counts that is found; `trim` follows.
        """
        reading = self._reading.get(address)
        if self.knows(address) or (reading is None and self.is_busy(address)):
            return False
        org = self._org(address.tag)
        if not beyond_caps and size > min(org.free(), self._store.free()):
            self._drop_if_empty(address.tag)
            return False
        self._store.held += size
        org.held += size
        if reading:
            reading.bytes = size
        else:
            org.idle[address] = size
        org.note(address, written)
        return True

    def date(self, address: Address, written: float, listed: float, now: float) -> None:
        """Correct when its file was written, if a listing that began at `listed` found an earlier time.
        What was entered meanwhile may be another file."""
        org = self._orgs.get(address.tag)
        known = org.written.get(address, written) if org else written
        if org and written < known and not listed <= known <= now:  # later: by a clock that was ahead
            org.note(address, written)

    # Writing

    def reserve(self, address: Address, size: int) -> Ticket | None:
        """Room for a column that is neither known nor busy. None: there is none, or it would never fit.

        While a cap is exceeded there is none: what is leaving then leaves for good.

        The ticket's victims are leaving from now on. When their files are gone call `start`; write;
        then `commit`. Or `cancel`, at any time.
        """
        if self.knows(address) or self.is_busy(address):
            raise RuntimeError("a column is written by one at a time, and once")
        org = self._org(address.tag)
        free = min(org.free(), self._store.free())
        victims: dict[Address, int] = {}
        claimed = (size, size)
        if size > free:  # a cap that is exceeded has less than nothing free
            may = free >= 0 and size <= min(org.cap, self._store.cap)
            chosen = self._choose(org, size) if may else None
            if chosen is None:
                self._drop_if_empty(address.tag)
                return None
            victims = chosen
            own = sum(held for victim, held in victims.items() if victim.tag == address.tag)
            claimed = (max(0, size - sum(victims.values())), max(0, size - own))
        self._store.held += claimed[0]
        org.held += claimed[1]
        org.coming += size - claimed[1]
        ticket = self._writing[address] = Ticket(address, size, victims, claimed)
        return ticket

    def start(self, ticket: Ticket) -> bool:
        """Its victims are gone: what they held belongs to the writer now, and the rest to all.

        False if a cap was lowered since, and there is no room any more: nothing may be written.
        """
        for victim in ticket.victims:
            self.finish_removal(victim)
        org = self._org(ticket.address.tag)
        org.coming -= ticket.bytes - ticket.claimed[1]
        self._store.held += ticket.bytes - ticket.claimed[0]
        org.held += ticket.bytes - ticket.claimed[1]
        ticket.started = True
        return min(org.free(), self._store.free()) >= 0

    def commit(self, ticket: Ticket, written: float = 0.0) -> None:
        """The column is there."""
        del self._writing[ticket.address]
        org = self._org(ticket.address.tag)
        org.idle[ticket.address] = ticket.bytes
        org.note(ticket.address, written)

    def cancel(self, ticket: Ticket) -> None:
        """Nothing was written. Victims that may still be there are known again."""
        del self._writing[ticket.address]
        if ticket.started:
            self._free(ticket.address.tag, ticket.bytes)
            return
        for victim in reversed(ticket.victims):
            self.cancel_removal(victim)
        self._store.held -= ticket.claimed[0]
        org = self._org(ticket.address.tag)
        org.held -= ticket.claimed[1]
        org.coming -= ticket.bytes - ticket.claimed[1]
        self._drop_if_empty(ticket.address.tag)

    # Removing

    def begin_removal(self, address: Address) -> int:
        """Its file is about to be removed. How many bytes are known of it; it is not busy."""
        size = self._pop_idle(address)
        self._leaving[address] = size
        self._mark(address.tag, size)
        return size

    def finish_removal(self, address: Address) -> None:
        """Its file is gone."""
        size = self._leaving.pop(address)
        self._mark(address.tag, -size)
        self._unnote(address)
        self._free(address.tag, size)

    def _unnote(self, address: Address) -> None:
        if self.gone is not None:
            self.gone.add(address)
        if org := self._orgs.get(address.tag):
            org.unnote(address)

    def expire(self, limits: Limits, now: float, most: int) -> dict[Address, float]:
        """Columns that lie here for longer than their org allows, and for how much longer: they are
        leaving from now on. What is in use has its turn later."""
        expired: dict[Address, float] = {}
        for tag, org in self._orgs.items():
            seconds = limits.of(tag)
            if seconds is None:
                continue
            overdue = org.overdue(now - seconds, most - len(expired))
            expired |= {address: now - written - seconds for address, written in overdue.items()}
        for address in expired:
            self.begin_removal(address)
        return expired

    def cancel_removal(self, address: Address) -> None:
        """Its file could not be removed: it is the first of its org to be evicted next time."""
        size = self._leaving.pop(address)
        if size:
            self._mark(address.tag, -size)
            idle = self._orgs[address.tag].idle
            idle[address] = size
            idle.move_to_end(address, last=False)

    def trim(self) -> dict[Address, int]:
        """What has to leave so that all caps hold, and its bytes; it is leaving from now on."""
        leaving: dict[Address, int] = {}
        for org in self._orgs.values():
            while org.staying() > org.cap and org.idle:
                self._evict(org, leaving)
        while self._store.staying() > self._store.cap and (loser := self._loser()):
            self._evict(loser, leaving)
        return leaving

    def shed(self, size: int) -> dict[Address, int]:
        """As `trim`: some columns, of so many bytes in all, that leave though no cap asks for it. No
        fragments: the agent whose column they are of counts on them, and would store them again in
        place of others."""
        leaving: dict[Address, int] = {}
        orgs = sorted(self._orgs.values(), key=lambda org: org.filled(0), reverse=True)
        for address in [one for org in orgs for one in islice(org.idle, 1 + LOOKS_MAX // len(orgs))]:
            if sum(leaving.values()) >= size:
                break
            if not address.is_fragment:
                leaving[address] = self.begin_removal(address)
        return leaving

    def exceeds(self, tag: bytes) -> bool:
        """Whether the store or this org holds more than its cap: it was lowered a moment ago."""
        org = self._orgs.get(tag)
        return self._store.free() < 0 or (org is not None and org.free() < 0)

    def any_exceeds(self) -> bool:
        """As `exceeds`, for the store and all orgs."""
        return self._store.free() < 0 or any(org.free() < 0 for org in self._orgs.values())

    def set_caps(self, caps: Caps) -> None:
        """Other caps from now on; `trim` follows."""
        self.caps = caps
        self._store.cap = caps.total
        for tag, org in self._orgs.items():
            org.cap = caps.of(tag)

    def tags(self) -> list[bytes]:
        """Of those that hold something, or are promised room."""
        return list(self._orgs)

    # Inside

    def _org(self, tag: bytes) -> _Org:
        if tag not in self._orgs:
            self._orgs[tag] = _Org(self.caps.of(tag))
        return self._orgs[tag]

    def _drop_if_empty(self, tag: bytes) -> None:
        if not self._orgs[tag].held and not self._orgs[tag].coming:
            del self._orgs[tag]

    def _is_idle(self, address: Address) -> bool:
        org = self._orgs.get(address.tag)
        return org is not None and address in org.idle

    def _pop_idle(self, address: Address) -> int:
        org = self._orgs.get(address.tag)
        return org.idle.pop(address, 0) if org else 0

    def _free(self, tag: bytes, size: int) -> None:
        if size:
            self._store.held -= size
            self._orgs[tag].held -= size
            self._drop_if_empty(tag)

    def _mark(self, tag: bytes, size: int) -> None:
        if size:
            self._store.leaving += size
            self._orgs[tag].leaving += size

    def _evict(self, org: _Org, leaving: dict[Address, int]) -> int:
        """Add an org's oldest column to what is leaving; its bytes."""
        address, size = org.idle.popitem(last=False)
        self._leaving[address] = leaving[address] = size
        self._mark(address.tag, size)
        return size

    def _loser(self, writer: _Org | None = None, more: int = 0) -> _Org | None:
        """Who fills most of its cap: of those that have something to give, with what the writer is about
        to write; and the writer, with what it has, if that is all in use."""

        def filled(org: _Org) -> tuple[float, bool]:
            return org.filled(more if org is writer and org.idle else 0), org is writer

        return max(
            (org for org in self._orgs.values() if org.idle or org is writer), key=filled, default=None
        )

    def _choose(self, org: _Org, size: int) -> dict[Address, int] | None:
        """The victims for so many bytes more of this org, leaving already. None: they don't suffice."""
        chosen: dict[Address, int] = {}
        lacking_org, lacking_store = size - org.free(), size - self._store.free()
        while lacking_org > 0 or lacking_store > 0:
            loser = org if lacking_org > 0 else self._loser(org, size)
            if loser is None or not loser.idle:
                for address in reversed(chosen):
                    self.cancel_removal(address)
                return None
            freed = self._evict(loser, chosen)
            lacking_store -= freed
            lacking_org -= freed if loser is org else 0
        return chosen
