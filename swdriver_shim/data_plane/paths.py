"""Bytes of shards by the path that they take between a domain and a home, and how long that takes.

Placement knows the paths, and the console sends them with the homes. Counting by path tells whose bytes
are on the spine, since when, and whether the spine makes a session slow.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, NamedTuple

from msgspec import Meta, structs

from kvss_agent.desired import Document, Name
from telemetry.histogram import BUCKETS, Histogram

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


LABELS: Final = ("session", "node", "tier", "port_leaf", "nic_leaf", "link", "box")


def labels_of(path: PathSpec | None) -> dict[str, str]:
    """What numbers say of a path. The tier of one that is not known is `unknown`."""
    if path is None:
        return {**dict.fromkeys(LABELS, ""), "tier": "unknown"}
    return {name: getattr(path, name) for name in LABELS}


class PathTraffic(NamedTuple):
    """Bytes of columns that took a path, which is None if it is not known. How long the transfers took,
    as counts of a histogram and seconds in all; zeros if that was not measured."""

    path: PathSpec | None
    direction: Direction
    bytes: int
    counts: tuple[int, ...] = (0,) * BUCKETS
    seconds: float = 0.0


class TrafficCounter:
    """Counts the bytes of a shard by path. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[tuple[PathSpec | None, Direction], _Counted] = {}

    def add(
        self, path: PathSpec | None, direction: Direction, size: int, seconds: float | None = None
    ) -> None:
        """Count one transfer, and how long it took if that was measured."""
        if not size:
            return
        key = path, direction
        with self._lock:
            # The path that was used last is last, so that the one that is dropped is no longer used.
            counted = self._counted[key] = self._counted.pop(key) if key in self._counted else _Counted()
            counted.bytes += size
            if seconds is not None:
                counted.latency.record(seconds)
            if len(self._counted) > PATHS_MAX:
                del self._counted[next(iter(self._counted))]

    def counted(self) -> list[PathTraffic]:
        with self._lock:
            return [
                PathTraffic(*key, one.bytes, tuple(one.latency.counts), one.latency.sum)
                for key, one in self._counted.items()
            ]


@dataclass(slots=True)
class _Counted:
    """The counts of one path and direction."""

    bytes: int = 0
    latency: Histogram = field(default_factory=Histogram)


def path_between(old: PathSpec | None, new: PathSpec | None) -> PathSpec | None:
    """The path of a shard's bytes from one home to another, which involves no box. Between two leaves it
    is the spine, whatever the paths to the homes are."""
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
