"""The first of many requests with the same long uncached prefix goes ahead; the others wait for it.

Pure. Prefixes are compared by keys that include the org, so nobody waits for another org's request or
learns of it. A follower waits at most as long as it would take to compute what it waits for. It is set
free when the leader has its first token, and then knows where that went; or when the leader ends without
one, and then the next of them leads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from inference_brain.admission.ticket import Ticket

TOKENS_MIN: Final = 1024  # that are not computed twice; for fewer nobody waits
LANDED_SECONDS: Final = 2.0  # for which a prefix is known here before its replica's cache map has it
FLIGHTS_MAX: Final = 10_000  # of one model; further requests lead nobody
KEYS_MAX: Final = 1024  # of one flight

T = TypeVar("T")


class Followed(NamedTuple):
    """Where a prefix of a request was computed just now, and how many tokens it has."""

    replica: str
    tokens: int


@dataclass(eq=False, slots=True)
class Flight(Generic[T]):
    """A prefix that is being computed, or was lately."""

    leader: T
    org: str
    keys: list[tuple[str, bytes]]
    replica: str = ""
    landed_at: float | None = None
    followers: set[T] = field(default_factory=set)


class Flights(Generic[T]):
    """The flights of one model."""

    def __init__(self) -> None:
        self.led = 0
        self.waited = 0
        self.gave_up = 0
        self._by_key: dict[tuple[str, bytes], Flight[T]] = {}
        self._by_leader: dict[T, Flight[T]] = {}
        self._by_follower: dict[T, Flight[T]] = {}
        self._landed: deque[Flight[T]] = deque()

    def __len__(self) -> int:
        return len(self._by_leader)

    def seconds_to_wait(self, ticket: Ticket, now: float) -> tuple[float, Flight[T] | None]:
        """How long a request should wait for which flight; 0 if for none."""
        flight, tokens = self._shared(ticket, now)
        if flight is None or flight.landed_at is not None or ticket.compute_rate <= 0:
            return 0.0, None
        saved = tokens - _cached(ticket)
        return (saved / ticket.compute_rate, flight) if saved >= TOKENS_MIN else (0.0, None)

    def follow(self, follower: T, flight: Flight[T]) -> None:
        self.waited += 1
        flight.followers.add(follower)
        self._by_follower[follower] = flight

    def give_up(self, follower: T) -> None:
        """It does not wait any longer."""
        if flight := self._by_follower.pop(follower, None):
            flight.followers.discard(follower)

    def followed(self, ticket: Ticket, now: float) -> Followed | None:
        """Where a prefix of it has been computed just now."""
        flight, tokens = self._shared(ticket, now)
        if flight is None or flight.landed_at is None or not flight.replica:
            return None
        return Followed(flight.replica, tokens)

    def lead(self, leader: T, ticket: Ticket, followed: Followed | None) -> None:
        """It goes ahead: whoever shares what it computes may wait for it."""
        cached = max(_cached(ticket), followed.tokens if followed else 0)
        first = cached // ticket.chain_tokens
        keys = [(ticket.org, key) for key in ticket.chain[first : first + KEYS_MAX]]
        if len(keys) * ticket.chain_tokens < TOKENS_MIN or len(self) >= FLIGHTS_MAX:
            return
        flight = self._by_leader[leader] = Flight(leader, ticket.org, keys)
        for key in keys:
            there = self._by_key.get(key)
            if there is None or there.landed_at is not None:
                self._by_key[key] = flight

    def routed(self, leader: T, replica: str) -> None:
        if flight := self._by_leader.get(leader):
            flight.replica = replica

    def landed(self, leader: T, now: float) -> set[T]:
        """The leader has its first token. Returns who need not wait any longer."""
        flight = self._by_leader.pop(leader, None)
        if flight is None:
            return set()
        flight.landed_at = now
        self._landed.append(flight)
        return self._release(flight)

    def failed(self, leader: T) -> set[T]:
        """The leader has ended without a first token. Returns who need not wait any longer."""
        flight = self._by_leader.pop(leader, None)
        if flight is None:
            return set()
        self._drop(flight)
        return self._release(flight)

    def forget(self, org: str | None) -> None:
        """What an org's prompts have in common is not known any more; without one, of no org. Those who
        wait for each other still do."""
        for flight in (*self._by_leader.values(), *self._landed):
            if org in (None, flight.org):
                self._drop(flight)
                flight.keys.clear()

    def _release(self, flight: Flight[T]) -> set[T]:
        followers, flight.followers = flight.followers, set()
        self.led += bool(followers)
        for follower in followers:
            del self._by_follower[follower]
        return followers

    def _shared(self, ticket: Ticket, now: float) -> tuple[Flight[T] | None, int]:
        """The flight with which it shares the most, and how many tokens those are."""
        while self._landed and now - (self._landed[0].landed_at or 0) > LANDED_SECONDS:
            self._drop(self._landed.popleft())
        if not self._by_key:
            return None, 0
        org, chain = ticket.org, ticket.chain
        least = (_cached(ticket) + TOKENS_MIN) // ticket.chain_tokens
        for at in range(len(chain) - 1, max(-1, least - 2), -1):
            if flight := self._by_key.get((org, chain[at])):
                return flight, (at + 1) * ticket.chain_tokens
        return None, 0

    def _drop(self, flight: Flight[T]) -> None:
        for key in flight.keys:
            if self._by_key.get(key) is flight:
                del self._by_key[key]


def _cached(ticket: Ticket) -> int:
    return 0 if ticket.uncached_tokens is None else ticket.prompt_tokens - ticket.uncached_tokens
