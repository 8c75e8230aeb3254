"""Which series a record, or a stored row, has: written down once, and named by its digest. No Django.

A node has the same few hundred series second after second. So their names and labels are told once, as a
shape, and records have nothing but numbers, in its order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

from telemetry.cells import NO_GAUGE, Cell, Cells
from telemetry.decoder import unpack
from telemetry.metrics import Kind

SERIES_MAX: Final = 4096  # of one shape
DIGEST_BYTES: Final = 16

Text = Annotated[str, msgspec.Meta(max_length=200, pattern="^[^\\x00]*$")]


class Series(NamedTuple):
    """One of many of the same metric, by its labels."""

    kind: Kind
    name: str
    labels: tuple[tuple[str, str], ...] = ()


class Shape:
    """Series in order: counters, gauges, histograms; by name and labels among them."""

    __slots__ = ("_counts", "digest", "encoded", "series")

    def __init__(self, series: Iterable[Series]) -> None:
        self.series = tuple(sorted(series))
        if len(self.series) > SERIES_MAX:
            raise ValueError(f"{len(self.series)} series are more than {SERIES_MAX}")
        self._counts = tuple(sum(1 for one in self.series if one.kind is kind) for kind in Kind)
        self.encoded = _ENCODER.encode(self.series)
        self.digest = hashlib.blake2b(self.encoded, digest_size=DIGEST_BYTES).digest()

    @classmethod
    def decode(cls, encoded: bytes) -> Shape:
        """Raises ValueError for what is none."""
        told = unpack(encoded, _DECODER)
        return cls(Series(Kind(kind), name, labels) for kind, name, labels in told)

    def fits(self, cells: Cells) -> bool:
        return (len(cells.counters), len(cells.gauges), len(cells.histograms)) == self._counts

    def cells(self, values: Mapping[Series, Cell]) -> Cells:
        """The cells of these series, in order; nothing for those that have no value."""
        made = Cells([], [], [])
        for one in self.series:
            value = values.get(one)
            if one.kind is Kind.COUNTER:
                made.counters.append(value or 0)
            elif one.kind is Kind.GAUGE:
                made.gauges.append(value or NO_GAUGE)
            else:
                made.histograms.append(value or [])
        return made

    def pairs(self, cells: Cells) -> Iterable[tuple[Series, Cell]]:
        return zip(self.series, [*cells.counters, *cells.gauges, *cells.histograms], strict=True)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(
    Annotated[
        list[tuple[int, Text, Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=16)]]],
        msgspec.Meta(max_length=SERIES_MAX),
    ]
)
