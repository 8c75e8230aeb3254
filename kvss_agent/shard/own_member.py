"""A member of a shard that is no connection: the agent itself reads or fills slots, in its turn."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Final

from kvss_agent.data_plane.breach import Breach, Cause
from kvss_agent.data_plane.wire import Role
from kvss_agent.shard.core import Request
from kvss_agent.shard.hosted import HostedShard, Mine, SlotLimit

_numbers: Final = iter(range(-1, -(1 << 62), -1))  # those of connections are positive


class OwnMember:
    """Asks in one thread; `close` may be called from any. `on_close` is called then."""

    def __init__(self, shard: HostedShard, driver: str, on_close: Callable[[], None]) -> None:
        self.number = next(_numbers)
        self.driver = driver
        self.left = threading.Event()
        self.closed: Breach | None = None
        self._shard = shard
        self._on_close = on_close
        self._posted: SimpleQueue[Mine | None] = SimpleQueue()

    def post(self, what: Mine | SlotLimit) -> None:
        if not isinstance(what, SlotLimit):
            self._posted.put(what)

    def close(self, cause: Cause, sentence: str) -> None:
        self.closed = Breach(cause, sentence)
        self._posted.put(None)
        self._on_close()

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Raises Breach."""
        self._shard.attach(self, Role.REFILL)
        try:
            yield
        finally:
            self._shard.detach(self)
            self.left.set()

    def ask(self, request: Request) -> Mine:
        """What is to be done now, whenever that may be. Raises Breach if the shard is gone."""
        mine = self._shard.act(lambda core, now: core.ask(request, now), self)
        effect = mine[0] if mine else self._posted.get()
        if effect is None:
            raise self.closed or Breach(Cause.GONE, "the shard was removed")
        return effect
