"""The streams that records come in: one that many share, and one for each process with a Redis user of
its own. Members of the consumer group read all of them, none at the cost of another.

A process with its own user can add to its own stream and do nothing else, so its flood fills, and is cut
off in, that stream only.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, cast

import redis

from telemetry.records import GROUP, LATE_SECONDS_MAX, OWN_STREAM, OWN_STREAM_LENGTH_MAX, STREAM

BATCH_MAX: Final = 2000  # records, of all streams together
BLOCK_MS: Final = 500
IDLE_MS_BEFORE_TAKEN_OVER: Final = 30_000
LOOK_SECONDS: Final = 2.0  # between two looks for new streams, and for those that are too long
LOOKS_FOR_LEFT_BEHIND: Final = 6  # in the time that a batch may be idle
MEMBERS_SECONDS: Final = 600.0  # between two looks for members that are gone
MEMBER_IDLE_MS_MAX: Final = 3_600_000  # those that are there look each few seconds
STREAMS_MAX: Final = 5_000
_SCANNED_AT_ONCE: Final = 1_000
_FORGOTTEN_AT_ONCE: Final = 1_000

Fields = dict[bytes, bytes]


class Entry(NamedTuple):
    """A record as it was added, and where."""

    stream: str
    id: bytes
    fields: Fields
    deliveries: int = 1  # counted only where the id says nothing about how long it has waited

    @property
    def writer(self) -> str:
        """The user that the stream belongs to; nobody of the one that is shared."""
        return self.stream.removeprefix(OWN_STREAM) if self.stream != STREAM else ""

    @property
    def bytes(self) -> int:
        """Of all of its fields."""
        return sum(len(name) + len(value) for name, value in self.fields.items())

    def arrived_at(self, now: float) -> float:
        """By its id, which is the writer's choice: so it is within the last day, whatever it says."""
        return min(max(self._says, now - LATE_SECONDS_MAX), now)

    def is_ahead(self, now: float) -> bool:
        """Whether it says that it is of the future."""
        return self._says > now

    @property
    def _says(self) -> float:
        return int(self.id.split(b"-")[0]) / 1000


