"""What an engine that brings keys of its own asks of a driver, wherever the driver runs.

Such an engine has cut its KV into pieces itself, and calls each by a hash of the tokens up to it. `Here`
is a driver in the engine's own process, `remote.RemoteObjects` a daemon. Nothing raises because an agent
or a daemon is away: that is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final, Protocol

from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.driver import Driver
from swdriver_shim.keys import COLUMN_TOKENS, Keys
from swdriver_shim.policy import AS_USUAL, Rules

GROUP: Final = "objects"
REMOVE_SECONDS: Final = 30.0


class Objects(Protocol):
    """The objects of one org, in one namespace. May be used from any thread."""

    @property
    def value_bytes_max(self) -> int:
        """No value is larger."""

    def exists(self, keys: Sequence[bytes], seconds: float = 0.0) -> list[bool]:
        """Which of them a `get` would give. Waits for tier 2 to bring the others, at most so long."""

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], seconds: float = 0.0
    ) -> list[int | None]:
        """Bring them to the front of `into`: how many bytes each has, None for what is missed. Waits for
        tier 2 at most so long."""

    def put(
        self, keys: Sequence[bytes], values: Sequence[memoryview], rules: Rules = AS_USUAL
    ) -> list[bool]:
        """Keep these; which of them are kept now. In the order of a prompt: the last ones go first.

        What is there already stays as it is. Raises TooLarge, and ValueError for an empty value.
        """

    def remove(self, keys: Sequence[bytes]) -> bool:
        """They are not found from here on; whether nothing of them is left anywhere."""

    def clear(self) -> bool:
        """The same for all objects of this org in this namespace; in tier 2 for all of the org."""


class Here:
    """The objects of whoever has these keys, at a driver in this process."""

    def __init__(self, driver: Driver, keys: Keys) -> None:
        """Raises ValueError for a driver of prefixes."""
        self.value_bytes_max = driver.objects.value_bytes_max
        self._driver = driver
        self._keys = keys

    def exists(self, keys: Sequence[bytes], seconds: float = 0.0) -> list[bool]:
        return self._driver.objects.exists(self._keys.named(keys), seconds)

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], seconds: float = 0.0
    ) -> list[int | None]:
        return self._driver.objects.get(self._keys.named(keys), into, seconds)

    def put(
        self, keys: Sequence[bytes], values: Sequence[memoryview], rules: Rules = AS_USUAL
    ) -> list[bool]:
        return self._driver.objects.put(self._keys.named(keys), values, rules)

    def remove(self, keys: Sequence[bytes]) -> bool:
        named = self._keys.named(keys)
        return self._driver.delete(named, shared=True, seconds=REMOVE_SECONDS).done

    def clear(self) -> bool:
        keys = self._keys
        receipt = self._driver.purge(keys.org, keys.namespace, tag=keys.tag, seconds=REMOVE_SECONDS)
        return receipt.done


def object_model(
    name: str, value_bytes: int, *, revision: str = "", kv_dtype: str = "", layout: str = ""
) -> ModelSpec:
    """What a driver has to know to keep values of up to so many bytes, on one shard."""
    each = -(-value_bytes // COLUMN_TOKENS)
    groups = (GroupSpec(name=GROUP, bytes_per_token=(each,), alone=True),)
    return ModelSpec(name=name, revision=revision, kv_dtype=kv_dtype, layout=layout, groups=groups)


def in_a_row(found: Sequence[object]) -> int:
    """How many there are before the first that is missed."""
    return sum(1 for _ in takewhile(bool, found))
