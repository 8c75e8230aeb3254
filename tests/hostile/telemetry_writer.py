"""An evil telemetry writer: has the Redis URL that agents and drivers are given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import msgspec
import redis

from telemetry.credentials import user_of
from telemetry.metrics import Kind
from telemetry.records import FIELD, OWN_STREAM, STREAM
from telemetry.shapes import Series, Shape

HUGE: Final = (1 << 53) - 1  # the largest number that a record may have


class Writer:
    """Adds records to its own stream, well formed or not, by the address of its own Redis user."""

    def __init__(self, url: str, name: str = "evil") -> None:
        self.redis = redis.Redis.from_url(url, socket_timeout=10)
        self.stream = OWN_STREAM + user_of(url)
        self.name = name
        self.sequence = 0

    def close(self) -> None:
        self.redis.close()

    def add(self, raw: bytes, **more: bytes) -> None:
        self.redis.xadd(
            self.stream, {FIELD: raw, **{name.encode(): value for name, value in more.items()}}
        )

    def tell(self, series: list[Series], cells: list[Any], **other: Any) -> None:
        """A record of these series, whose cells are whatever is given."""
        shape = Shape(series)
        self.add(self.record(shape.digest, cells, **other), shape=shape.encoded)

    def record(self, shape: bytes, cells: list[Any], **other: Any) -> bytes:
        self.sequence += 1
        fields = {
            "source": f"agent@evil/{self.name}",  # `name` is whom it claims to be
            "sequence": self.sequence,
            "kind": "agent",
            "name": self.name,
            "version": "0",
            "host": "evil",
            "process_id": 1,
            "started_at": time.time(),
            "at": time.time(),
            "shape": shape,
            "cells": cells,
        }
        return msgspec.msgpack.encode(list({**fields, **other}.values()))

    def many_series(self, records: int = 3, each: int = 4096) -> None:
        """One topic with more series than a shape may have, over several records."""
        for number in range(records):
            series = [
                Series(Kind.COUNTER, "kvss_evicts_total", (("shard", f"{number}-{place}"),))
                for place in range(each)
            ]
            self.tell(series, [[1] * each, [], []])

    def huge_gauges(self, records: int = 200) -> None:
        """Numbers that are each in range, and whose sum is not."""
        for _ in range(records):
            gauge = Series(Kind.GAUGE, "kvss_granted_bytes")
            self.tell([gauge], [[], [(HUGE, HUGE, HUGE)], []])

    def huge_counters(self, records: int = 2000) -> None:
        for _ in range(records):
            self.tell([Series(Kind.COUNTER, "kvss_evicts_total")], [[HUGE], [], []])

    def nonsense(self) -> Iterator[Callable[[], object]]:
        """Records that are none, one after the other."""
        good = msgspec.msgpack.decode(self.record(b"", [[], [], []]))
        numbers = (-1, 1 << 63, 1e308, float("nan"))
        values: tuple[Any, ...] = (None, "x" * 10_000, "\x00", [], {}, b"", *numbers)
        for place in range(len(good)):
            for value in values:
                spoiled = [*good[:place], value, *good[place + 1 :]]
                yield partial(self.add, msgspec.msgpack.encode(spoiled))
        yield lambda: self.add(b"")
        yield lambda: self.add(b"\x91" * 100_000)
        yield lambda: self.add(b"\xdd\xff\xff\xff\xff")
        yield lambda: self.redis.xadd(self.stream, {b"other": b"field"})
        yield lambda: self.add(self.record(b"", [[], [], []]), slowest=b"\x91" * 1000)
        yield lambda: self.add(self.record(b"", [[], [], []]), shape=b"\x91" * 1000)
        yield lambda: self.add(self.record(bytes(16), [[], [], []]))


# What somebody who may only add records must not be able to do, and would like to. Each is harmless
# where it is let in, for permission is looked at before what a command says.
COMMANDS: Final[tuple[str, ...]] = (
    "FLUSHALL NONSENSE",
    "FLUSHDB NONSENSE",
    "SHUTDOWN NOSAVE ABORT",
    "REPLICAOF 127.0.0.1 nonsense",
    "CONFIG GET requirepass",
    "CONFIG SET nonsense 1",
    "KEYS evil*",
    "SCAN 0",
    "ACL LIST",
    "ACL GETUSER default",
    "ACL SETUSER evil off",
    "CLIENT LIST",
    "CLIENT KILL ID 999999999",
    "MONITOR",
    "SLOWLOG GET 1",
    "INFO",
    "SCRIPT FLUSH NONSENSE",
    "EVAL return(1) 0",
    "FUNCTION LIST",
    f"XREAD COUNT 1 STREAMS {STREAM} $",
    f"XRANGE {STREAM} + - COUNT 1",
    f"XTRIM {STREAM} MAXLEN nonsense",
    f"XDEL {STREAM} 0-1",
    f"XGROUP DESTROY {STREAM} nonsense",
    f"XACK {STREAM} ingest 0-1",
    f"DEL {STREAM}:evil",
    f"RENAME {STREAM}:evil {STREAM}:worse",
    f"EXPIRE {STREAM} nonsense",
    "XADD evil * a b",
    "SET evil 1",
    "GET tidegate:celery:evil",
    "DEL tidegate:celery:evil",
    "LPUSH tidegate:celery:evil x",
    "LRANGE tidegate:celery:celery 0 0",
    "LLEN tidegate:celery:celery",
    "PUBLISH evil x",
    "SUBSCRIBE evil",
    "SELECT 1",
)


def allowed(url: str) -> list[str]:
    """Which of COMMANDS this credential may use: tried, each on a connection of its own."""
    done = []
    for command in COMMANDS:
        with redis.Redis.from_url(url, socket_timeout=5) as client:
            execute: Callable[..., object] = client.execute_command
            try:
                execute(*command.split())
            except redis.AuthenticationError:
                return []  # it is nobody's password
            except (redis.exceptions.NoPermissionError, redis.ConnectionError):
                continue
            except redis.RedisError as error:
                if "unknown command" in str(error):
                    continue  # this Redis has none
        done.append(command)
    return done
