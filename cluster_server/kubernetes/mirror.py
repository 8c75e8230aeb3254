"""All objects of a kind with some labels, as a watch reports them: a list first, then its changes.

A watch that ends is resumed after its last version. Where the API server does not know the changes since
then (410 Gone) it begins with a list again. Failures are tried again after a pause that grows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from typing import Final

from cluster_server.kubernetes.api import Api, Document, Kind, Refused, TooOld, Unavailable

log = logging.getLogger(__name__)

BACKOFF_FIRST_SECONDS: Final = 0.1
BACKOFF_SECONDS_MAX: Final = 10.0


class Mirror:
    """`on_change(name, object)`: called in the loop, with None for one that is not there any more.
    `on_end`: called if it stops following for an unexpected reason. `reduce`: what is kept of an
    object."""

    def __init__(
        self,
        api: Api,
        kind: Kind,
        labels: Mapping[str, str],
        on_change: Callable[[str, Document | None], None],
        on_end: Callable[[], None],
        reduce: Callable[[Document], Document] = lambda one: one,
    ) -> None:
        self.objects: dict[str, Document] = {}
        self.is_current = False  # its watch runs
        self._api = api
        self._kind = kind
        self._labels = labels
        self._on_change = on_change
        self._on_end = on_end
        self._reduce = reduce
        self._dropped: set[str] = set()
        self._version = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when all objects are known. Raises Unavailable and Refused."""
        await self._list()
        self._task = asyncio.create_task(self._run(), name=f"watch {self._kind.plural}")

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def take(self, one: Document) -> None:
        """What the API server has answered to us, before the watch reports it. Unless that has reported
        more already: one that is older than that, and is not here, has been deleted since."""
        known = self.objects.get(one["metadata"]["name"])
        is_here = known is not None and _is_same_object(known, one)
        if is_here or _version(one) > int(self._version or 0):
            self._put(one)

    def drop(self, name: str) -> None:
        """We have deleted it, and it is gone: what the watch still reports of it is old."""
        if known := self.objects.get(name):
            self._dropped.add(known["metadata"]["uid"])
            self._remove(name)

    async def _list(self) -> None:
        found, self._version = await self._api.list(self._kind, self._labels)
        self._dropped &= {one["metadata"]["uid"] for one in found}
        there = {one["metadata"]["name"] for one in found}
        # What is newer than the list was made while it was read: the watch goes on from before that.
        as_of = int(self._version)
        for name in [
            name for name, one in self.objects.items() if name not in there and _version(one) <= as_of
        ]:
            self._remove(name)
        for one in found:
            self._put(one)

    async def _run(self) -> None:
        try:
            await self._follow()
        except Exception:
            log.exception("The watch of %s has ended", self._kind.plural)
            self.is_current = False
            self._on_end()

    async def _follow(self) -> None:
        pause = BACKOFF_FIRST_SECONDS
        is_alive = False  # whether the API server has reported something since the list
        while True:
            try:
                if not self._version:
                    is_alive = False
                    await self._list()
                self.is_current = True
                events = self._api.watch(self._kind, self._labels, self._version)
                async with contextlib.aclosing(events):
                    async for what, one in events:
                        pause, is_alive = BACKOFF_FIRST_SECONDS, True
                        self._version = one["metadata"]["resourceVersion"]
                        if what == "DELETED":
                            self._remove(one["metadata"]["name"], one)
                        elif what in ("ADDED", "MODIFIED"):
                            self._put(one)
            except TooOld:
                self._version = ""
                self.is_current = False
                if is_alive:
                    continue
            except (Unavailable, Refused) as error:
                if self.is_current:
                    log.warning("The watch of %s has ended: %s", self._kind.plural, error)
                self.is_current = False
            # Many servers that lost one API server do not come back in step.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, BACKOFF_SECONDS_MAX)

    def _put(self, one: Document) -> None:
        name = one["metadata"]["name"]
        known = self.objects.get(name)
        if one["metadata"]["uid"] in self._dropped:
            return
        if known and _is_same_object(known, one) and _version(known) >= _version(one):
            return  # it is known already, or something newer is
        self.objects[name] = self._reduce(one)
        self._tell(name, self.objects[name])

    def _remove(self, name: str, one: Document | None = None) -> None:
        known = self.objects.get(name)
        if one is not None:
            self._dropped.discard(one["metadata"]["uid"])
        if known is None or (one is not None and not _is_same_object(known, one)):
            return  # another one of that name has been made since
        del self.objects[name]
        self._tell(name, None)

    def _tell(self, name: str, one: Document | None) -> None:
        """Anybody may have written it. One that is of no use must not end what is done for others."""
        try:
            self._on_change(name, one)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            log.exception("%s %s is passed over: nothing can be made of it", self._kind.name, name)


def _is_same_object(one: Document, other: Document) -> bool:
    return bool(one["metadata"]["uid"] == other["metadata"]["uid"])


def _version(one: Document) -> int:
    """Of objects of one kind they can be compared: etcd counts."""
    return int(one["metadata"]["resourceVersion"])
