"""The desired document of an agent. Checked as a whole before any of it is applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta, Struct

from kvss_agent.data_plane.constants import SECRET_BYTES_MIN, SLOTS_MAX
from kvss_agent.documents import Conflict, Invalid, decode, whole
from kvss_agent.shard.arena import SLOT_ALIGNMENT, SLOT_BYTES_MAX
from kvss_agent.shard.identity import ShardIdentity
from kvss_agent.tier2.settings import Tier2Settings

SHARDS_MAX: Final = 4096
RETIRING_MAX: Final = 64
TAGS_MAX: Final = 1_000_000
DATA_MAX: Final = 8  # fragments with data, and with parity
PARITY_MAX: Final = 4
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}$"
HEX_16: Final = r"^[0-9a-f]{32}$"
TAG: Final = whole(HEX_16)
PART: Final = r"^[a-z0-9_-][a-z0-9._-]{0,63}$"

Name = Annotated[str, Meta(pattern=whole(NAME))]
Count = Annotated[int, Meta(ge=0, le=SLOTS_MAX)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Document(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the document. A field that is not known is an error: it may have mattered."""


class WholeDocument(Document, frozen=True):
    """Everything about one process. A higher generation replaces a lower one."""

    generation: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]

    def repeats(self, current: Self) -> bool:
        """Whether it is the current one, again. Raises Conflict for an older generation, and for the
        current one with other contents."""
        if self.generation < current.generation:
            raise Conflict(f"Generation {current.generation} is newer.")
        if self.generation == current.generation and self != current:
            raise Conflict(f"Generation {self.generation} exists with other contents.")
        return self == current


class PeerSpec(Document, frozen=True):
    """Somebody who may connect, and the secret that both know, in base64. `key`: the fingerprint that a
    certificate of it has to have."""

    name: Name
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES_MIN, max_length=256)]
    key: Annotated[str, Meta(pattern=whole(r"^[0-9a-f]{64}$"))] | None = None


class HolderSpec(Document, frozen=True):
    """An agent that stores one fragment of each redundant column of a shard, and the fragment shard
    there that its fragments pass through, of the same driver."""

    address: Annotated[str, Meta(min_length=1, max_length=500)]
    shard: Name
    since: Annotated[float, Meta(ge=0)] = 0.0  # 1970: what it has from before is removed and not used


class RedundancySpec(Document, frozen=True):
    """How the redundant columns of a shard are stored: any `data` of the fragments make the column, so
    the loss of `parity` holders loses nothing. The order of the holders is that of the fragments.

    `bytes_per_second`: what may be moved to and from holders in the background, spills and repair
    together. None: nobody knows the links between them."""

    data: Annotated[int, Meta(ge=1, le=DATA_MAX)]
    parity: Annotated[int, Meta(ge=1, le=PARITY_MAX)]
    holders: Annotated[tuple[HolderSpec, ...], Meta(min_length=2, max_length=DATA_MAX + PARITY_MAX)]
    bytes_per_second: Annotated[int, Meta(ge=1, lt=1 << 62)] | None = None

    def problem(self) -> str:
        """Empty if there is none."""
        if len(self.holders) != self.data + self.parity:
            return f"{self.data}+{self.parity} fragments need as many holders, not {len(self.holders)}."
        if len({one.address for one in self.holders}) != len(self.holders):
            return "Two fragments on one agent would be lost together."
        return ""


