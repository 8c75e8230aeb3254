"""The boxes, and who has them. A box has one holder at most; it is stored before anybody is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cluster_server.backend import Conflict, NotFound
from cluster_server.proto import cluster_pb2 as pb
from kvss_agent.process.durable_file import write_durably
from telemetry.decoder import Limits, Malformed, decode

SHOWN_MAX: Final = 20
_FILE: Final = Limits(16 << 20)


class Inventory:
    """`boxes`: those that there are. A lock of a box that is not there any more stays until it is
    released, for the day on which the box is back. `holders`: as they are stored. `store(holders)`
    raises OSError."""

    def __init__(
        self,
        boxes: Iterable[str],
        holders: dict[str, str],
        store: Callable[[dict[str, str]], Awaitable[None]],
    ) -> None:
        self._boxes = dict.fromkeys(sorted(set(boxes)))  # in this order, and known by name at once
        self._holders = holders
        self._store = store
        self._changing = asyncio.Lock()

    def boxes(self) -> list[pb.Box]:
        return [pb.Box(name=name, holder=self._holders.get(name, "")) for name in self._boxes]

    async def lock(self, holder: str, boxes: Sequence[str]) -> list[pb.Box]:
        """All of them, or none. Those that the holder has already stay its. Raises NotFound and
        Conflict."""
        async with self._changing:
            if unknown := [name for name in boxes if name not in self._boxes]:
                raise NotFound(f"There is no box {_listed(unknown)}.")
            others = {name: self._holders.get(name, holder) for name in boxes}
            if taken := [f"{name} (of {other})" for name, other in others.items() if other != holder]:
                raise Conflict(f"Others have {_listed(taken)}.")
            await self._change({**self._holders, **others})
            return self.boxes()

    async def unlock(self, holder: str, boxes: Sequence[str]) -> list[pb.Box]:
        """Those that nobody has stay nobody's. Raises Conflict for those of others, and changes nothing
        then."""
        async with self._changing:
            held = {name: self._holders[name] for name in boxes if name in self._holders}
            if taken := [f"{name} (of {other})" for name, other in held.items() if other != holder]:
                raise Conflict(f"Others have {_listed(taken)}.")
            await self._change({name: one for name, one in self._holders.items() if name not in held})
            return self.boxes()

    async def _change(self, holders: dict[str, str]) -> None:
        if holders == self._holders:
            return
        writing = asyncio.ensure_future(self._store(holders))
        try:
            await asyncio.shield(writing)
        finally:
            await asyncio.wait([writing])  # who asked may have left: it is done all the same
            if not writing.exception():
                self._holders = holders


def on_disk(path: Path, boxes: Iterable[str]) -> Inventory:
    """Of one machine. Raises OSError."""

    async def store(holders: dict[str, str]) -> None:
        raw = msgspec.json.encode(holders, order="sorted")
        await asyncio.to_thread(write_durably, path, raw)

    return Inventory(boxes, _read(path), store)


def _read(path: Path) -> dict[str, str]:
    try:
        return decode(path.read_bytes(), dict[str, str], _FILE)
    except FileNotFoundError:
        return {}
    except Malformed as error:
        raise OSError(f"{path} is damaged: {error}") from None


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN_MAX])
    more = len(names) - SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown
