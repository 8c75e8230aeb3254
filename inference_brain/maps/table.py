"""All entries of all cache maps, in arrays: where to look an entry up takes two steps for any number of
drivers.

Drivers are *lanes*, and four lanes are a *block*: one *row* has the values of one name for the lanes of
one block, so that a look-up finds four drivers at once. Rows are hashed. Each may be in one of two
buckets of eight, in the emptier of the two when it came; what fits into neither is in a small overflow.
Nothing is ever moved to make room, so that a row is removed by overwriting its name with zero.

The table grows by splitting buckets, a few with each insert (linear hashing), and never has to be built
anew. Its arrays are reserved once, as large as it may become; memory is used as it grows.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Names = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint32]
Indexes = npt.NDArray[np.int64]

LANES: Final = 4  # of a block
BUCKET: Final = 8  # rows
BLOCKS_MAX: Final = 1 << 12
SPACES_MAX: Final = 1 << 20
LOAD_MAX: Final = 0.8
BUCKETS_MIN: Final = 1 << 9
OVERFLOW_MAX: Final = 1 << 14
ROW_BYTES: Final = 8 + 4 * LANES + 4
_ONE: Final = np.uint64(1)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_HIGH: Final = np.uint64(32)
_SPACE_BITS: Final = 20
