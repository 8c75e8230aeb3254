"""A driver in the engine's own process, for one org. `remote.RemotePrefixes` has the same methods, but
`borrow`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from swdriver_shim.driver import Driver, Loaded, Part, Stored
from swdriver_shim.keys import Keys
from swdriver_shim.policy import AS_USUAL, Rules

# A driver and the keys of an org at it, for as long as the context lasts; None: there is none now.
Here: TypeAlias = AbstractContextManager[tuple[Driver, Keys] | None]


class LocalPrefixes:
    """The stored prefixes of an org, in one namespace, at a driver in this process."""

    def __init__(self, driver: Driver, keys: Keys) -> None:
        self.layout = driver.layout
        self.namespace = keys.namespace
        self._here: Callable[[], Here] = lambda: nullcontext((driver, keys))

    def query(self, tokens: Sequence[int]) -> int:
        """How many tokens a load would give."""
        with self._here() as here:
            if here is None:
                return 0
            driver, keys = here
            return driver.query(keys.prompt(tokens))

    def borrow(self, tokens: Sequence[int], sibling: str) -> None:
        """Begin to borrow a prompt that is about to be loaded, from the driver of this name; see
        `Decider.borrow_from`."""
        with self._here() as here:
            if here is not None:
                driver, keys = here
                driver.borrow_from(keys.prompt(tokens), sibling)

    def load(self, tokens: Sequence[int], into: Part, seconds: float = 0.0, request: str = "") -> Loaded:
        """Refill the longest cached prefix to where `into` says, and wait for tier 2 at most so long;
        see `Driver.load`. `request`: the name under which its outcome can be looked up."""
        with self._here() as here:
            if here is None:
                return Loaded(0, len(tokens))
            driver, keys = here
            return driver.load(keys.prompt(tokens, request), into, seconds=seconds)

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
        with self._here() as here:
            if here is None:
                return Stored(0, 0, 0)
            driver, keys = here
            prompt = keys.prompt(tokens, request)
            return driver.store(prompt, verified, read, rules, first, states=states)

    def computed(self, tokens: int, seconds: float) -> None:
        """The engine took so long to compute so many tokens; see `Driver.computed`."""
        with self._here() as here:
            if here is not None:
                driver, keys = here
                driver.computed(keys.org, tokens, seconds)
