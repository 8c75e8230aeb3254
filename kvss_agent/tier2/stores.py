"""All stores of an agent: the one in use, and those that are retiring.

A store is in use until a document names another one, or none. Then it is *retiring*: nothing is stored
there and nothing is brought back, but what lies there expires, is deleted and is purged as before, until
nothing is left. So no change of a document leaves files behind that nobody looks after: each store is
written down in the state directory before it is opened for the first time, and crossed out when a
listing has found it empty.

A document may name retiring stores, too. That is how a console has an agent look after a store of which
its state directory knows nothing, and how one is *drained*: it is named with a cap of 0, and its files
are removed, whoever wrote them. In a retiring store that is not drained no cap holds: caps are about
what one agent stores, and others may be storing there now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from kvss_agent.desired import Progress
from kvss_agent.process.durable_file import write_durably
from kvss_agent.tier2.address import Part
from kvss_agent.tier2.backend import Failed
from kvss_agent.tier2.construction import NotInstalled, leave_front, make
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.settings import Tier2Settings
from kvss_agent.tier2.store import Tier2
from telemetry.decoder import Malformed, decode

log = logging.getLogger(__name__)

NAME: Final = "stores.json"  # in the state directory
ALIAS: Final = "It is the store in use, by another name."
REMEMBERED_MAX: Final = 256  # stores that are not empty; another one is not opened beside them
NO_CAP: Final = sys.maxsize
CANNOT: Final = (Failed, NotInstalled, ValueError, OSError)  # why a store is not to be had now
_DECODER: Final = msgspec.json.Decoder(list[Tier2Settings])


class NotOpen(Exception):
    """Nobody can tell what lies in a store that is not open; a sentence says which and why."""


@dataclass(eq=False, slots=True)
class Retiring:
    """A store that is not used any more. Its states: "indexing", "retiring", "refused", "empty"."""

    settings: Tier2Settings
    store: Tier2 | None = None
    progress: Progress = field(default_factory=Progress)
    task: asyncio.Task[None] | None = None
    is_drained: bool = False  # its files are removed, instead of waited for

    def caps(self) -> Caps:
        """What is beyond them is removed: all if it is drained, and else only what is of orgs that may
        have nothing. That is a policy, while other caps are about what this agent stores."""
        if self.is_drained:
            return Caps(0, 0)
        orgs = self.settings.caps().orgs
        return Caps(NO_CAP, NO_CAP, {tag: 0 for tag, cap in orgs.items() if cap == 0})

    def shown(self) -> dict[str, Any]:
        stats = self.store.stats() if self.store else None
        return {
            "place": self.settings.place,
            **asdict(self.progress),
            "files": stats.columns if stats else None,
            "bytes": stats.bytes if stats else None,
        }


class Stores:
    """Lives on one event loop."""

    def __init__(self, state_dir: Path, serve: Callable[[Tier2 | None], None]) -> None:
        """`serve` is told which store is in use, as soon as it is, and before it is not any more."""
        self.current: Tier2 | None = None
        self._serve = serve
        self.progress = Progress("off")  # of the one in use
        self._note = state_dir / NAME
        self._settings: Tier2Settings | None = None  # of the one in use, as it was told
        self._remembered: dict[str, Tier2Settings] = {}  # by place: those that may have files
        self._retiring: dict[str, Retiring] = {}
        self._named: frozenset[str] = frozenset()  # places of those that the document says are retiring
        self._live: frozenset[bytes] | None = None
        self._attended: frozenset[Part] | None = None
        self._opening: dict[str, Tier2] = {}  # by place
        self._is_closing = False

    def remember(self, before: Iterable[Tier2Settings] = ()) -> None:
        """What an earlier life has opened; `before`, if that was one that took no notes. Raises OSError,
        and ValueError for a note that is none: who can't know which stores there were must not go on as
        if there were none."""
        try:
            kept = decode(self._note.read_bytes(), _DECODER)
        except FileNotFoundError:
            self._write_down({settings.place: settings for settings in before})
        except Malformed as error:
            raise ValueError(
                f"{self._note} does not say which stores of tier 2 there were: {error}. Restore it; or "
                "remove it, and those stores' files by hand."
            ) from error
        else:
            self._remembered = {settings.place: settings for settings in kept}

    # What there is

    @property
    def opened(self) -> list[Tier2]:
        """Those that can be asked now, the one in use first."""
        retiring = [one.store for one in self._retiring.values() if one.store]
        return ([self.current] if self.current else []) + retiring

    def everything(self) -> dict[str, Tier2]:
        """By place, all that may have files. Raises NotOpen where one of them can't be asked."""
        if self._settings is None:
            return self.retiring()
        if self.current is None:
            raise NotOpen(_not_open("Tier 2", self.progress))
        return {self._settings.place: self.current, **self.retiring()}

    def states(self) -> dict[str, str]:
        """By place how each stands, those that are empty included."""
        found = {self._settings.place: "in use"} if self._settings else {}
        return {**{place: one.progress.state for place, one in self._retiring.items()}, **found}

    def serve_only(self, tags: frozenset[bytes] | None) -> None:
        """From now on other tags are nobody's: what carries them is not served or stored, and goes for
        good. None: nobody has said which there are."""
        self._live = tags
        for store in self.opened:
            store.live = tags

    def attend(self, parts: Collection[Part]) -> None:
        """The agent has shards with these columns. What waits of others in front of a store is copied
        behind."""
        self._attended = frozenset(parts)
        for store in self.opened:
            store.attend(parts)

    def retiring(self) -> dict[str, Tier2]:
        """As `everything`, of those that are retiring."""
        found: dict[str, Tier2] = {}
        for place, one in self._retiring.items():
            if one.store:
                found[place] = one.store
            elif one.progress.state != "empty":
                raise NotOpen(_not_open(f"The retiring store {place}", one.progress))
        used = self._settings.place if self._settings else ""
        for place in self._remembered.keys() - self._retiring.keys() - {used}:
            raise NotOpen(f"The store {place} is not open yet. Ask again when it is.")
        return found

    @property
    def is_settled(self) -> bool:
        """Nothing has to be tried again, and nothing is on its way that may have to be."""
        return self.progress.state != "refused" and all(
            one.progress.state in ("retiring", "empty") for one in self._retiring.values()
        )

    def shown(self) -> list[dict[str, Any]]:
        return [one.shown() for one in self._retiring.values()]

    # Following a document

    def call_off(self, told: Tier2Settings | None) -> None:
        """A document with these settings is on its way: another store is not opened to the end for what
        the document before said. That may take long."""
        if self._settings and (told is None or told.place != self._settings.place):
            self._call_off(self._settings.place)

    def _call_off(self, place: str) -> None:
        if store := self._opening.get(place):
            store.call_off()

    async def use(self, told: Tier2Settings | None) -> None:
        """Make this the store in use, or none; the one before is retiring."""
        before, self._settings = self._settings, told
        if told == before and (told is None or self.progress.state == "ready"):
            return
        try:
            if told and before and self.current and _only_limits_differ(told, before):
                await _limit(self.current, told, told.caps())
                self.progress = Progress("ready")
                return
            await self._put_aside(before, told)
            if told is None:
                self.progress = Progress("off")
                return
            self.progress = Progress("indexing")
            self._change_to(await self._taken_back(told) or await self._opened_first(told))
            self.progress.state = "ready"
        except CANNOT as error:
            self.progress = Progress("refused", str(error))
            log.warning("Tier 2: %s", error)

    def _change_to(self, store: Tier2 | None) -> None:
        self.current = store
        self._serve(store)

    async def _put_aside(self, before: Tier2Settings | None, told: Tier2Settings | None) -> None:
        store = self.current
        self._change_to(None)
        if store is None or before is None:
            return
        if told is not None and _is_same_place(told, before):
            await store.close()  # it is opened anew, with other settings
            if told.place != before.place:
                await _leave_front(before, told)
                self._note_down(told)  # it has files, by this name too
                self._cross_out(before.place)
        else:
            one = self._retiring[before.place] = Retiring(before, store)
            one.progress.state = "retiring"
            await _limit_retiring(one, store)

    async def _taken_back(self, told: Tier2Settings) -> Tier2 | None:
        """The store, where it is retiring and open; it is in use from here on."""
        one = self._retiring.pop(told.place, None)
        if one is None:
            return None
        await _ended(one.task)
        if one.store and _only_limits_differ(told, one.settings):
            await _limit(one.store, told, told.caps())
            return one.store
        if one.store:
            await one.store.close()
        return None

    async def _opened_first(self, told: Tier2Settings) -> Tier2:
        """Written down before: from then on it may have files of ours. One that has never been opened
        has none."""
        before = self._remembered.get(told.place)
        if before:
            await _leave_front(before, told)
        self._note_down(told)
        try:
            return await self._opened(told, told.caps(), self.progress)
        except CANNOT:
            if before is None:
                self._cross_out(told.place)
            raise

    async def retire(self, named: Sequence[Tier2Settings]) -> None:
        """Look after these, and after all that was ever opened and is not known to be empty."""
        used = self._settings
        names = self._named = frozenset(settings.place for settings in named)
        aliases: dict[str, Retiring] = {}
        for place in self._retiring.keys() - self._remembered.keys() - names:
            await self._let_go(self._retiring.pop(place))  # unless it is written down when it is open
        wanted = {**self._remembered, **{settings.place: settings for settings in named}}
        if used:
            for place, settings in list(wanted.items()):
                if _is_same_place(settings, used):
                    del wanted[place]
                    if place != used.place and used.place in self._remembered:
                        await self._forget_alias(place, used)
                    if place in names:
                        aliases[place] = Retiring(settings, progress=Progress("empty", ALIAS))
        for place in self._retiring.keys() - wanted.keys():
            await self._let_go(self._retiring.pop(place))
        self._retiring |= aliases
        for place, settings in wanted.items():
            limited = settings if place in names or not used else _with_limits_of(settings, used)
            await self._look_after(limited, is_drained=place in names and settings.cap_bytes == 0)

    async def _forget_alias(self, place: str, used: Tier2Settings) -> None:
        try:
            if before := self._remembered.get(place):
                await _leave_front(before, used)
        except CANNOT as error:
            log.warning("Tier 2: %s", error)  # with the next document once more
        else:
            self._cross_out(place)

    async def _look_after(self, settings: Tier2Settings, *, is_drained: bool) -> None:
        if settings.place in self._remembered:  # with the front that has files of it, whoever names it
            settings = replace(settings, front=self._remembered[settings.place].front)
        one = self._retiring.setdefault(settings.place, Retiring(settings))
        before = one.settings, one.is_drained
        one.settings, one.is_drained = settings, is_drained
        if one.store:
            if before != (settings, is_drained) or one.progress.state == "refused":
                await _limit_retiring(one, one.store)
        elif one.progress.state != "empty" and (one.task is None or one.task.done()):
            one.progress = Progress("indexing", one.progress.reason)
            one.task = asyncio.create_task(self._open(one), name=f"open {settings.place}")

    async def _open(self, one: Retiring) -> None:
        """Beside everything else: to list a store may take minutes."""
        with _told(one.progress):
            asked = one.settings
            store = await self._opened(asked, one.caps(), one.progress)
            try:
                self._note_down(asked)
            except CANNOT:
                await store.close()
                raise
            if self._is_closing:
                await store.close()
                return
            one.store = store
            await _limit_retiring(one, store)  # another document may have come meanwhile

    async def _opened(self, settings: Tier2Settings, caps: Caps, progress: Progress) -> Tier2:
        store = make(settings, caps)
        store.live = self._live
        if self._attended is not None:
            store.attend(self._attended)
        self._opening[settings.place] = store
        try:
            await store.open(progress.report)
        except BaseException:
            await store.close()  # what it does by itself ends before another one looks at these files
            raise
        finally:
            self._opening.pop(settings.place, None)
        return store

    async def _let_go(self, one: Retiring) -> None:
        await _ended(one.task)
        if one.store:
            await one.store.close()

    # Running them

    async def expire(self) -> None:
        """Remove what is too old, and let go of stores where nothing is left. Raises Failed; the others
        have had their turn then."""
        failed: Failed | None = None
        for store in self.opened:
            try:
                await store.sweep()
                await store.expire()
            except Failed as error:
                failed = error
        for one in list(self._retiring.values()):
            if one.store and not one.store.stats().columns:
                try:
                    await self._let_go_if_empty(one, one.store)
                except Failed as error:
                    failed = error
        if failed:
            raise failed

    async def refresh(self) -> None:
        """Look what others have done in the store in use. Raises Failed."""
        if self.current:
            await self.current.refresh()

    async def _let_go_if_empty(self, one: Retiring, store: Tier2) -> None:
        """A listing says so, and not only what we remember: others may have written there."""
        place = one.settings.place
        being_purged = await store.rebuild()
        if being_purged or store.stats().columns or store.stats().in_flight:
            return
        if one.store is not store or self._retiring.get(place) is not one:
            return  # it is in use again, or gone
        one.store = None
        one.progress = Progress("empty")
        self._cross_out(place)  # before anybody can open it again
        await store.close()
        log.info("The retiring store %s is empty", place)
        if place not in self._named and self._retiring.get(place) is one:
            del self._retiring[place]  # else whoever named it is told so

    async def close(self) -> None:
        self._is_closing = True
        for place in self._opening:
            self._call_off(place)
        for one in list(self._retiring.values()):
            await _ended(one.task)
        stores = self.opened
        self._change_to(None)
        for one in list(self._retiring.values()):
            one.store = None
        for store in stores:
            await store.close()

    # What is written down

    def _note_down(self, settings: Tier2Settings) -> None:
        """Raises OSError, and ValueError for too many."""
        noted = {**self._remembered, settings.place: settings}
        if len(noted) > REMEMBERED_MAX:
            raise ValueError(f"{REMEMBERED_MAX} stores are not empty yet: empty some of them first")
        self._write_down(noted)

    def _cross_out(self, place: str) -> None:
        left = {name: settings for name, settings in self._remembered.items() if name != place}
        try:
            self._write_down(left)
        except OSError as error:  # it is looked into once more, by the next life
            log.warning("Cannot record that %s is empty: %s", place, error)

    def _write_down(self, noted: Mapping[str, Tier2Settings]) -> None:
        if noted != self._remembered or not self._note.exists():
            write_durably(self._note, msgspec.json.encode(list(noted.values())))
            self._remembered = dict(noted)


