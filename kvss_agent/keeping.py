"""A document that has to be there after a crash, and that nobody else may read."""

from __future__ import annotations

import os
from pathlib import Path


def keep(document: Path, raw: bytes) -> None:
    """Write it whole or not at all; it has secrets in it, so it is for this user only."""
    fresh = document.with_name(f"{document.name}.new")  # others may be kept beside it at the same time
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(descriptor)
    fresh.replace(document)
    directory = os.open(document.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
