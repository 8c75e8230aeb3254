"""Static files: collected under names that carry their content's hash, and only when one changed."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from django.core.management import call_command

STAMP = ".collected-from"


def collect() -> bool:
    """Run collectstatic unless nothing changed since; whether it ran."""
    stamp = Path(settings.STATIC_ROOT) / STAMP
    current = fingerprint()
    if stamp.is_file() and stamp.read_text() == current:
        return False
    call_command("collectstatic", interactive=False, verbosity=0, stdout=io.StringIO())
    stamp.write_text(current)
    return True


def fingerprint() -> str:
    """Of the names, sizes and times of all files that would be collected, and of the storage."""
    digest = hashlib.sha256(repr(settings.STORAGES["staticfiles"]).encode())
    for finder in get_finders():
        for path, storage in finder.list([]):
            stat = Path(storage.path(path)).stat()
            digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
