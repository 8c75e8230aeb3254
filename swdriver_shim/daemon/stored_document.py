"""Documents of a driver, or of a brain, on disk, sealed: without the token of its API nobody reads the
secrets in them.

The token may lie elsewhere (`--token-file`), so that a copy of the state directory gives nothing away.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import structs

from kvss_agent.documents import Invalid
from kvss_agent.process.durable_file import write_durably
from swdriver_shim.desired import Desired, parse

log = logging.getLogger(__name__)

FORMAT: Final = b"tidegate document 1\0"
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12


D = TypeVar("D")


class Stored(NamedTuple, Generic[D]):
    """A document, and when it was written, in seconds since 1970."""

    document: D
    at: float


class SealedDocument(Generic[D]):
    """One file."""

    def __init__(self, path: Path, token: str, parse: Callable[[bytes], D]) -> None:
        """`parse` raises Invalid for what is no document."""
        self.path = path
        self._parse = parse
        info = FORMAT + path.name.encode()
        derived = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info)
        self._cipher = AESGCM(derived.derive(token.encode()))

    def write(self, raw: bytes) -> None:
        """Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        nonce = secrets.token_bytes(NONCE_BYTES)
        write_durably(self.path, FORMAT + nonce + self._cipher.encrypt(nonce, raw, FORMAT))

    def read(self) -> Stored[D] | None:
        """The document that was written last. None, with a warning, for a file that can't be used; None
        if there is none. Raises OSError."""
        try:
            content, at = self.path.read_bytes(), self.path.stat().st_mtime
        except FileNotFoundError:
            return None
        try:
            return Stored(self._parse(self._opened(content)), at)
        except Invalid as problem:
            log.warning("The document in %s can't be used: %s", self.path, problem)
            return None

    def _opened(self, content: bytes) -> bytes:
        if not content.startswith(FORMAT):
            return content  # somebody has written it by hand, or an earlier version
        sealed = content[len(FORMAT) :]
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], FORMAT)
        except (InvalidTag, ValueError):
            raise Invalid("It was sealed with another token, or is damaged.") from None


class StoredDocument(SealedDocument[Desired]):
    """Of a driver."""

    def __init__(self, path: Path, token: str) -> None:
        super().__init__(path, token, parse)


TAGS_MAX: Final = 1 << 16  # the newest; purges that are longer ago have been confirmed, or given up


class PurgedTags:
    """Tags that were purged: no document may bring them back. Stored in a file, if one is given, so that
    they outlive a restart. Not thread-safe."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._tags: dict[str, None] = {}
        if file:
            with contextlib.suppress(FileNotFoundError):
                self._tags = dict.fromkeys(file.read_text().split())

    def add(self, tags: Collection[str]) -> None:
        """Add tags in hex. Raises OSError."""
        if set(tags) <= self._tags.keys():
            return
        wanted = dict.fromkeys([*self._tags, *tags])
        kept = dict.fromkeys(list(wanted)[-TAGS_MAX:])
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_durably(self._file, "\n".join(kept).encode())
        self._tags = kept

    def __len__(self) -> int:
        return len(self._tags)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tags)

    def __contains__(self, tag: str) -> bool:
        return tag in self._tags

    def without_purged(self, document: Desired) -> Desired:
        """The document without the orgs whose tag was purged."""
        orgs = tuple(org for org in document.orgs if org.tag.hex() not in self._tags)
        return document if len(orgs) == len(document.orgs) else structs.replace(document, orgs=orgs)
