"""Numbers of the data plane that documents, drivers and the console name, too. Loads nothing else."""

from __future__ import annotations

from typing import Final

VERSION: Final = 2
VERSION_MIN: Final = 1
SLOTS_MAX: Final = 1 << 32
DATA_KEY_BYTES: Final = 32
SECRET_BYTES_MIN: Final = 16  # of a driver
