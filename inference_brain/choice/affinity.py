"""Rendezvous hashing: which of equal replicas a prefix belongs to, the same for all who ask.

Each replica has a score for each prefix, a hash of both; the highest wins. When a replica comes or goes,
only prefixes that it wins move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyNamed = TypeVar("AnyNamed", bound=Named)


def score(affinity: bytes, name: str) -> int:
    """Equal in all processes, and of all versions. `affinity` is a keyed hash: nobody who does not know
    the secret can make prefixes that all go to one replica."""
    return xxh3_64_intdigest(_prefix(affinity) + name.encode())


def scores(affinity: bytes, names: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Of many names, each encoded once."""
    prefix = _prefix(affinity)
    return np.array([xxh3_64_intdigest(prefix + name) for name in names], np.uint64)


def _prefix(affinity: bytes) -> bytes:
    return len(affinity).to_bytes(4, "little") + affinity


def preferred(affinity: bytes, among: Sequence[AnyNamed]) -> AnyNamed:
    return max(among, key=lambda one: (score(affinity, one.name), one.name))


def ranked(affinity: bytes, among: Sequence[AnyNamed]) -> list[AnyNamed]:
    """The preferred one first."""
    return sorted(among, key=lambda one: (score(affinity, one.name), one.name), reverse=True)
