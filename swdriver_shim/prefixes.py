"""What an engine asks of a driver in the name of one org, wherever the driver runs.

`Here` is a driver in the engine's own process, `remote.Remote` a daemon.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """As `Driver.load`: bring the longest prefix that is there to where `into` says, and wait for
        tier 2 at most so long. `request`: what it is for, so that people can ask what became of it."""

    def store(
        self,
        tokens: Sequence[int],
        verified: int,
        read: Part,
        rules: Rules = AS_USUAL,
        first: Sequence[int] = (),
        request: str = "",
    ) -> Stored:
        """As `Driver.store`: send out what is not stored yet of the first so many tokens."""

    def computed(self, tokens: int, seconds: float) -> None:
        """As `Driver.computed`: so many tokens took the engine so long."""


class Here:
    """The prefixes of whoever has these keys, at a driver in this process."""

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
    ) -> Stored:
        return self._driver.store(self._keys.prompt(tokens, request), verified, read, rules, first)

    def computed(self, tokens: int, seconds: float) -> None:
        self._driver.computed(self._keys.org, tokens, seconds)
