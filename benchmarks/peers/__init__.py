"""What others reach on the same machine in the same run: see `Peer`."""

from benchmarks.peers.environment import Unavailable
from benchmarks.peers.peer import (
    LOOKUPS,
    NAMES,
    SIZES,
    Lookup,
    Peer,
    Samples,
    available,
    batch_of,
    columns,
)

__all__ = [
    "LOOKUPS",
    "NAMES",
    "SIZES",
    "Lookup",
    "Peer",
    "Samples",
    "Unavailable",
    "available",
    "batch_of",
    "columns",
]
