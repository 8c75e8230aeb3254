"""Where a column lies in tier 2: its address, the name of its file, and what a purge covers.

A name is `namespace/tag/kk/key.shard`, everything but the shard in hex, and `kk` the first byte of the
key, so that no directory grows large. It is a relative path and an object name alike, and nothing that
anybody chooses can lead out of the store: hex cannot, and a shard's name is held to `SHARD`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Self

from xxhash import xxh3_128_intdigest

from kvss_agent.shard.seal import KEY_BYTES, TAG_BYTES, Column

NAMESPACE_BYTES: Final = 16
SHARD: Final = re.compile(r"[a-z0-9_-][a-z0-9._-]{0,63}")
_FRAGMENT: Final = re.compile(r".+\.\d+-\d+-\d+")  # as `fragment_part` names them
_NAME: Final = re.compile(
    r"(?P<namespace>[0-9a-f]{32})/(?P<tag>[0-9a-f]{32})/(?P<folder>[0-9a-f]{2})/"
    rf"(?P<key>(?P=folder)[0-9a-f]{{30}})\.(?P<shard>{SHARD.pattern})"
)
_bytes = lru_cache(maxsize=4096)(bytes.fromhex)  # a million addresses share a few namespaces and tags


@lru_cache(maxsize=4096)
def _rest(namespace: bytes, shard: str, encrypted: bool) -> int:  # noqa: FBT001 - a part of what is named
    """What all keys of a shard are mixed with."""
    return xxh3_128_intdigest(namespace + shard.encode() + (b"/encrypted" if encrypted else b""))


@lru_cache(maxsize=4096)
def _is_fragment(shard: str) -> bool:
    return _FRAGMENT.fullmatch(shard) is not None


class _Fields(NamedTuple):
    namespace: bytes
    tag: bytes
    key: bytes
    shard: str


class Address(_Fields):
    """One shard's part of one column. Whoever has an address can make its name, and the other way.

    A tuple, since the index looks each of them up a dozen times.
    """

    __slots__ = ()

    def __new__(cls, namespace: bytes, tag: bytes, key: bytes, shard: str) -> Self:
        lengths = (len(namespace), len(tag), len(key))
        if lengths != (NAMESPACE_BYTES, TAG_BYTES, KEY_BYTES):
            raise ValueError("a namespace, a tag and a key have 16 bytes each")
        if not SHARD.fullmatch(shard):
            raise ValueError(f"a shard is named [a-z0-9._-], not first a dot, not {shard!r}")
        return super().__new__(cls, namespace, tag, key, shard)

    @property
    def name(self) -> str:
        key = self.key.hex()
        return f"{self.namespace.hex()}/{self.tag.hex()}/{key[:2]}/{key}.{self.shard}"

    @property
    def is_fragment(self) -> bool:
        """Whether it is a fragment of another agent's column."""
        return _is_fragment(self.shard)

    def column(self, note: int, *, encrypted: bool = False) -> Column:
        """What the header of the file says.

        The rest of the address is mixed into the key, and whether it is encrypted: a file that has got
        to another shard's or namespace's name is found out by its seal. It belongs to no evict; where a
        slot has the evict's number, it has what the driver wanted noted.
        """
        mixed = int.from_bytes(self.key) ^ _rest(self.namespace, self.shard, encrypted)
        return Column(mixed.to_bytes(KEY_BYTES), self.tag, note)


Part = tuple[bytes, str]  # namespace and part of the columns of a shard


def part_of(address: Address) -> Part:
    return address.namespace, address.shard


def parse(name: str) -> Address | None:
    """The address of a file of this name; None if tier 2 gave no file that name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Address(
        _bytes(match["namespace"]),
        _bytes(match["tag"]),
        bytes.fromhex(match["key"]),
        sys.intern(match["shard"]),
    )


def address_of(name: str) -> Address:
    """The address of a file that tier 2 has named. Raises ValueError for another name."""
    address = parse(name)
    if address is None:
        raise ValueError(f"{name} is no name of a column")
    return address


@dataclass(frozen=True, slots=True)
class Scope:
    """What a purge covers: a tag, a namespace, or a tag in a namespace."""

    tag: bytes | None = None
    namespace: bytes | None = None

    def __post_init__(self) -> None:
        if self.tag is None and self.namespace is None:
            raise ValueError("a purge is of a tag, of a namespace, or of both")
        if self.tag is not None and len(self.tag) != TAG_BYTES:
            raise ValueError(f"a tag has {TAG_BYTES} bytes")
        if self.namespace is not None and len(self.namespace) != NAMESPACE_BYTES:
            raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes")

    def covers(self, address: Address) -> bool:
        return self.tag in (None, address.tag) and self.namespace in (None, address.namespace)
