"""Requests that were sent to replicas and are not finished: what a replica has to do before it gets to
another.

Replicas are taken to compute prompts in the order of arrival. So of the oldest without a first token the
part is done that would be since it was sent, or since the first token before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from inference_brain.choice.candidates import IDLE, Load
from inference_brain.choice.choice import Choice
from inference_brain.choice.columns import Queues


class _Sent(NamedTuple):
    """A request without a first token. `seconds`: how long it takes when its turn has come."""

    tokens: float
    pairs: float
    seconds: float
    at: float


class _Replica:
    __slots__ = ("name", "pairs", "running", "tokens", "turn_at", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: dict[str, _Sent] = {}  # in the order of arrival
        self.running = 0
        self.tokens = self.pairs = 0.0
        self.turn_at = 0.0  # when the last first token came

    def drop(self, request: str) -> _Sent:
        sent = self.waiting.pop(request)
        self.tokens -= sent.tokens
        self.pairs -= sent.pairs
        return sent

    def load(self, now: float) -> Load:
        if not self.waiting:
            return Load(0.0, self.running) if self.running else IDLE
        oldest = next(iter(self.waiting.values()))
        elapsed = max(0.0, now - max(oldest.at, self.turn_at))
        left = max(0.0, 1.0 - elapsed / oldest.seconds) if oldest.seconds else 0.0
        return Load(
            waiting_tokens=max(0.0, self.tokens - (1.0 - left) * oldest.tokens),
            running=self.running,
            waiting=len(self.waiting),
            waiting_pairs=max(0.0, self.pairs - (1.0 - left) * oldest.pairs),
            overdue_seconds=max(0.0, elapsed - oldest.seconds),
        )


class _Columns:
    """What `_Replica.load` reckons with, of those among `names`, by their places there."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._places = {name: place for place, name in enumerate(names)}
        self._all = np.zeros((7, len(names)))
        self._running = np.zeros(len(names))
        self._waits: dict[int, None] = {}  # places of those that have a request without a first token

    def set(self, name: str, replica: _Replica | None) -> None:
        place = self._places.get(name)
        if place is None:
            return
        self._running[place] = replica.running if replica else 0
        if replica is None or not replica.waiting:
            self._waits.pop(place, None)
            return
        self._waits[place] = None
        oldest = next(iter(replica.waiting.values()))
        since = max(oldest.at, replica.turn_at)
        self._all[:, place] = (
            *(len(replica.waiting), replica.tokens, replica.pairs, since),
            *(oldest.tokens, oldest.pairs, oldest.seconds),
        )

    def queues(self, now: float) -> Queues:
        found = Queues.none(len(self.names))
        found.running[:] = self._running
        if self._waits:
            places = np.fromiter(self._waits, np.int64, len(self._waits))
            waiting, tokens, pairs, since, *oldest = self._all[:, places]
            oldest_tokens, oldest_pairs, seconds = oldest
            elapsed = np.maximum(0.0, now - since)
            part = np.ones(places.size)
            np.divide(elapsed, seconds, out=part, where=seconds > 0)
            done = 1.0 - np.maximum(0.0, 1.0 - part)
            found.tokens[places] = np.maximum(0.0, tokens - done * oldest_tokens)
            found.pairs[places] = np.maximum(0.0, pairs - done * oldest_pairs)
            found.overdue_seconds[places] = np.maximum(0.0, elapsed - seconds)
            found.waiting[places] = waiting
        return found


class Flights:
    """Of one brain, over all replicas of a model. As large as what admission lets in."""

    def __init__(self) -> None:
        self._columns: _Columns | None = None
        self._changed: set[str] = set()  # replicas that have something else than the columns have
        self._replicas: dict[str, _Replica] = {}
        self._waiting: dict[str, _Replica] = {}  # by request
        self._running: dict[str, _Replica] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def begin(self, request: str, choice: Choice, now: float) -> None:
        """The request was sent to the chosen replica. Raises ValueError if it is in flight already."""
        if request in self._waiting or request in self._running:
            raise ValueError(f"request {request} is in flight already")
        of = choice.chosen
        replica = self._replicas.setdefault(of.name, _Replica(of.name))
        self._changed.add(of.name)
        turn_seconds = of.fetch_seconds + of.compute_seconds
        replica.waiting[request] = _Sent(of.missed_tokens, of.pairs, turn_seconds, now)
        replica.tokens += of.missed_tokens
        replica.pairs += of.pairs
        self._waiting[request] = replica

    def first_token(self, request: str, now: float) -> None:
        """It has its first token; it is in the way of others less from now on. Once is enough."""
        if replica := self._waiting.pop(request, None):
            replica.drop(request)
            self._changed.add(replica.name)
            replica.turn_at = now
            replica.running += 1
            self._running[request] = replica

    def end(self, request: str) -> None:
        """It is finished, failed or was cancelled. Once is enough."""
        if replica := self._waiting.pop(request, None):
            replica.drop(request)
            self._changed.add(replica.name)
        elif replica := self._running.pop(request, None):
            replica.running -= 1
            self._changed.add(replica.name)
        self._forget_idle(replica)

    def _forget_idle(self, replica: _Replica | None) -> None:
        if replica and not replica.waiting:
            replica.tokens = replica.pairs = 0.0  # what rounding has left

    def load(self, name: str, now: float) -> Load:
        """What this brain has sent to a replica."""
        replica = self._replicas.get(name)
        return replica.load(now) if replica else IDLE

    def queues(self, names: Sequence[str], now: float) -> Queues:
        """What this brain has sent to these replicas, by their places. Whoever asks again gives the
        same list."""
        if self._columns is None or self._columns.names is not names:
            self._columns = _Columns(names)
            self._changed = set(self._replicas)
        for name in self._changed:
            self._columns.set(name, self._replicas.get(name))
        self._changed = set()
        return self._columns.queues(now)

    def loads(self, now: float) -> Mapping[str, Load]:
        """Of all replicas that something was sent to: what other brains are told."""
        return {name: replica.load(now) for name, replica in self._replicas.items()}

    def renew(self, name: str) -> None:
        """Another process serves this replica. Requests that the one before it has are no load of it."""
        self._replicas.pop(name, None)
        self._changed.add(name)

    def keep_only(self, names: frozenset[str]) -> None:
        """Forget replicas that are not served any more and have nothing in flight."""
        for name in [name for name in self._replicas if name not in names]:
            replica = self._replicas[name]
            if not replica.waiting and not replica.running:
                del self._replicas[name]
