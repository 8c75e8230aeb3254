"""A folder with tokenizers, each under the hash of what is in it.

    <folder>/sha256/<hash>/tokenizer.json …

Any number of processes may use it at once, a console to add and managers and brains to read: a tokenizer
appears whole or not at all, and is never changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvss_agent.process.durable_file import sync_directory
from workload_manager.tokenizers import archive
from workload_manager.tokenizers.archive import BadArchive, Files
from workload_manager.tokenizers.check import check

FETCH_SECONDS: Final = 60.0
ABANDONED_SECONDS: Final = 3600.0
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
# What was checked may be larger than an upload, which may be compressed.
_FETCHED_BYTES_MAX: Final = archive.TOTAL_BYTES_MAX


class NotStored(LookupError):
    """There is no such tokenizer here, or it can't be brought. A sentence."""


class TokenizerStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "sha256"

    def add(self, upload: bytes) -> str:
        """Check an upload, and keep it. Returns its hash. Raises BadArchive and OSError.

        It takes as long if it is there: nobody learns from that what others have uploaded."""
        files = archive.read(upload)
        sha256 = archive.digest(files)
        self._keep(sha256, files)
        return sha256

    def add_again(self, upload: bytes) -> None:
        """Keep what `add` has checked, if it was removed since. Raises BadArchive and OSError."""
        files = archive.read(upload)
        sha256 = archive.digest(files)
        if sha256 not in self:
            self._keep(sha256, files, is_checked=True)

    def folder(self, sha256: str) -> Path:
        """Where it is, compared with its hash. Raises NotStored."""
        path = self._path(sha256)
        if self._read(path, sha256) is None:
            raise NotStored(f"There is no tokenizer {sha256[:16]} in {self._folder}.")
        return path

    def archive(self, sha256: str) -> bytes:
        """As a tar, to be fetched from elsewhere. Raises NotStored."""
        files = self._read(self._path(sha256), sha256)
        if files is None:
            raise NotStored(f"There is no tokenizer {sha256[:16]} in {self._folder}.")
        return archive.written(files)

    def fetch(self, url: str, sha256: str, headers: dict[str, str] | None = None) -> Path:
        """Where it is, brought from a URL if it is not here. Raises NotStored, BadArchive, OSError."""
        with contextlib.suppress(NotStored):
            return self.folder(sha256)
        files = archive.read(_got(url, headers or {}), _FETCHED_BYTES_MAX)
        if archive.digest(files) != sha256:
            raise NotStored(f"What {_host(url)} has sent is not the tokenizer {sha256[:16]}.")
        self._keep(sha256, files)
        return self.folder(sha256)

    def remove(self, sha256: str) -> None:
        """Processes that have loaded it keep it. One that is not there is none the less removed."""
        shutil.rmtree(self._path(sha256), ignore_errors=True)

    def __contains__(self, sha256: str) -> bool:
        return self._read(self._path(sha256), sha256) is not None

    def __iter__(self) -> Iterator[str]:
        """The hashes of all, in no order, not compared with what is there."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                if _SHA256.fullmatch(path.name):
                    yield path.name

    def _path(self, sha256: str) -> Path:
        if not _SHA256.fullmatch(sha256):
            raise NotStored("A tokenizer is known by a SHA-256 of 64 hexadecimal digits.")
        return self._folder / sha256

    @staticmethod
    def _read(path: Path, sha256: str) -> Files | None:
        """None if it is not there, or is not what its name says."""
        files = {}
        for name in archive.BYTES_MAX:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                files[name] = (path / name).read_bytes()
        return files if archive.digest(files) == sha256 else None

    def _keep(self, sha256: str, files: Files, *, is_checked: bool = False) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        self._remove_abandoned()
        fresh = self._folder / f".{sha256}.{secrets.token_hex(8)}"
        fresh.mkdir(mode=0o755)
        try:
            for name, raw in files.items():
                with (fresh / name).open("wb") as file:
                    file.write(raw)
                    file.flush()
                    os.fsync(file.fileno())
            if not is_checked:
                check(fresh)
            self._publish(fresh, self._path(sha256), sha256)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _remove_abandoned(self) -> None:
        """What a process has left that was killed while it added one."""
        for path in self._folder.glob(".*"):
            with contextlib.suppress(FileNotFoundError):  # its process lives, and is done
                if path.stat().st_mtime < time.time() - ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)

    def _publish(self, fresh: Path, path: Path, sha256: str) -> None:
        """In place of one that is damaged; one that another process has just added stays."""
        if path.exists() and self._read(path, sha256) is None:
            path.rename(self._folder / f".damaged.{secrets.token_hex(8)}")
        try:
            fresh.rename(path)
        except OSError:
            if self._read(path, sha256) is None:
                raise
        sync_directory(self._folder)


def _got(url: str, headers: dict[str, str]) -> bytes:
    import httpx  # for managers on other machines; the console has the files

    raw = bytearray()
    try:
        with httpx.stream("GET", url, headers=headers, timeout=FETCH_SECONDS) as answer:
            if answer.status_code != httpx.codes.OK:
                raise NotStored(f"{_host(url)} answers with status {answer.status_code}.")
            for piece in answer.iter_bytes():
                raw += piece
                if len(raw) > _FETCHED_BYTES_MAX:
                    raise BadArchive(f"What {_host(url)} sends is too long for a tokenizer.")
    except httpx.HTTPError as error:
        raise NotStored(f"{_host(url)} can't be reached: {error}.") from error
    return bytes(raw)


def _host(url: str) -> str:
    """What may be said of an address: who knows all of it may read what is there."""
    return urlsplit(url).netloc
