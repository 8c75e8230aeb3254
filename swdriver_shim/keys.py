"""The names of columns: a chain of keyed hashes that nobody without the org's secret can compute.

A column is 64 consecutive tokens of a prompt, and its KV depends on all tokens before it. So its key is
made of its parent's and its own tokens:

    state(0)  = SHA-256(K ‖ "root")                        K: one block of secret, tag and namespace
    state(n)  = SHA-256(K ‖ state(n-1) ‖ count ‖ tokens)   count: how many; a tail is no prefix of more
    key(n)    = the first 16 bytes of state(n)

Whoever sees keys (an agent, a disk, a metric) learns neither tokens nor whether two orgs asked the same,
and cannot make a key that collides with another org's or extend one: half of each state stays here.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Final

COLUMN_TOKENS: Final = 64
KEY_BYTES: Final = 16
TAG_BYTES: Final = 16
SECRET_BYTES_MIN: Final = 32
TOKEN_MAX: Final = 2**32 - 1
_BLOCK: Final = 64  # of SHA-256: what comes before costs nothing per column
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Namespace:
    """What makes KV of the same tokens different. Columns are never shared across any of these."""

    model: str
    revision: str
    kv_dtype: str
    layout: str
    adapter: str = ""

    def digest(self) -> bytes:
        """16 bytes that stand for it, the same everywhere: tier 2 is arranged by them."""
        return hashlib.sha256(b"tidegate namespace 1" + self.encode()).digest()[:KEY_BYTES]

    def encode(self) -> bytes:
        """Each field with its name and length, so that no two namespaces read the same."""
        return b"".join(_field(one.name, getattr(self, one.name)) for one in fields(self))


def isolation_tag(org: str, secret: Buffer) -> bytes:
    """What columns of an org carry in their seals. Does not tell which org it is."""
    _check_secret(secret)
    mixed = b"tidegate tag 1" + _bytes_field(bytes(secret)) + _field("org", org)
    return hashlib.sha256(mixed).digest()[:TAG_BYTES]


@dataclass(slots=True)
class Chain:
    """The columns of one prompt so far. A conversation that goes on hashes its new columns only.

    `states` are the states of the whole columns, in order.
    """

    tokens: int = 0
    keys: list[bytes] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list, repr=False)


class Keys:
    """Makes the keys of one org in one namespace. Holds the secret in mixed form only."""

    __slots__ = ("_keyed", "_root")

    def __init__(self, secret: Buffer, tag: bytes, namespace: Namespace) -> None:
        """Raises ValueError for a secret that is too short to be one."""
        _check_secret(secret)
        if len(tag) != TAG_BYTES:
            raise ValueError(f"a tag has {TAG_BYTES} bytes, not {len(tag)}")
        mixed = b"tidegate columns 1" + _bytes_field(bytes(secret)) + tag + namespace.encode()
        self._keyed = hashlib.sha256(hashlib.sha512(mixed).digest())
        if self._keyed.block_size != _BLOCK:
            raise RuntimeError("SHA-256 has blocks of 64 bytes")
        self._root = self._hash(b"root")

    def __repr__(self) -> str:
        return "Keys(…)"

    def chain(self, tokens: Sequence[int] | Buffer) -> Chain:
        """The chain of a prompt: its whole columns. A tail is asked for by `tail`."""
        made = Chain()
        self.extend(made, tokens)
        return made

    def extend(self, chain: Chain, tokens: Sequence[int] | Buffer) -> None:
        """Make the chain that of these tokens, which begin with those it has been made of.

        `tokens` is the whole prompt: a sequence of numbers, or a buffer of 32-bit ones, little-endian.
        """
        raw = encode(tokens)
        count = len(raw) // 4
        if count < chain.tokens:
            raise ValueError(f"the chain has {chain.tokens} tokens already, these are {count}")
        state = chain.states[-1] if chain.states else self._root
        copy = self._keyed.copy
        whole = _COUNT.pack(COLUMN_TOKENS)
        size = 4 * COLUMN_TOKENS
        view = memoryview(raw)
        for at in range(len(chain.states) * size, count // COLUMN_TOKENS * size, size):
            mixed = copy()
            mixed.update(state + whole)
            mixed.update(view[at : at + size])
            state = mixed.digest()
            chain.states.append(state)
            chain.keys.append(state[:KEY_BYTES])
        chain.tokens = count // COLUMN_TOKENS * COLUMN_TOKENS

    def tail(self, chain: Chain, tokens: Sequence[int] | Buffer) -> bytes:
        """The key of a tail column: fewer tokens than a whole one, right after the chain."""
        raw = encode(tokens)
        count = len(raw) // 4
        if not 0 < count < COLUMN_TOKENS:
            raise ValueError(f"a tail has 1 to {COLUMN_TOKENS - 1} tokens, not {count}")
        state = chain.states[-1] if chain.states else self._root
        return self._hash(state + _COUNT.pack(count) + raw)[:KEY_BYTES]

    def rewind(self, chain: Chain, tokens: int) -> None:
        """Forget all columns that hold tokens beyond the first so many."""
        whole = max(0, tokens) // COLUMN_TOKENS
        del chain.states[whole:], chain.keys[whole:]
        chain.tokens = min(chain.tokens, whole * COLUMN_TOKENS)

    def _hash(self, data: bytes) -> bytes:
        mixed = self._keyed.copy()
        mixed.update(data)
        return mixed.digest()


def encode(tokens: Sequence[int] | Buffer) -> bytes:
    """Token numbers as bytes. A buffer is taken for bytes already. ValueError for what is no token."""
    if isinstance(tokens, bytes | bytearray | memoryview):
        raw = bytes(tokens)
        if len(raw) % 4:
            raise ValueError("a buffer of tokens holds 32-bit numbers")
        return raw
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise ValueError(f"a token is a number from 0 to {TOKEN_MAX}: {error}") from error


def _field(name: str, text: str) -> bytes:
    return _bytes_field(name.encode()) + _bytes_field(text.encode())


def _bytes_field(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _check_secret(secret: Buffer) -> None:
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"an org's secret has {SECRET_BYTES_MIN} bytes or more")
