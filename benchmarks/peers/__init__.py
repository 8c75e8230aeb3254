"""What others reach on the same machine in the same run: see `Peer`."""

from benchmarks.peers.environment import Unavailable
from benchmarks.peers.peer import (
    LOOKUPS,
    NAMES,
    SIZES,
    Lookup,
    Peer,
    batch_of,
    columns,
)

__all__ = [
    "LOOKUPS",
    "NAMES",
    "SIZES",
    "Lookup",
    "Peer",
    "Unavailable",
    "batch_of",
    "columns",
]
