"""Shapes by their digests, as one member of the group knows them: told with a record, told in Redis, or
stored before. A digest vouches for its shape, whoever told it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final, cast

import redis
from django.db import connection

from telemetry.records import FIELD_LIMITS, SHAPE_KEY
from telemetry.shapes import Shape

log = logging.getLogger(__name__)

SHAPES_MAX: Final = 8192  # that are kept in memory,
SERIES_MAX: Final = 1_000_000  # and the series that those may have together


class KnownShapes:
    """Bounded; what was forgotten is asked for again."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._known: dict[bytes, Shape] = {}
        self._series = 0

    def get(self, digest: bytes) -> Shape | None:
        return self._known.get(digest)

    def learn(self, digest: bytes, encoded: bytes) -> None:
        """What was told as the shape of this digest; nonsense is not learned."""
        if digest in self._known or len(encoded) > FIELD_LIMITS.bytes_max:
            return
        try:
            shape = Shape.decode(encoded)
        except ValueError as error:
            log.warning("shape %s is malformed: %s", digest.hex(), error)
            return
        if shape.digest == digest:
            self._known[digest] = shape
            self._series += len(shape.series)

    def ask_for(self, digests: Collection[bytes], told_in_redis: Collection[bytes]) -> None:
        """Learn these, as far as somebody knows them: Redis of those, the database of all."""
        if len(self._known) > SHAPES_MAX or self._series > SERIES_MAX:
            self._known.clear()
            self._series = 0
        if unknown := sorted(set(told_in_redis) - self._known.keys()):
            told = self._client.mget([SHAPE_KEY + digest.hex() for digest in unknown])
            self._learn_all(zip(unknown, cast("list[bytes | None]", told), strict=True))
        if unknown := sorted(set(digests) - self._known.keys()):
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT digest, encoded FROM telemetry_storedshape WHERE digest = ANY(%s)", [unknown]
                )
                self._learn_all((bytes(digest), bytes(encoded)) for digest, encoded in cursor)

    def _learn_all(self, found: Iterable[tuple[bytes, bytes | None]]) -> None:
        for digest, encoded in found:
            if encoded:
                self.learn(digest, encoded)
