"""What a desired document says about tier 2, and the store that follows from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct, field
from xxhash import xxh3_64_hexdigest

from kvss_agent import native
from kvss_agent.limits.background import Background, Rate, Totals
from kvss_agent.mover import Mover
from kvss_agent.shard.seal import TAG_BYTES
from kvss_agent.tier2.backend import Backend
from kvss_agent.tier2.front.disk import give_up
from kvss_agent.tier2.fronted import Fronted, Writes
from kvss_agent.tier2.index import Caps, Limits
from kvss_agent.tier2.parts.execution import THREADS_MAX
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.store import Tier2


class NotInstalled(Exception):
    """What a backend needs is not there; a sentence says how to get it."""


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


def make(settings: Tier2Settings, caps: Caps | None = None) -> Tier2:
    """The store, not opened yet; with other caps than the settings say, if there are. Raises
    NotInstalled, and ValueError for what cannot be."""
    mover = native.current()
    rate, written = Rate(settings.write_bytes_per_second), Totals()
    background = Background(rate, written)
    spills_to_front = settings.front is not None and settings.front.writes != Writes.THROUGH
    store = Tier2(
        _backend(settings, mover, background),
        caps or settings.caps(),
        shared=settings.shared,
        threads=settings.threads,
        mover=mover,
        background=None if spills_to_front else background,
    )
    store.limits, store.write_rate, store.written = settings.limits(), rate, written
    native.follow(store)
    return store


def leave_front(settings: Tier2Settings) -> None:
    """This store is going to have another front, or none: what waits in the old one is copied to the
    store, and the rest is removed. Blocking. Raises Failed, NotInstalled and ValueError."""
    if folder := settings.front_folder:
        behind = _store_behind(settings, native.current())
        behind.open()
        give_up(folder, behind, Background(lambda: settings.write_bytes_per_second))
        behind.close()


def _backend(settings: Tier2Settings, mover: Mover, background: Background) -> Backend:
    behind = _store_behind(settings, mover)
    if settings.front is None:
        return behind
    fronted = Fronted(
        settings.front.folder_for(settings.place),
        behind,
        settings.front.cap_bytes,
        Writes(settings.front.writes),
        shared=settings.shared,
        durable=settings.durable,
        mover=mover,
        background=background,
    )
    native.follow(fronted)
    return fronted


def _store_behind(settings: Tier2Settings, mover: Mover) -> Backend:
    if settings.kind == "posix":
        posix = Posix(Path(settings.path), durable=settings.durable, mover=mover)
        native.follow(posix)
        return posix
    try:
        from kvss_agent.tier2.s3 import S3  # an extra: who keeps columns on a disk does not need it
    except ModuleNotFoundError as error:
        raise NotInstalled('tier 2 of kind s3 needs: pip install "tidegate[s3]"') from error
    return S3(
        settings.bucket, prefix=settings.prefix, endpoint=settings.endpoint, region=settings.region
    )


def _tag(text: str) -> bytes:
    tag = bytes.fromhex(text)
    if len(tag) != TAG_BYTES:
        raise ValueError(f"a tag has {TAG_BYTES} bytes in hex, not {text!r}")
    return tag
