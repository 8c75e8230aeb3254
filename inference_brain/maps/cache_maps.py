"""All cache maps of the drivers that a brain follows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Final, NamedTuple

from inference_brain.maps.hits import NOTHING, Hit
from inference_brain.maps.look_up import Drivers, look_up
from inference_brain.maps.mirror import Mirror, Scope, Spaces
from inference_brain.maps.table import BLOCKS_MAX, LANES, ROWS_MAX, MapTable
from swdriver_shim.cache_map.codec import SPACE_BYTES
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import Namespace, Prompt
from swdriver_shim.layout import Layout

DRIVERS_MAX: Final = LANES * BLOCKS_MAX
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


_promises: Callable[[Mirror], bool] = attrgetter("promises")


class _Group(NamedTuple):
    """Drivers of one model, among those that are asked for."""

    model: ModelSpec
    layout: Layout
    drivers: Drivers
    mirrors: list[Mirror]
    places: list[int]


@lru_cache(maxsize=4096)
def _space_of(namespace: Namespace) -> bytes:
    return namespace.digest()[:SPACE_BYTES]


class CacheMaps:
    """Not thread-safe: everything is called from the brain's event loop. `reader.MapReader` feeds it."""

    def __init__(self, wall_clock: Callable[[], float] = time.time, rows_max: int = ROWS_MAX) -> None:
        self.table = MapTable(int(wall_clock()) - 1, rows_max)
        self._spaces = Spaces()
        self._followed: dict[str, _Followed] = {}
        self._free: dict[ModelSpec, list[int]] = {}  # lanes in blocks of drivers of this model
        self._blocks = 0
        self._free_blocks: list[int] = []
        self._grouped: dict[tuple[str, ...], list[_Group]] = {}

    def follow(self, drivers: Mapping[str, DriverPlace], makers: Iterable[SpaceOf] = ()) -> None:
        """Follow these drivers and no others. Maps of those that stay are kept. `makers`: whose prompts
        are served; what of it was forgotten is read again."""
        for name in [name for name, one in self._followed.items() if drivers.get(name) != one.place]:
            self._leave(name)
        for name, place in drivers.items():
            if name not in self._followed and len(self._followed) < DRIVERS_MAX:
                mirror = Mirror(self.table, self._spaces, self._take_lane(place.model))
                self._followed[name] = _Followed(place, mirror)
        self._grouped.clear()
        if self._spaces.remember(tag + _space_of(namespace) for tag, namespace in makers):
            for _, mirror in self._followed.values():
                mirror.read_again()

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
        for name, (_, mirror) in self._followed.items():
            if count := removed[mirror.lane]:
                mirror.entries -= count
                by_driver[name] = count
        return by_driver

    def hits(
        self, drivers: Sequence[str], prompts: Mapping[ModelSpec, Prompt], now: float
    ) -> list[Hit | None]:
        """What each driver can serve of a prompt at this wall time; None where its map is not known.
        `prompts`: the same tokens, by the model whose keys they have."""
        hits: list[Hit | None] = [None] * len(drivers)
        for group in self._groups_of(tuple(drivers)):
            prompt = prompts.get(group.model)
            if prompt is None:
                continue
            found = self._look_up(prompt, group, now)
            if len(found) == len(hits) and all(map(_promises, group.mirrors)):
                return [*found]
            for place, mirror, hit in zip(group.places, group.mirrors, found, strict=True):
                if mirror.is_known:
                    hits[place] = hit if mirror.serves else NOTHING
        return hits

    def age(self, driver: str, now: float) -> float | None:
        """How many seconds ago the driver last reported; None if its map is not known."""
        followed = self._followed.get(driver)
        if followed is None or not followed.mirror.is_known:
            return None
        return max(0.0, now - followed.mirror.at)

    def mirror(self, driver: str) -> Mirror | None:
        """For the reader, and for figures."""
        followed = self._followed.get(driver)
        return followed.mirror if followed else None

    @property
    def places(self) -> Mapping[str, DriverPlace]:
        """The drivers that are followed."""
        return {name: followed.place for name, followed in self._followed.items()}

    def keep_house(self, now: float) -> None:
        """Called now and then: times in the table must not become too large."""
        if now - self.table.epoch > REBASE_SECONDS:
            self.table.set_epoch(int(now) - 1)

    # Inside

    def _look_up(self, prompt: Prompt, group: _Group, now: float) -> list[Hit]:
        space = self._spaces.find(prompt.maker.tag + _space_of(prompt.maker.namespace))
        if space is None:
            return [NOTHING] * len(group.places)
        return look_up(self.table, space, group.layout, prompt, group.drivers, now)

    def _groups_of(self, drivers: tuple[str, ...]) -> list[_Group]:
        found = self._grouped.get(drivers)
        if found is None:
            by_model: dict[ModelSpec, list[int]] = {}
            for place, name in enumerate(drivers):
                if followed := self._followed.get(name):
                    by_model.setdefault(followed.place.model, []).append(place)
            found = [self._group(model, drivers, places) for model, places in by_model.items()]
            if len(self._grouped) >= GROUPS_KEPT:
                self._grouped.clear()
            self._grouped[drivers] = found
        return found

    def _group(self, model: ModelSpec, drivers: Sequence[str], places: list[int]) -> _Group:
        mirrors = [self._followed[drivers[place]].mirror for place in places]
        lanes = Drivers([mirror.lane for mirror in mirrors])
        return _Group(model, model.shape(), lanes, mirrors, places)

    def _take_lane(self, model: ModelSpec) -> int:
        """A lane beside those of other drivers of the model: they are looked up together."""
        free = self._free.setdefault(model, [])
        if not free:
            if self._free_blocks:
                block = self._free_blocks.pop()
            else:
                block, self._blocks = self._blocks, self._blocks + 1
            free += [block * LANES + lane for lane in reversed(range(LANES))]
        return free.pop()

    def _leave(self, name: str) -> None:
        place, mirror = self._followed.pop(name)
        mirror.clear()
        free = self._free[place.model]
        free.append(mirror.lane)
        block = mirror.lane // LANES
        if sum(lane // LANES == block for lane in free) == LANES:
            self._free[place.model] = [lane for lane in free if lane // LANES != block]
            self._free_blocks.append(block)
