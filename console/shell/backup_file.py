"""The file of a backup: a tar of `manifest.json`, `manifest.hmac`, `database` and `tokenizers/…`.

The manifest has the SHA-256 of all that follows it. It is signed with a key from TIDEGATE_SECRET_KEY, so
nobody changes what is restored who can only write the file.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from django.conf import settings

from console.shell.sealed import derived
from telemetry.decoder import Limits, Malformed, decode, excerpt

FORMAT: Final = 2
FORMAT_UNSIGNED: Final = 1
MANIFEST: Final = "manifest.json"
SIGNATURE: Final = "manifest.hmac"
DATABASE: Final = "database"
TOKENIZERS: Final = "tokenizers"
MANIFEST_LIMITS: Final = Limits(64 << 20, 1 << 20)
SIGNATURE_BYTES: Final = 64
PIECE_BYTES: Final = 1 << 20
PURPOSE: Final = b"tidegate: signed backups, 1"


class CannotBackUp(Exception):
    """Why there is no backup, or nothing was restored: a sentence."""


@dataclass(frozen=True)
class Manifest:
    """What a backup says of itself."""

    format: int
    tidegate: str
    postgres: int
    at: float
    migrations: list[str]
    rows: dict[str, int]  # by table, at the moment of the backup
    sha256: str  # of `database`
    has_numbers: bool
    tokenizers: dict[str, str] | None = None  # SHA-256 by path; None: of the unsigned format

    @property
    def tokenizer_count(self) -> int:
        """Each is a folder."""
        return len({Path(name).parent for name in self.tokenizers or ()})


def write(file: IO[bytes], manifest: Manifest, folder: Path) -> None:
    """Write the backup of a folder with `database` and `tokenizers/…`, as the manifest names them.
    Raises CannotBackUp for a manifest that would not be read again."""
    text = json.dumps(asdict(manifest), indent=1, ensure_ascii=False).encode()
    _decoded(text)
    with tarfile.open(fileobj=file, mode="w") as archive:
        _add(archive, MANIFEST, text)
        _add(archive, SIGNATURE, _signature(settings.SECRET_KEY, text))
        archive.add(folder / DATABASE, DATABASE, filter=_anonymous)
        for name in manifest.tokenizers or ():
            member = f"{TOKENIZERS}/{name}"
            archive.add(folder / member, member, recursive=False, filter=_anonymous)


def read_manifest(archive: tarfile.TarFile, *, must_be_signed: bool) -> Manifest:
    """The manifest of a file that is at its beginning. Raises CannotBackUp."""
    text = _read(archive, MANIFEST, MANIFEST_LIMITS.bytes_max)
    found = _decoded(text)
    if found.format not in (FORMAT, FORMAT_UNSIGNED):
        raise CannotBackUp(f"It is a backup of format {found.format}; this version reads {FORMAT}.")
    if found.format == FORMAT_UNSIGNED:
        if must_be_signed:
            raise CannotBackUp(
                "It is a backup of the former format, which is not signed: whoever could write the file "
                "may have changed it. Restore it with --unverified if you are sure that nobody has."
            )
        return found
    signature = _read(archive, SIGNATURE, SIGNATURE_BYTES)
    if must_be_signed and not _is_signed(text, signature):
        raise CannotBackUp(
            "The backup was changed, or made with another TIDEGATE_SECRET_KEY. Put that one into "
            "TIDEGATE_SECRET_KEY_FALLBACKS. If it is lost, and you are sure that nobody has changed the "
            "file, restore it with --unverified."
        )
    return found


def extract(archive: tarfile.TarFile, manifest: Manifest, folder: Path) -> None:
    """Write what follows the manifest to an empty folder, all of it checked. Raises CannotBackUp."""
    expected = {DATABASE: manifest.sha256}
    for name, sha256 in (manifest.tokenizers or {}).items():
        expected[f"{TOKENIZERS}/{name}"] = sha256
    seen = set()
    while member := archive.next():
        name = member.name
        is_known = name in expected or (
            manifest.tokenizers is None and name.startswith(f"{TOKENIZERS}/")
        )
        is_inside = "\0" not in name and not {"", ".", ".."} & set(name.split("/"))
        file = archive.extractfile(member) if member.isreg() else None
        if file is None or not is_known or not is_inside or name in seen:
            raise CannotBackUp(f"The backup has something else in it: {excerpt(name)}")
        seen.add(name)
        sha256 = _write(file, folder / name)
        if sha256 != expected.get(name, sha256):
            raise CannotBackUp(f"The backup is damaged: its {excerpt(name)} is not what was written.")
    if missing := sorted(expected.keys() - seen):
        raise CannotBackUp(f"The backup is damaged: it has no {excerpt(missing[0])} in it.")


def created(path: Path) -> IO[bytes]:
    """A new file that only this user can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Inside


def _decoded(text: bytes) -> Manifest:
    try:
        return decode(text, Manifest, MANIFEST_LIMITS)
    except Malformed as error:
        raise CannotBackUp(f"Its {MANIFEST} is none of Tidegate: {error}") from None


def _signature(secret_key: str, text: bytes) -> bytes:
    return hmac.digest(derived(secret_key, PURPOSE), text, "sha256").hex().encode()


def _is_signed(text: bytes, signature: bytes) -> bool:
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    return any(hmac.compare_digest(_signature(key, text), signature) for key in keys)


def _read(archive: tarfile.TarFile, name: str, bytes_max: int) -> bytes:
    """The next member, which has to have this name."""
    member = archive.next()
    if member is not None and member.name == name and member.isreg() and member.size <= bytes_max:
        file = archive.extractfile(member)
        return file.read() if file else b""
    raise CannotBackUp(f"It is no backup of Tidegate: it has no {name} where that should be.")


def _write(source: IO[bytes], target: Path) -> str:
    """Returns the SHA-256."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with created(target) as into:
        while piece := source.read(PIECE_BYTES):
            digest.update(piece)
            into.write(piece)
    return digest.hexdigest()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    archive.addfile(member, io.BytesIO(content))


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
