"""Backups as somebody alters them who does not have the secret key."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Members = dict[str, bytes]


def members(file: Path) -> Members:
    with tarfile.open(file) as archive:
        return {one.name: content(archive, one) for one in archive.getmembers()}


def content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    found = archive.extractfile(member)
    assert found
    return found.read()


def write(file: Path, found: Members) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, raw in found.items():
            one = tarfile.TarInfo(name)
            one.size = len(raw)
            archive.addfile(one, io.BytesIO(raw))
    return file


def with_manifest(found: Members, change: Callable[[dict[str, Any]], Any]) -> Members:
    """The signature stays as it was."""
    manifest = json.loads(found["manifest.json"])
    change(manifest)
    return {**found, "manifest.json": json.dumps(manifest).encode()}


def unsigned(found: Members, **changes: Any) -> Members:
    """As the format before had it: without a signature, and without hashes of tokenizers."""

    def change(manifest: dict[str, Any]) -> None:
        manifest.pop("tokenizers")
        manifest.update(format=1, **changes)

    changed = with_manifest(found, change)
    return {name: raw for name, raw in changed.items() if name != "manifest.hmac"}