class Streams:
    """All streams, for one member of the group."""

    def __init__(self, client: redis.Redis, consumer: str) -> None:
        """`client` gives answers as bytes."""
        self.cut_off: Counter[str] = Counter()  # records by writer, until somebody takes them
        self.client = client
        self._consumer = consumer
        self._names: list[str] = [STREAM]
        self._lengths: dict[str, int] = {}  # of the streams that have the group
        self._look_at = 0.0
        self._claimed_at = 0.0
        self._members_at = -MEMBERS_SECONDS

    @property
    def waiting(self) -> int:
        """Records that are not written, as far as is known."""
        return sum(self._lengths.values())

    def join(self) -> None:
        """Make the group where it is not there, whatever was there before: a Redis that was emptied, or
        took the place of another, knows of none. It begins with the oldest record there is."""
        self._lengths.clear()
        self.look()

    def read(self) -> list[Entry]:
        """What another member took and never finished; else what is new, waiting for it at most
        BLOCK_MS."""
        if (now := time.monotonic()) >= self._look_at + LOOK_SECONDS:
            self.look()
        known = self._names
        try:
            if now >= self._claimed_at + IDLE_MS_BEFORE_TAKEN_OVER / 1000 / LOOKS_FOR_LEFT_BEHIND:
                self._claimed_at = now
                if left := self._left_behind():
                    return left
            return self._fresh()
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self.look()
            if set(known) <= set(self._names):
                raise  # all are there, and have lost their groups
            return []  # a process was removed, and its stream with it: the others are read next time

    def done(self, entries: Iterable[Entry]) -> None:
        """What is written is taken out of its stream: the length is what waits."""
        by_stream = _by_stream(entries)
        pipe = self.client.pipeline(transaction=False)
        for stream, ids in by_stream.items():
            pipe.xack(stream, GROUP, *ids)
            pipe.xdel(stream, *ids)
            pipe.xlen(stream)
        self._lengths.update(zip(by_stream, map(int, pipe.execute()[2::3]), strict=True))

    def look(self) -> None:
        """Which streams there are, each with the group and none too long."""
        self._look_at = time.monotonic()
        names = [STREAM, *own_streams(self.client)]
        if new := [name for name in names if name not in self._lengths]:
            self._make_groups(new)
        self._lengths = _lengths(self.client, names)
        self._names = names
        for name in names[1:]:
            if self._lengths[name] > OWN_STREAM_LENGTH_MAX:
                cut = self.client.xtrim(name, maxlen=OWN_STREAM_LENGTH_MAX, approximate=False)
                self.cut_off[name.removeprefix(OWN_STREAM)] += cut
                self._lengths[name] = OWN_STREAM_LENGTH_MAX
        self._forget_cut_off(names[1:])
        if self._look_at >= self._members_at + MEMBERS_SECONDS:
            self._members_at = self._look_at
            self._forget_members(names)

    # Inside

    def _make_groups(self, names: list[str]) -> None:
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.xgroup_create(name, GROUP, id="0", mkstream=True)
        for answer in pipe.execute(raise_on_error=False):
            if isinstance(answer, redis.RedisError) and "BUSYGROUP" not in str(answer):
                raise answer

    def _forget_cut_off(self, names: list[str]) -> None:
        """Redis remembers what was delivered and is not done, also when it is not there any more: a
        writer can cut off its own stream, and fill the memory with what is remembered of it."""
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.xpending(name, GROUP)
        for name, found in zip(names, pipe.execute(raise_on_error=False), strict=True):
            if isinstance(found, redis.RedisError):
                continue  # the stream has just been removed
            left = found["pending"] - self._lengths[name]
            while left > 0 and (gone := self._forget_some(name)):
                left -= gone

    def _forget_members(self, names: list[str]) -> None:
        """Each start of ingest is another member, and Redis remembers them for ever in each stream. What
        one has not finished is another's first: see `_left_behind`."""
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.xinfo_consumers(name, GROUP)
        gone = [
            (name, member["name"])
            for name, found in zip(names, pipe.execute(raise_on_error=False), strict=True)
            if not isinstance(found, redis.RedisError)  # the stream has just been removed
            for member in found
            if member["pending"] == 0
            and member["idle"] > MEMBER_IDLE_MS_MAX
            and member["name"] != self._consumer.encode()
        ]
        for name, member in gone:
            pipe.xgroup_delconsumer(name, GROUP, member)
        pipe.execute(raise_on_error=False)

    def _forget_some(self, name: str) -> int:
        """Of what was delivered to us and is not there any more, which was the oldest; how many."""
        answer = self.client.xreadgroup(GROUP, self._consumer, {name: "0"}, count=_FORGOTTEN_AT_ONCE)
        streams = cast("list[tuple[bytes, list[tuple[bytes, Fields | None]]]]", answer or [])
        gone = [entry_id for _, entries in streams for entry_id, fields in entries if not fields]
        if gone:
            self.client.xack(name, GROUP, *gone)
        return len(gone)

    def _left_behind(self) -> list[Entry]:
        pipe = self.client.pipeline(transaction=False)
        share = max(1, BATCH_MAX // len(self._names))
        for name in self._names:
            pipe.xautoclaim(
                name, GROUP, self._consumer, min_idle_time=IDLE_MS_BEFORE_TAKEN_OVER, count=share
            )
        found = [
            Entry(name, entry_id, fields)
            for name, answer in zip(self._names, pipe.execute(), strict=True)
            for entry_id, fields in answer[1]
            if fields
        ]
        now = time.time()
        ahead = self._counted([entry for entry in found if entry.is_ahead(now)])
        return [entry for entry in found if not entry.is_ahead(now)] + ahead

    def _counted(self, entries: list[Entry]) -> list[Entry]:
        """These entries, each with how often it was delivered. What is gone was delivered once."""
        pipe = self.client.pipeline(transaction=False)
        for entry in entries:
            pipe.xpending_range(entry.stream, GROUP, entry.id, entry.id, 1)
        return [
            entry._replace(deliveries=answer[0]["times_delivered"] if answer else 1)
            for entry, answer in zip(entries, pipe.execute(), strict=True)
        ]

    def _fresh(self) -> list[Entry]:
        """Each stream gets its share; what is left of a batch goes to those that have more."""
        found, names = list[Entry](), self._names
        block: int | None = BLOCK_MS
        while names and len(found) < BATCH_MAX:
            share = max(1, (BATCH_MAX - len(found)) // len(names))
            answer = self.client.xreadgroup(
                GROUP, self._consumer, dict.fromkeys(names, ">"), count=share, block=block
            )
            # redis-py's types cover every protocol and encoding at once; ours is RESP2 with bytes.
            streams = cast("list[tuple[bytes, list[tuple[bytes, Fields]]]]", answer or [])
            names, block = [], None
            for key, entries in streams:
                name = key.decode(errors="replace")
                found += [Entry(name, entry_id, fields or {}) for entry_id, fields in entries]
                if len(entries) >= share:
                    names.append(name)
        return found


def _by_stream(entries: Iterable[Entry]) -> Mapping[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for entry in entries:
        found[entry.stream].append(entry.id)
    return found


def own_streams(client: redis.Redis) -> list[str]:
    """Of processes with users of their own, as they are now."""
    cursor, found = 0, set[str]()
    while True:
        cursor, keys = cast(
            "tuple[int, list[bytes]]",
            client.scan(cursor, f"{OWN_STREAM}*", _SCANNED_AT_ONCE, "STREAM"),
        )
        found.update(key.decode(errors="replace") for key in keys)
        if cursor == 0 or len(found) >= STREAMS_MAX:
            return sorted(found)[:STREAMS_MAX]


def waiting(client: redis.Redis) -> int:
    """Records in all streams."""
    return sum(_lengths(client, [STREAM, *own_streams(client)]).values())


def _lengths(client: redis.Redis, names: list[str]) -> dict[str, int]:
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.xlen(name)
    return dict(zip(names, map(int, pipe.execute()), strict=True))
