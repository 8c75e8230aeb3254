"""A driver for engines with keys of their own.

Such an engine has cut its KV into pieces, and names each by a hash of the tokens up to it.
`LocalObjects` is a driver in the engine's own process; `remote.RemoteObjects` is a daemon and has the
same methods. An agent or a daemon that can't be reached is a miss, and raises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.driver import Driver
from swdriver_shim.keys import COLUMN_TOKENS, Keys
from swdriver_shim.policy import AS_USUAL, Rules

GROUP: Final = "objects"
REMOVE_SECONDS: Final = 30.0


class LocalObjects:
    """The objects of an org, in one namespace, at a driver in this process. May be used from any
    thread."""

    def __init__(self, driver: Driver, keys: Keys) -> None:
        """Raises ValueError for a driver of prefixes."""
        self.value_bytes_max = driver.objects.value_bytes_max  # no value is larger
        self._driver = driver
        self._keys = keys

    def exists(self, keys: Sequence[bytes], seconds: float = 0.0) -> list[bool]:
        """Which values `get` would return. Waits at most so long for others to be recalled from tier
        2."""
        return self._driver.objects.exists(self._keys.named(keys), seconds)

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], seconds: float = 0.0
    ) -> list[int | None]:
        """Copy each value to the front of its buffer; returns its length, or None for a miss. Waits at
        most so long for values to be recalled from tier 2."""
        return self._driver.objects.get(self._keys.named(keys), into, seconds)

    def put(
        self, keys: Sequence[bytes], values: Sequence[memoryview], rules: Rules = AS_USUAL
    ) -> list[bool]:
        """Store values in the order of a prompt; returns which of them are stored now. The last ones are
        displaced first.

        A value that exists already is not replaced. Raises TooLarge, and ValueError for an empty value.
        """
        return self._driver.objects.put(self._keys.named(keys), values, rules)

    def remove(self, keys: Sequence[bytes]) -> bool:
        """Delete values. Whether nothing of them is left anywhere."""
        named = self._keys.named(keys)
        return self._driver.removals.delete(named, shared=True, seconds=REMOVE_SECONDS).done

    def clear(self) -> bool:
        """Delete all objects of this org in this namespace; in tier 2 all of the org. Whether nothing of
        them is left anywhere."""
        keys = self._keys
        receipt = self._driver.removals.purge(
            keys.org, keys.namespace, tag=keys.tag, seconds=REMOVE_SECONDS
        )
        return receipt.done


def object_model(name: str, value_bytes: int) -> ModelSpec:
    """The model of a driver for values of up to so many bytes, on one shard."""
    each = -(-value_bytes // COLUMN_TOKENS)
    groups = (GroupSpec(name=GROUP, bytes_per_token=(each,), alone=True),)
    return ModelSpec(name=name, groups=groups)


def count_leading(found: Sequence[object]) -> int:
    """How many are found before the first miss."""
    return sum(1 for _ in takewhile(bool, found))
