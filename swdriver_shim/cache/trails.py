"""How far conversations have come that are going to go on: what a prefetch looks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from swdriver_shim.keys import Keys

TRAILS_KEYS_MAX: Final = 1 << 20  # of all together


class Trail(Protocol):
    """What is known of a prompt without its tokens."""

    @property
    def maker(self) -> Keys: ...
    @property
    def keys(self) -> Sequence[bytes]: ...


class Known(NamedTuple):
    """A prompt whose tokens are not here any more."""

    maker: Keys
    keys: Sequence[bytes]


class Trails:
    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Known] = {}  # by org and `continue_id`, the oldest first
        self._keys = 0

    def remember(self, continue_id: str, prompt: Trail) -> None:
        if not continue_id or not prompt.keys:
            return
        name = prompt.maker.org, continue_id
        self._forget(name)
        self._known[name] = Known(prompt.maker, list(prompt.keys))
        self._keys += len(prompt.keys)
        while self._keys > TRAILS_KEYS_MAX:
            self._forget(next(iter(self._known)))

    def find(self, org: str, continue_id: str) -> Trail | None:
        """None if nobody remembers."""
        return self._known.get((org, continue_id))

    def forget(self, org: str) -> None:
        for name in [name for name in self._known if name[0] == org]:
            self._forget(name)

    def _forget(self, name: tuple[str, str]) -> None:
        if known := self._known.pop(name, None):
            self._keys -= len(known.keys)
