"""A telemetry writer that says whatever a test wants, without the checks of the emitter."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import redis

from telemetry.metrics import Kind
from telemetry.records import FIELD, SHAPE_KEY, STREAM
from telemetry.shapes import Series


class Writer:
    """One process as far as ingest can tell, hostile or not."""

    def __init__(self, client: redis.Redis, kind: str = "driver", name: str = "job7") -> None:
        self._client = client
        self.kind, self.name = kind, name
        self.source = f"{kind}@host/1-{name}"
        self.sequence = 0

    def tell(
        self, values: Mapping[Series, Any], at: float | None = None, stream: str = STREAM
    ) -> dict[bytes, bytes]:
        """Add one record with these cells; what was added."""
        shape, encoded = self.shape(list(values))
        self._client.set(SHAPE_KEY + shape.hex(), encoded)
        listed = sorted(values)
        cells = [[values[one] for one in listed if one.kind is kind] for kind in Kind]
        fields = {FIELD: self.record(shape=shape, cells=cells, **({} if at is None else {"at": at}))}
        self._client.xadd(stream, fields)  # type: ignore[arg-type]  # its keys may be bytes
        return fields

    @staticmethod
    def shape(series: list[Series]) -> tuple[bytes, bytes]:
        """The digest and the text of a shape of any size."""
        encoded = msgspec.msgpack.encode(tuple(sorted(series)))
        return hashlib.blake2b(encoded, digest_size=16).digest(), encoded

    def record(self, **changes: Any) -> bytes:
        """An encoded record, well-formed but for what is changed."""
        self.sequence += 1
        values: dict[str, Any] = {
            "source": self.source,
            "sequence": self.sequence,
            "kind": self.kind,
            "name": self.name,
            "version": "1",
            "host": "host",
            "process_id": 1,
            "started_at": time.time(),
            "at": time.time(),
            "shape": b"",
            "cells": [[], [], []],
            **changes,
        }
        return msgspec.msgpack.encode(list(values.values()))


def counters(name: str, label: str, values: range, count: int = 1) -> dict[Series, Any]:
    """One counter with so many values of one label."""
    return {Series(Kind.COUNTER, name, ((label, f"{label}-{one}"),)): count for one in values}
