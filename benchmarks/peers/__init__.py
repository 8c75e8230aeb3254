"""What others reach on the same machine in the same run: see `Peer`."""

from benchmarks.peers.environment import Unavailable
from benchmarks.peers.peer import (
    NAMES,
    SIZES,
    WORKING_SET,
    Peer,
    Samples,
    available,
    batch_of,
    columns,
)

__all__ = [
    "NAMES",
    "SIZES",
    "WORKING_SET",
    "Peer",
    "Samples",
    "Unavailable",
    "available",
    "batch_of",
    "columns",
]
