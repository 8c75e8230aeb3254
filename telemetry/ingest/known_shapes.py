"""Shapes by their digests, as one member of the consumer group knows them: from a record, from Redis or
from the database. A digest identifies its shape, whoever sent it.

A new shape counts against the quota of its source (`quotas`) before it is stored, and so before anything
else is known of the record. Shapes beyond the quota are ignored, at no cost to other sources.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
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
    """A bounded table. A new shape displaces shapes of the source that fills most of the table: first
    those that were used longest ago, and none that is in use. So sources with too many shapes displace
    their own and each other's, and never those of a source with few. What is displaced is asked for
    again."""

    def __init__(self, client: redis.Redis, quotas: Quotas) -> None:
        self.is_full = False  # some shape found no room beside those in use
        self.series = 0
        self._client = client
        self._quotas = quotas
        self._known: dict[bytes, tuple[Shape, str]] = {}  # with the source that it counts as
        # By source: its shapes' costs in the order of their last use, and the sum of these.
        self._costs: defaultdict[str, OrderedDict[bytes, float]] = defaultdict(OrderedDict)
        self._total: defaultdict[str, float] = defaultdict(float)
        self._in_use: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._known)

    def release(self) -> None:
        """None is in use any more."""
        self._in_use.clear()
        self.is_full = False

    def use(self, digest: bytes) -> Shape | None:
        """The shape of this digest, which stays until `release`; None where it is not known."""
        if (known := self._known.get(digest)) is None:
            return None
        shape, source = known
        self._costs[source].move_to_end(digest)
        self._in_use.add(digest)
        return shape

    def may_teach(self, source: str, digest: bytes) -> bool:
        """Whether the quota of this source allows this shape."""
        return self._quotas.may_tell_shape(source, digest)

    def learn(self, source: str, digest: bytes, encoded: bytes) -> None:
        """Take the shape of this digest into use, at the cost of the source. An invalid one costs as
        much, and is not decoded again in this hour."""
        if digest in self._known or self.is_full or not self.may_teach(source, digest):
            return
        if self._quotas.has_refused_shape(source, digest):
            return
        shape = _decoded(digest, encoded)
        if shape is None:
            self._quotas.refuse_shape(source, digest)
        elif self._quotas.admits_shape(source, digest, len(shape.series)):
            self._keep(shape, source)

    def ask_for(self, wanted: Mapping[bytes, str], told_in_redis: Collection[bytes]) -> None:
        """Learn those of these shapes that Redis or the database has, each at the cost of its source.
        Redis is asked for `told_in_redis` only."""
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
        """In parts, for as long as the table has room."""
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

    def _keep(self, shape: Shape, source: str) -> None:
        series = len(shape.series)
        while self._known and (len(self) >= SHAPES_MAX or self.series + series > SERIES_MAX):
            if not self._displace():
                self.is_full = True
                return
        cost = max(series, SERIES_MAX / SHAPES_MAX)  # few series use up the number of shapes
        self._known[shape.digest] = shape, source
        self._costs[source][shape.digest] = cost
        self._total[source] += cost
        self._in_use.add(shape.digest)
        self.series += series

    def _displace(self) -> bool:
        """Drop a shape of the source that fills most of the table. False if all of its are in use."""
        source = max(self._total, key=self._total.__getitem__)
        costs = self._costs[source]
        digest = next((one for one in costs if one not in self._in_use), None)
        if digest is None:
            return False
        self._total[source] -= costs.pop(digest)
        if not costs:
            del self._costs[source], self._total[source]
        self.series -= len(self._known.pop(digest)[0].series)
        return True


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
