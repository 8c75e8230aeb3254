"""Shapes by their digests, as one member of the group knows them: told with a record, told in Redis, or
stored before. A digest vouches for its shape, whoever told it.

What is learned is counted as its source's (`quotas`) before it is kept, and so before anything else is
known of the record: who tells more than processes do is not listened to any more, at no cost to others.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, cast

import redis
from django.db import connection

from telemetry.ingest.quotas import Quotas
from telemetry.records import FIELD_LIMITS, SHAPE_KEY
from telemetry.shapes import Shape

log = logging.getLogger(__name__)

SHAPES_MAX: Final = 8192  # that are kept in memory,
SERIES_MAX: Final = 1_000_000  # and the series that those may have together
ASKED_AT_ONCE: Final = 64  # of Redis and of the database: each may have a megabyte


class KnownShapes:
    """Bounded: for a new one those go that were used longest ago, but none that is in use. What went is
    asked for again."""

    def __init__(self, client: redis.Redis, quotas: Quotas) -> None:
        self.is_full = False  # some shape found no room beside those in use
        self.series = 0
        self._client = client
        self._quotas = quotas
        self._known: OrderedDict[bytes, Shape] = OrderedDict()  # what was used last is at the end
        self._in_use: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._known)

    def release(self) -> None:
        """None is in use any more."""
        self._in_use.clear()
        self.is_full = False

    def use(self, digest: bytes) -> Shape | None:
        """The shape of this digest, which stays until `release`; None where it is not known."""
        shape = self._known.get(digest)
        if shape is not None:
            self._known.move_to_end(digest)
            self._in_use.add(digest)
        return shape

    def may_teach(self, source: str, digest: bytes) -> bool:
        """Whether this source is listened to about this shape."""
        return self._quotas.may_tell_shape(source, digest)

    def learn(self, source: str, digest: bytes, encoded: bytes) -> None:
        """Take into use what was told as the shape of this digest, at the cost of the source. Nonsense
        is not learned, costs as much, and is not looked at again in this hour."""
        if digest in self._known or self.is_full or not self.may_teach(source, digest):
            return
        if self._quotas.has_refused_shape(source, digest):
            return
        shape = _decoded(digest, encoded)
        if shape is None:
            self._quotas.refuse_shape(source, digest)
        elif self._quotas.admits_shape(source, digest, len(shape.series)):
            self._keep(shape)

    def ask_for(self, wanted: Mapping[bytes, str], told_in_redis: Collection[bytes]) -> None:
        """Learn these, each at the cost of the source that stands with it, as far as somebody knows
        them: Redis of those, the database of all."""
        for some in self._in_parts(told_in_redis):
            told = self._client.mget([SHAPE_KEY + digest.hex() for digest in some])
            self._learn_all(wanted, zip(some, cast("list[bytes | None]", told), strict=True))
        for some in self._in_parts(wanted.keys() - self._known.keys()):
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT digest, encoded FROM telemetry_storedshape WHERE digest = ANY(%s)", [some]
                )
                stored = [(bytes(digest), bytes(encoded)) for digest, encoded in cursor]
            self._learn_all(wanted, stored)

    def _in_parts(self, digests: Collection[bytes]) -> Iterator[list[bytes]]:
        """As long as there is room for what they stand for."""
        listed = sorted(digests)
        for start in range(0, len(listed), ASKED_AT_ONCE):
            if not self.is_full:
                yield listed[start : start + ASKED_AT_ONCE]

    def _learn_all(
        self, wanted: Mapping[bytes, str], found: Iterable[tuple[bytes, bytes | None]]
    ) -> None:
        for digest, encoded in found:
            if encoded:
                self.learn(wanted[digest], digest, encoded)

    def _keep(self, shape: Shape) -> None:
        series = len(shape.series)
        while self._known and (len(self) >= SHAPES_MAX or self.series + series > SERIES_MAX):
            oldest = next(iter(self._known))
            if oldest in self._in_use:
                self.is_full = True
                return
            self.series -= len(self._known.pop(oldest).series)
        self._known[shape.digest] = shape
        self._in_use.add(shape.digest)
        self.series += series


def _decoded(digest: bytes, encoded: bytes) -> Shape | None:
    """The shape, if it is one, and the one of this digest."""
    if len(encoded) > FIELD_LIMITS.bytes_max:
        return None
    try:
        shape = Shape.decode(encoded)
    except ValueError as error:
        log.warning("shape %s is malformed: %s", digest.hex(), error)
        return None
    return shape if shape.digest == digest else None
