"""The interface of a driver for engines, for one org.

`LocalPrefixes` is a driver in the engine's own process, `remote.Remote` a daemon.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from swdriver_shim.driver import Driver, Loaded, Part, Stored
from swdriver_shim.keys import Keys, Namespace
from swdriver_shim.layout import Layout
from swdriver_shim.policy import AS_USUAL, Rules


class Prefixes(Protocol):
    """The stored prefixes of one org, in one namespace."""

    @property
    def layout(self) -> Layout: ...

    @property
    def namespace(self) -> Namespace: ...

    def query(self, tokens: Sequence[int]) -> int:
        """How many tokens a load would give."""

    def load(self, tokens: Sequence[int], into: Part, seconds: float = 0.0, request: str = "") -> Loaded:
        """Refill the longest cached prefix to where `into` says, and wait for tier 2 at most so long;
        see `Driver.load`. `request`: the name under which its outcome can be looked up."""

    def store(
        self,
        tokens: Sequence[int],
        verified: int,
        read: Part,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
        request: str = "",
        states: Collection[int] = (),
    ) -> Stored:
        """Evict the columns of the first `verified` tokens that are not stored yet; see
        `Driver.store`."""

    def computed(self, tokens: int, seconds: float) -> None:
        """The engine took so long to compute so many tokens; see `Driver.computed`."""


class LocalPrefixes:
    """The prefixes of an org at a driver in this process."""

    def __init__(self, driver: Driver, keys: Keys) -> None:
        self.layout = driver.layout
        self.namespace = keys.namespace
        self._driver = driver
        self._keys = keys

    def query(self, tokens: Sequence[int]) -> int:
        return self._driver.query(self._keys.prompt(tokens))

    def load(self, tokens: Sequence[int], into: Part, seconds: float = 0.0, request: str = "") -> Loaded:
        return self._driver.load(self._keys.prompt(tokens, request), into, seconds=seconds)

    def store(
        self,
        tokens: Sequence[int],
        verified: int,
        read: Part,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
        request: str = "",
        states: Collection[int] = (),
    ) -> Stored:
        prompt = self._keys.prompt(tokens, request)
        return self._driver.store(prompt, verified, read, rules, first, states=states)

    def computed(self, tokens: int, seconds: float) -> None:
        self._driver.computed(self._keys.org, tokens, seconds)
