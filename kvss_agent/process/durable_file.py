"""A document that has to be there after a crash, and that nobody else may read."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Final

ABANDONED_SECONDS: Final = 60.0  # a file that was begun so long ago: its writer was killed


def write_durably(document: Path, raw: bytes, *, replace: bool = True) -> None:
    """Write it whole or not at all; it has secrets in it, so it is for this user only.

    Any number may write it at once: the last one stays, without `replace` the first. Raises OSError.
    """
    fresh = document.with_name(f".{document.name}.{secrets.token_hex(8)}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            fresh.replace(document)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(fresh, document)
    finally:
        fresh.unlink(missing_ok=True)
    _remove_abandoned(document)
    sync_directory(document.parent)


def remove_drafts(folder: Path) -> None:
    """What killed writers have left in a folder that nobody else writes to now. Documents that are not
    written again would have it beside them for good. Raises OSError."""
    for draft in folder.glob(".*.new"):
        draft.unlink(missing_ok=True)


def sync_directory(path: Path | str) -> None:
    """Make the names in a directory last. Raises OSError."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _remove_abandoned(document: Path) -> None:
    """They may have secrets in them that the document has no more."""
    long_ago = time.time() - ABANDONED_SECONDS
    for one in document.parent.iterdir():
        if one.name.startswith(f".{document.name}.") and one.suffix == ".new":
            with contextlib.suppress(FileNotFoundError):  # its writer lives, and is done
                if one.stat().st_mtime < long_ago:
                    one.unlink()
