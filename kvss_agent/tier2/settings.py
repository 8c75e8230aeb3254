"""What a desired document says about tier 2. Nothing here opens a store: the console reads it, too, and
makes none. `construction` makes the store that follows from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct, field
from xxhash import xxh3_64_hexdigest

from kvss_agent.shard.seal import TAG_BYTES
from kvss_agent.tier2.index import Caps, Limits

THREADS_MAX: Final = 256


class Writes(StrEnum):
    """When a column is written to the store behind a front: see `fronted`."""

    THROUGH = "through"
    BACK = "back"
    DISPLACED = "displaced"


class FrontSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A directory of the agent's own disk in front of a store: see `fronted`."""

    path: str
    cap_bytes: int
    writes: Writes = Writes.THROUGH

    def __post_init__(self) -> None:
        if not Path(self.path).is_absolute():
            raise ValueError(f"the front of tier 2 needs an absolute path, not {self.path!r}")
        if self.cap_bytes <= 0:
            raise ValueError("the front of tier 2 needs a cap of more than nothing")

    def folder_for(self, place: str) -> Path:
        """Each store has one of its own there: a retiring one may be beside the one in use."""
        return Path(self.path) / xxh3_64_hexdigest(place.encode())


class Tier2Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """One store: where, how much, how. A setting that makes no sense is refused with a sentence.

    `shared`: other agents write there too, so what is not known is asked for. `write_bytes_per_second`:
    what spills and the front may write to the store, where links lead there. `durable` (posix, and what
    waits in front): a spill waits for the disk. Without it, a power cut may lose the last columns, and
    never gives wrong ones.
    """

    kind: Literal["posix", "s3"]
    cap_bytes: int
    org_cap_bytes: int | None = None  # for an org that has none of its own; None: up to `cap_bytes`
    org_caps: Mapping[str, int] = field(default_factory=dict)  # by tag, in hex
    ttl_seconds: int | None = None  # since a column was copied; for an org that has none of its own
    org_ttl_seconds: Mapping[str, int] = field(default_factory=dict)  # by tag, in hex
    path: str = ""  # posix
    durable: bool = False  # posix
    bucket: str = ""  # s3
    prefix: str = ""  # s3
    endpoint: str = ""  # s3; empty: Amazon's
    region: str = "us-east-1"  # s3
    shared: bool = True
    threads: int = 8
    write_bytes_per_second: int | None = None
    front: FrontSettings | None = None

    def __post_init__(self) -> None:
        if self.kind == "posix" and not Path(self.path).is_absolute():
            raise ValueError(f"tier 2 of kind posix needs an absolute path, not {self.path!r}")
        if self.kind == "s3" and not self.bucket:
            raise ValueError("tier 2 of kind s3 needs a bucket")
        if not 0 < self.threads <= THREADS_MAX:
            raise ValueError(f"tier 2 uses 1 to {THREADS_MAX} threads, not {self.threads}")
        if self.write_bytes_per_second is not None and self.write_bytes_per_second <= 0:
            raise ValueError("tier 2 needs more than no bytes per second for writing")
        if self.front:
            self._check_front(self.front)
        self.caps()
        self.limits()

    def _check_front(self, front: FrontSettings) -> None:
        if self.kind == "s3" and front.writes == Writes.DISPLACED:
            raise ValueError(
                "a bucket cannot say since when a column exists, so what is displaced to it would lie "
                "there too long: write through or back"
            )
        paths = sorted((os.path.normpath(self.path), os.path.normpath(front.path)), key=len)
        if self.kind == "posix" and Path(paths[1]).is_relative_to(paths[0]):
            raise ValueError("the front of tier 2 and the store behind it lie within each other")

    @property
    def front_folder(self) -> Path | None:
        return self.front.folder_for(self.place) if self.front else None

    @property
    def place(self) -> str:
        """Where its files lie: the same for the same store, whatever else is said of it."""
        if self.kind == "posix":
            return f"posix:{os.path.normpath(self.path)}"
        prefix = f"/{self.prefix.strip('/')}" if self.prefix.strip("/") else ""
        return f"s3:{self.endpoint.rstrip('/') or self.region}/{self.bucket}{prefix}"

    def caps(self) -> Caps:
        """For `Tier2.set_caps`, when only the caps have changed."""
        org = self.cap_bytes if self.org_cap_bytes is None else self.org_cap_bytes
        return Caps(self.cap_bytes, org, {_tag(text): cap for text, cap in self.org_caps.items()})

    def limits(self) -> Limits:
        """For `Tier2.limits`, when only those have changed."""
        seconds = {_tag(text): seconds for text, seconds in self.org_ttl_seconds.items()}
        return Limits(self.ttl_seconds, seconds)


def _tag(text: str) -> bytes:
    tag = bytes.fromhex(text)
    if len(tag) != TAG_BYTES:
        raise ValueError(f"a tag has {TAG_BYTES} bytes in hex, not {text!r}")
    return tag
