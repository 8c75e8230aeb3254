"""Which path the bytes of a shard take between its domain and its home, and how many have.

Placement knows the paths and the console tells them with the homes. Here bytes are counted by the path
that they took, where they are moved anyway: so that of each byte on the spine somebody can say whose it
was, and since when.
"""

from __future__ import annotations

import threading
from typing import Annotated, Final, Literal, NamedTuple

from msgspec import Meta, structs

from kvss_agent.desired import Document, Name

PATHS_MAX: Final = 32  # of a shard, with their directions: those that it took last

Place = Annotated[str, Meta(max_length=200)]
Direction = Literal["out", "in", "pull"]


class PathSpec(Document, frozen=True):
    """From a domain's port over leaves to a NIC of a node, for a session; as `console.placement` has it.

    `link`: the link to the spine, where it takes one. `allowed`: the session's rules want or bear it.
    """

    session: Name
    tier: Literal["rail", "leaf", "spine"]
    box: Place
    domain: Annotated[int, Meta(ge=0)]
    port_leaf: Place
    nic_leaf: Place
    node: Place
    link: Place = ""
    allowed: bool = True


class Carried(NamedTuple):
    """So many bytes of columns took a path. None is one that nobody told of."""

    path: PathSpec | None
    direction: Direction
    bytes: int


class Tally:
    """What a shard has moved, by path. All methods may be called from any thread."""

    def __init__(self, path: PathSpec | None = None) -> None:
        self.path = path  # of where the shard is now
        self._lock = threading.Lock()
        self._bytes: dict[tuple[PathSpec | None, Direction], int] = {}

    def add(self, path: PathSpec | None, direction: Direction, size: int) -> None:
        if not size:
            return
        key = path, direction
        with self._lock:
            # Whatever was used last is last, so that what goes first is what nobody takes any more.
            self._bytes[key] = self._bytes.pop(key, 0) + size
            if len(self._bytes) > PATHS_MAX:
                del self._bytes[next(iter(self._bytes))]

    def carried(self) -> list[Carried]:
        with self._lock:
            return [Carried(*key, size) for key, size in self._bytes.items()]


def between(old: PathSpec | None, new: PathSpec | None) -> PathSpec | None:
    """The path of a shard's bytes when they move from one home to another, without a box. From one
    leaf to another it is over the spine, whatever both paths are."""
    if old is None or new is None:
        return None
    return structs.replace(
        new,
        tier="rail" if old.nic_leaf == new.nic_leaf else "spine",
        box="",
        domain=0,
        port_leaf=old.nic_leaf,
        link="",
    )