async def _leave_front(before: Tier2Settings, after: Tier2Settings) -> None:
    """The front of these settings is left where the next ones have another, or none. Raises CANNOT."""
    if before.front_folder not in (None, after.front_folder):
        await asyncio.to_thread(leave_front, before)


async def _limit(store: Tier2, settings: Tier2Settings, caps: Caps) -> None:
    store.limits = settings.limits()
    store.write_rate.bytes_per_second = settings.write_bytes_per_second
    await store.set_caps(caps)


async def _limit_retiring(one: Retiring, store: Tier2) -> None:
    with _told(one.progress):
        await _limit(store, one.settings, one.caps())
        one.progress.state, one.progress.reason = "retiring", ""


async def _ended(task: asyncio.Task[None] | None) -> None:
    """To its end: a thread that lists files can't be called back."""
    if task:
        await asyncio.wait([task])


@contextlib.contextmanager
def _told(progress: Progress) -> Iterator[None]:
    try:
        yield
    except CANNOT as error:
        progress.state, progress.reason = "refused", str(error)
        log.warning("A retiring store of tier 2: %s", error)


def _not_open(what: str, progress: Progress) -> str:
    return f"{what} is not open: {progress.reason or progress.state}. Ask again when it is."


def _only_limits_differ(one: Tier2Settings, other: Tier2Settings) -> bool:
    """But for what may change while it is open it is the same."""
    one = replace(one, cap_bytes=other.cap_bytes, write_bytes_per_second=other.write_bytes_per_second)
    return other == _with_limits_of(one, other)


def _with_limits_of(one: Tier2Settings, other: Tier2Settings) -> Tier2Settings:
    return replace(
        one,
        org_cap_bytes=other.org_cap_bytes,
        org_caps=other.org_caps,
        ttl_seconds=other.ttl_seconds,
        org_ttl_seconds=other.org_ttl_seconds,
    )


def _is_same_place(one: Tier2Settings, other: Tier2Settings) -> bool:
    """Whether the files of one are the files of the other, whatever the path."""
    if one.place == other.place:
        return True
    if not one.kind == other.kind == "posix":
        return False
    with contextlib.suppress(OSError):
        return Path(one.path).samefile(other.path)
    return False
