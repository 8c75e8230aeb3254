"""Generated passwords and keys, each in a file of its own that only its owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from console.stack.errors import sentences

KEY_BYTES = 48


def kept(path: Path) -> str:
    """The key in `path`; made at the first call, the same ever after.

    Whoever dies half-way leaves either no key or a whole one.
    """
    with sentences("keep a generated key", path):
        try:
            return path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            key = secrets.token_urlsafe(KEY_BYTES)
            write_private(path, key + "\n")
            return key


def write_private(path: Path, text: str, *, lasting: bool = True) -> None:
    """Put `text` into `path` in one step, readable by nobody else at any moment.

    What need not outlast the machine's power is not `lasting`, and does not wait for the disk.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
