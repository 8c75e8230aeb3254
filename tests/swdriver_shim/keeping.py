"""Objects on real agents, for tests: a driver of values of two shards, and what is kept there."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence

from swdriver_shim.adapters.remote import Objects
from swdriver_shim.driver import Driver
from swdriver_shim.keys import COLUMN_TOKENS
from swdriver_shim.layout import Group, Layout
from swdriver_shim.objects import LocalObjects
from swdriver_shim.policy import AS_USUAL, OrgPolicies, Policy, Rules
from tests.swdriver_shim.fleets import Fleet
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.prompts import keys

LAYOUT = Layout((Group("objects", (64, 32), alone=True),))
FIRST, BYTES_MAX = 64 * COLUMN_TOKENS, 96 * COLUMN_TOKENS


def value(name: bytes, size: int = BYTES_MAX) -> memoryview:
    """What an engine would keep under this key."""
    return memoryview(hashlib.shake_128(name).digest(size))


def names(*numbers: int) -> list[bytes]:
    return [b"page-%d" % number for number in numbers]


class Keeper:
    """An engine that puts what belongs under its keys, and checks every byte that it gets."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def put(self, wanted: Sequence[bytes], size: int = BYTES_MAX, rules: Rules = AS_USUAL) -> list[bool]:
        return self.objects.put(wanted, [value(name, size) for name in wanted], rules)

    def get(self, wanted: Sequence[bytes], seconds: float = 0.0) -> list[int | None]:
        places = [memoryview(bytearray(BYTES_MAX)) for _ in wanted]
        lengths = self.objects.get(wanted, places, seconds)
        for name, place, length in zip(wanted, places, lengths, strict=True):
            assert length is None or place[:length] == value(name, length), "wrong bytes"
        return lengths


@contextlib.contextmanager
def keeping(
    fleet: Fleet, kind: str = "shm", clock: Callable[[], float] = time.monotonic, **policies: Policy
) -> Iterator[Driver]:
    driver = Driver(fleet.layout, "llama", fleet.shards(kind), clock=clock)
    driver.set_policies({org: OrgPolicies(policy=policy) for org, policy in policies.items()})
    try:
        yield driver
        check_integrity(driver.ledger)
    finally:
        driver.close()


def keeper(driver: Driver, org: str = "acme") -> Keeper:
    return Keeper(LocalObjects(driver, keys(org)))