class ShardSpec(Document, frozen=True):
    """One shard. Another size is a resize; anything else that changes makes it another shard.

    `readers`: other drivers that may refill from it. `pull_bytes_per_second`: what may come from its
    former home while it moves here. `redundancy`: where its redundant columns are stored. These change
    freely. `is_for_fragments`: another agent writes to it, in the name of the driver.
    """

    name: Name
    slot_bytes: Annotated[int, Meta(ge=SLOT_ALIGNMENT, le=SLOT_BYTES_MAX, multiple_of=SLOT_ALIGNMENT)]
    slots: Count
    driver: Name
    readers: tuple[Name, ...] = ()
    namespace: Annotated[str, Meta(pattern=TAG)] = "0" * 32
    part: Annotated[str, Meta(pattern=whole(PART))] = "0"
    huge_pages: bool = False
    applied: Number = 0  # where the numbers of its evicts go on, if it has to be made
    pull_bytes_per_second: Annotated[int, Meta(ge=1, lt=1 << 62)] | None = None
    redundancy: RedundancySpec | None = None
    is_for_fragments: bool = False

    def identity(self) -> ShardIdentity:
        return ShardIdentity(
            self.name,
            self.slot_bytes,
            self.driver,
            bytes.fromhex(self.namespace),
            self.part,
            self.huge_pages,
            self.is_for_fragments,
        )


class OrgsSpec(Document, frozen=True):
    """What agents know of orgs: the tags that are somebody's now. What carries another one is older than
    a purge, or of an org that is gone: it is not served, and removed. None: nobody says so."""

    tags: Annotated[tuple[Annotated[str, Meta(pattern=TAG)], ...], Meta(max_length=TAGS_MAX)] | None = (
        None
    )


class Desired(WholeDocument, frozen=True):
    """Of an agent."""

    shards: Annotated[tuple[ShardSpec, ...], Meta(max_length=SHARDS_MAX)] = ()
    peers: Annotated[tuple[PeerSpec, ...], Meta(max_length=SHARDS_MAX)] = ()
    tier2: Tier2Settings | None = None
    # Stores that are not used any more: what lies there expires, is deleted and purged, until nothing is
    # left. A cap of 0 drains one; other caps do not hold there.
    retiring: Annotated[tuple[Tier2Settings, ...], Meta(max_length=RETIRING_MAX)] = ()
    orgs: OrgsSpec = OrgsSpec()


_DECODER: Final = msgspec.json.Decoder(Desired)


def parse(raw: bytes) -> Desired:
    """The document, whole and consistent. Raises Invalid."""
    desired = decode(raw, _DECODER)
    if problems := list(_problems(desired)):
        raise Invalid(" ".join(problems))
    return desired


def _problems(desired: Desired) -> Iterator[str]:
    for what, names in (
        ("shard", [shard.name for shard in desired.shards]),
        ("peer", [peer.name for peer in desired.peers]),
    ):
        for name in _repeated(names):
            yield f"There are two entries for {what} {name}."
    peers = {peer.name for peer in desired.peers}
    for shard in desired.shards:
        for name in (shard.driver, *shard.readers):
            if name not in peers:
                yield f"Shard {shard.name} is for {name}, who is not among the peers."
        if shard.redundancy and (problem := shard.redundancy.problem()):
            yield f"Shard {shard.name}: {problem}"
    places = [store.place for store in desired.retiring]
    for place in _repeated(places):
        yield f"There are two entries for the retiring store {place}."
    if desired.tier2 and desired.tier2.place in places:
        yield f"The store {desired.tier2.place} is in use and retiring."
    for one, other in _same_part(desired.shards):
        yield f"Shards {one} and {other} would overwrite each other in tier 2: same namespace and part."


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]


def _same_part(shards: Iterable[ShardSpec]) -> Iterator[tuple[str, str]]:
    """Two shards may share files in tier 2 only if their columns are of one size."""
    known: dict[tuple[str, str], ShardSpec] = {}
    for shard in shards:
        other = known.setdefault((shard.namespace, shard.part), shard)
        if other.slot_bytes != shard.slot_bytes:
            yield other.name, shard.name


@dataclass(slots=True)
class Progress:
    """How far a part of the document is: the memory of a shard, or the index of a store of tier 2."""

    state: str = "waiting"  # "allocating", "ready", "refused"; of a store also "indexing" and "off"
    reason: str = ""
    done: int = 0
    total: int = 0

    def report(self, done: int, total: int | None) -> None:
        self.done, self.total = done, total or 0
