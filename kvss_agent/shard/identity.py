"""Which shard."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """What a shard is, apart from its size. Another identity is another shard."""

    name: str
    slot_bytes: int
    driver: str
    namespace: bytes = bytes(16)
    part: str = "0"  # the name of this shard in tier 2, the same for all who share the namespace
    huge_pages: bool = False
    is_for_fragments: bool = False  # other agents write to it, in the name of its driver
