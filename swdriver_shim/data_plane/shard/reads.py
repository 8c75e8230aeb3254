"""How a shard reads columns: into the caller's memory, or in place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvss_agent.client import Header, Lost, Miss, ShardClient, Wanted
from swdriver_shim.data_plane.paths import PathSpec
from swdriver_shim.data_plane.shard.columns import RefillColumn, ViewColumn
from swdriver_shim.data_plane.shard.connections import HomeConnections
from swdriver_shim.data_plane.slow_transfers import PortionedTransfer, TransferMetrics


@dataclass(frozen=True, slots=True)
class _Batch:
    """Columns to read from one home: their places among those that are asked for."""

    client: ShardClient
    path: PathSpec | None
    places: list[int]


@dataclass(frozen=True, slots=True)
class _Plan:
    wanted: list[Wanted]
    missing: list[Miss]  # why each column is missed that is in no batch
    batches: list[_Batch]


class ShardReader:
    """All methods may be called from any thread."""

    def __init__(self, homes: HomeConnections, metrics: TransferMetrics) -> None:
        self._homes = homes
        self._metrics = metrics

    def fetch(self, columns: Sequence[RefillColumn], request: str = "") -> list[Header | Miss]:
        """Read columns whose lengths are unknown: their headers have them. A column that does not fit
        its memory is a miss."""
        with self._reading(columns) as plan:
            found: list[Header | Miss] = [*plan.missing]
            for batch in plan.batches:
                began = time.perf_counter()
                self._refill(batch.client, batch.places, plan.wanted, columns, found)
                seconds = time.perf_counter() - began
                asked = [columns[place] for place in batch.places]
                headers = [found[place] for place in batch.places]
                size = sum(one.length for one in headers if not isinstance(one, Miss))
                self._metrics.record("in", batch.path, seconds, asked, size, request)
        return found

    def _refill(
        self,
        client: ShardClient,
        places: Sequence[int],
        wanted: Sequence[Wanted],
        columns: Sequence[RefillColumn],
        found: list[Header | Miss],
    ) -> None:
        answers: Sequence[Header | Miss]
        try:
            answers = client.refill([wanted[at] for at in places], [columns[at].into for at in places])
        except Lost as error:
            self._homes.lose(client, error)
            answers = [Miss.LOST] * len(places)
        except ValueError:  # where memory is shared: one of them is too large, and the others are not
            if len(places) > 1:
                for place in places:
                    self._refill(client, [place], wanted, columns, found)
                return
            answers = [Miss.CORRUPT]
        for place, answer in zip(places, answers, strict=True):
            found[place] = answer

    def transfer(self, request: str = "") -> PortionedTransfer:
        """To read columns of one request in portions."""
        return PortionedTransfer(self._metrics, request)

    @contextlib.contextmanager
    def view(
        self, columns: Sequence[ViewColumn], transfer: PortionedTransfer | None = None
    ) -> Iterator[list[memoryview | Miss]]:
        """Read columns in place where the transport can, else copy them, and check them. Nobody writes
        to them until the end of the `with`. With a `transfer`, they are a portion of it."""
        with contextlib.ExitStack() as views:
            transfer = transfer or views.enter_context(self.transfer())
            with self._reading(columns) as plan:
                found: list[memoryview | Miss] = [*plan.missing]
                for batch in plan.batches:
                    began = time.perf_counter()
                    try:
                        wanted = [plan.wanted[at] for at in batch.places]
                        answers: Sequence[memoryview | Miss] = views.enter_context(
                            batch.client.view(wanted)
                        )
                    except Lost as error:
                        self._homes.lose(batch.client, error)
                        answers = [Miss.LOST] * len(batch.places)
                    else:
                        seconds = time.perf_counter() - began
                        asked = [columns[at] for at in batch.places]
                        size = sum(len(one) for one in answers if not isinstance(one, Miss))
                        transfer.add(batch.path, seconds, asked, size)
                    for place, answer in zip(batch.places, answers, strict=True):
                        found[place] = answer
            # What is leased stays mapped if the home changes from here on: its views hold the memory.
            yield found

    @contextlib.contextmanager
    def _reading(self, columns: Sequence[RefillColumn] | Sequence[ViewColumn]) -> Iterator[_Plan]:
        """Plan what to read from which home. No home that is read is emptied until the end of the
        `with`."""
        state, slots = self._homes, self._homes.slots
        with state.lock:
            slots.grow(max((column.slot for column in columns), default=0))
            # Without an old home, what was there is lost, or is at the present one.
            old = state.old or state.client
            homes = [old if one.slot in slots.at_old_home else state.client for one in columns]
            wanted = [slots.wanted(one.slot, one.key, one.tag) for one in columns]
            reading = state.former.begin_reading(frozenset(home for home in homes if home))
            paths = {state.old: state.old_path, state.client: state.path}
        by_home: dict[ShardClient, list[int]] = {}
        for place, (home, one) in enumerate(zip(homes, wanted, strict=True)):
            if home and one.column.sequence >= 0:
                by_home.setdefault(home, []).append(place)
        try:
            yield _Plan(
                wanted,
                [Miss.ABSENT if home else Miss.LOST for home in homes],
                [_Batch(client, paths[client], places) for client, places in by_home.items()],
            )
        finally:
            state.former.end_reading(reading)
