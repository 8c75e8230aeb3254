"""A column as a file that only its org's data key opens: AES-256-GCM.

    header 64 (its checksum is 0) | salt 16 | ciphertext | tag 16 | zeros up to the page

The driver sends the data key with each request, and it is kept nowhere: destroying it empties tier 2 of
the org at once. Each file has a key of its own, made of the data key and a fresh salt, so that no nonce
is ever used twice. What is authenticated with the bytes is the header and the name of the file.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvss_agent.data_plane.constants import DATA_KEY_BYTES
from kvss_agent.mover import Mover
from kvss_agent.shard.arena import slot_bytes_for
from kvss_agent.shard.seal import HEADER_BYTES, Header, Miss, pack
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.column_file import Form, Landing, identified, padding

SALT_BYTES: Final = 16
AUTHENTICATION_BYTES: Final = 16
_NONCE: Final = bytes(12)


class Encrypted(Form):
    """Raises ValueError for a key that is none."""

    def __init__(self, data_key: bytes) -> None:
        if len(data_key) != DATA_KEY_BYTES:
            raise ValueError(f"a data key has {DATA_KEY_BYTES} bytes")
        self._data_key = data_key

    def __repr__(self) -> str:
        return "Encrypted(…)"

    def file_bytes(self, length: int) -> int:
        return slot_bytes_for(length + SALT_BYTES + AUTHENTICATION_BYTES)

    def outgoing(
        self, slot: memoryview, header: Header, address: Address, note: int
    ) -> Sequence[memoryview]:
        column = address.column(note, encrypted=True)
        head = pack(column, header.tokens, header.length, 0)
        salt = secrets.token_bytes(SALT_BYTES)
        body = bytearray(header.length + AUTHENTICATION_BYTES)
        payload = slot[HEADER_BYTES : HEADER_BYTES + header.length]
        self._cipher(salt).encrypt_into(_NONCE, payload, _context(address, head), body)
        end = HEADER_BYTES + SALT_BYTES + len(body)
        return memoryview(head), memoryview(salt), memoryview(body), padding(end)

    def incoming(self, slot: memoryview, address: Address, mover: Mover) -> Landing:
        """Nothing goes into the slot before it is known to be right."""
        head = bytearray(HEADER_BYTES)
        body = memoryview(bytearray(self.file_bytes(len(slot) - HEADER_BYTES) - HEADER_BYTES))
        filed = address.column(0, encrypted=True)

        def accept(received: int) -> Header | Miss:
            found = identified(head, received, slot, filed, self.file_bytes)
            if isinstance(found, Miss):
                return found
            header, payload = found
            sealed = body[SALT_BYTES : SALT_BYTES + header.length + AUTHENTICATION_BYTES]
            cipher = self._cipher(body[:SALT_BYTES])
            try:
                cipher.decrypt_into(_NONCE, sealed, _context(address, bytes(head)), payload)
            except InvalidTag:
                return Miss.CORRUPT
            return header._replace(checksum=mover.checksum(payload))

        return Landing((memoryview(head), body), accept)

    def _cipher(self, salt: bytes | memoryview) -> AESGCM:
        return AESGCM(hmac.digest(self._data_key, b"tidegate column file 1" + salt, "sha256"))


def _context(address: Address, head: bytes) -> bytes:
    return address.name.encode() + head
