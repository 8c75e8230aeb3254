"""All cache maps of the drivers that a brain follows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from inference_brain.maps.hits import NOTHING, Hits
from inference_brain.maps.holders import LANES_MAX
from inference_brain.maps.look_up import Drivers, look_up
from inference_brain.maps.mirror import Mirror, Scope, Spaces, Trust
from inference_brain.maps.table import ROWS_MAX, MapTable
from swdriver_shim.cache_map.codec import SPACE_BYTES
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import Namespace, Prompt

DRIVERS_MAX: Final = LANES_MAX
REBASE_SECONDS: Final = 1 << 22  # so often, times count from a later second on
GROUPS_KEPT: Final = 256  # sets of drivers that were asked for


class DriverPlace(NamedTuple):
    """A driver that is followed. `topic`: as in telemetry, such as `driver:job7`. `model`: with whose
    keys it names columns."""

    topic: str
    model: ModelSpec


SpaceOf = tuple[bytes, Namespace]  # an isolation tag, and the namespace of a driver's model


class _Followed(NamedTuple):
    place: DriverPlace
    mirror: Mirror
    since: float


class _Group:
    """Drivers of one model, among those that are asked for. `places`: of each, among all."""

    def __init__(self, model: ModelSpec, mirrors: Sequence[Mirror], places: Sequence[int]) -> None:
        self.model, self.layout = model, model.shape()
        self.drivers = Drivers(np.array([mirror.lane for mirror in mirrors], np.int64))
        self.places = np.array(places, np.int64)
        self.unknown = self.silent = self.places  # whose map is not known, and who serves nothing
        self._mirrors = mirrors
        self._changes = -1

    def update(self, changes: int) -> None:
        """Note whose entries are to be believed, if that has changed: there were so many changes."""
        if changes != self._changes:
            self._changes = changes
            is_known = np.array([mirror.is_known for mirror in self._mirrors], bool)
            serves = np.array([mirror.serves for mirror in self._mirrors], bool)
            self.unknown = np.flatnonzero(~is_known)
            self.silent = np.flatnonzero(is_known & ~serves)


@lru_cache(maxsize=4096)
def _space_of(namespace: Namespace) -> bytes:
    return namespace.digest()[:SPACE_BYTES]


class CacheMaps:
    """Not thread-safe: everything is called from the brain's event loop. `reader.MapReader` feeds it."""

    def __init__(
        self,
        wall_clock: Callable[[], float] = time.time,
        rows_max: int = ROWS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.table = MapTable(int(wall_clock()) - 1, rows_max)
        self._spaces = Spaces()
        self._trust = Trust()
        self._followed: dict[str, _Followed] = {}
        self._free = list(reversed(range(DRIVERS_MAX)))  # lanes
        self._grouped: dict[tuple[str, ...], list[_Group]] = {}

    def follow(self, drivers: Mapping[str, DriverPlace], makers: Iterable[SpaceOf] = ()) -> None:
        """Follow these drivers and no others. Maps of those that stay are kept. `makers`: whose prompts
        are served; what of it was forgotten is read again."""
        for name in [name for name, one in self._followed.items() if drivers.get(name) != one.place]:
            self._leave(name)
        for name, place in drivers.items():
            if name not in self._followed and len(self._followed) < DRIVERS_MAX:
                mirror = Mirror(self.table, self._spaces, self._free.pop(), self._trust, self._clock)
                self._followed[name] = _Followed(place, mirror, self._clock())
        self._grouped.clear()
        if self._spaces.remember(tag + _space_of(namespace) for tag, namespace in makers):
            for one in self._followed.values():
                one.mirror.read_again()

    def forget(self, scopes: Iterable[Scope]) -> dict[str, int]:
        """Nothing of these scopes is known from here on, whatever drivers report: of a tag, and of one
        namespace where that is given by its digest. Returns how many entries of each driver there
        were."""
        numbers = self._spaces.forget(scopes)
        removed: Counter[int] = Counter()
        for number in numbers:
            removed.update(self.table.remove_space(number))
        self._spaces.release(numbers)
        by_driver = {}
        for name, one in self._followed.items():
            if count := removed[one.mirror.lane]:
                one.mirror.entries -= count
                by_driver[name] = count
        return by_driver

    @property
    def has_forgotten(self) -> bool:
        return self._spaces.has_forgotten

    def is_forgotten(self, tag: bytes, namespace: Namespace | None = None) -> bool:
        """Whether columns of this tag and namespace, or of all, were forgotten and are not served."""
        return self._spaces.is_forgotten(tag, _space_of(namespace) if namespace else None)

    def hits(self, drivers: Sequence[str], prompts: Mapping[ModelSpec, Prompt], now: float) -> Hits:
        """What each driver can serve of a prompt at this wall time; None where its map is not known.
        `prompts`: the same tokens, by the model whose keys they have."""
        groups = self._groups_of(tuple(drivers))
        if len(groups) == 1 and len(groups[0].places) == len(drivers):
            prompt = prompts.get(groups[0].model)
            return (
                Hits.unknown(len(drivers)) if prompt is None else self._look_up(prompt, groups[0], now)
            )
        hits = Hits.unknown(len(drivers))
        for group in groups:
            if (prompt := prompts.get(group.model)) is not None:
                hits.put(group.places, self._look_up(prompt, group, now))
        return hits

    def age(self, driver: str, now: float) -> float | None:
        """How many seconds ago the driver last reported, by the clock of who reads what it reports; None
        if its map is not known."""
        followed = self._followed.get(driver)
        if followed is None or not followed.mirror.is_known:
            return None
        return max(0.0, now - followed.mirror.at)

    def seconds_without_news(self, driver: str, now: float) -> float | None:
        """Like `age`, but no longer than the driver is followed: a brain that starts finds the last
        report of a driver that starts too, from before both were stopped."""
        age = self.age(driver, now)
        return None if age is None else min(age, max(0.0, now - self._followed[driver].since))

    def mirror(self, driver: str) -> Mirror | None:
        """For the reader, and for figures."""
        followed = self._followed.get(driver)
        return followed.mirror if followed else None

    @property
    def changes(self) -> int:
        """How often any driver has changed in whether its map is known, or whether it serves."""
        return self._trust.changes

    def is_served(self, driver: str) -> bool:
        """Whether its map is known, and it serves what is in it."""
        mirror = self.mirror(driver)
        return mirror is not None and mirror.is_known and mirror.serves

    @property
    def places(self) -> Mapping[str, DriverPlace]:
        """The drivers that are followed."""
        return {name: followed.place for name, followed in self._followed.items()}

    def keep_house(self, now: float) -> None:
        """Called now and then: times in the table must not become too large."""
        if now - self.table.epoch > REBASE_SECONDS:
            self.table.set_epoch(int(now) - 1)

    # Inside

    def _look_up(self, prompt: Prompt, group: _Group, now: float) -> Hits:
        space = self._spaces.find(prompt.maker.tag + _space_of(prompt.maker.namespace))
        if space is None:
            hits = Hits.of([NOTHING] * len(group.places))
        else:
            hits = look_up(self.table, space, group.layout, prompt, group.drivers, now)
        group.update(self._trust.changes)
        if group.silent.size:
            hits.set(group.silent, NOTHING)
        if group.unknown.size:
            hits.set(group.unknown, None)
        return hits

    def _groups_of(self, drivers: tuple[str, ...]) -> list[_Group]:
        found = self._grouped.get(drivers)
        if found is None:
            by_model: dict[ModelSpec, list[int]] = {}
            for place, name in enumerate(drivers):
                if followed := self._followed.get(name):
                    by_model.setdefault(followed.place.model, []).append(place)
            found = [
                _Group(model, [self._followed[drivers[place]].mirror for place in places], places)
                for model, places in by_model.items()
            ]
            if len(self._grouped) >= GROUPS_KEPT:
                self._grouped.clear()
            self._grouped[drivers] = found
        return found

    def _leave(self, name: str) -> None:
        mirror = self._followed.pop(name).mirror
        mirror.clear()
        self._free.append(mirror.lane)
