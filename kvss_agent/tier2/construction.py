"""The store of tier 2 that follows from what a desired document says."""

from __future__ import annotations

from pathlib import Path

from kvss_agent import native
from kvss_agent.limits.background import Background, Rate, Totals
from kvss_agent.mover import Mover
from kvss_agent.tier2.backend import Backend
from kvss_agent.tier2.front.disk import give_up
from kvss_agent.tier2.fronted import Fronted
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.posix import Posix
from kvss_agent.tier2.settings import Tier2Settings, Writes
from kvss_agent.tier2.store import Tier2


class NotInstalled(Exception):
    """What a backend needs is not there; a sentence says how to get it."""


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
