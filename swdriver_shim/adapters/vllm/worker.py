"""The worker's part: copies bytes between its shards and the engine's blocks.

- *Loads* of a step are read where they lie in the arena, checked, and copied into the blocks. One copy,
  and no byte is used that was not checked. Several threads do that, a few columns at a time, so that
  the processor's cache still has what was checked when it is copied. To a device it is copied layer by
  layer, while that computes the layers before. What failed is reported in the same step, and the engine
  computes it.
- *Loads ahead* do the same for requests that wait for theirs, beside the steps.
- *Saves* gather columns from the blocks after the step, in a thread, and send them to shards. Two
  copies: a column's bytes lie in as many pieces as there are layers and blocks, and shards take one.

If a save has not read its blocks when another request gets them, the step waits a moment for it. Then
the save is given up and counted: no step waits longer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from kvss_agent.client import Evict, Miss
from kvss_agent.shard.core import BATCH_MAX
from swdriver_shim.adapters.threads import start_pool
from swdriver_shim.adapters.vllm.blocks import SKIP_BLOCK, BlockGroup, Landing, Mark, PlacedColumn
from swdriver_shim.adapters.vllm.orders import (
    ColumnOrder,
    LoadResult,
    Order,
    RefusedColumn,
    SaveResult,
    Step,
    WorkerReport,
)
from swdriver_shim.cache.slots import USE_SECONDS_MAX
from swdriver_shim.data_plane.shard import Shard
from swdriver_shim.data_plane.shard.columns import ViewColumn
from swdriver_shim.data_plane.slow_transfers import PortionedTransfer
from swdriver_shim.data_plane.worker.server import WorkerServer
from swdriver_shim.keys import COLUMN_TOKENS

log = logging.getLogger(__name__)

SAVES_MAX: Final = 1024  # orders that wait; more are given up at once
LOADS_AHEAD_AT_ONCE: Final = 4
READERS: Final = min(4, len(os.sched_getaffinity(0)))  # of the step's loads: an engine waits for them
READ_BYTES: Final = 4 << 20  # that a reader checks and copies at a time: a cache has room for them
STAGING_BYTES: Final = 16 << 20  # columns are put together here, a few at a time
REST_SECONDS: Final = 0.002  # of a step that computes nothing, while something is loaded or saved
TURN_SECONDS: Final = 0.25  # that a step waits for saves whose blocks another request gets
SAVE_SECONDS_MAX: Final = USE_SECONDS_MAX - 60  # later its slots may be given to others


@dataclass(slots=True, eq=False)
class Save:
    """A save that has not ended."""

    order: Order
    until: float  # then it is too late
    marks: list[Mark] = field(default_factory=list)  # of each group: what it has to come after
    is_over: threading.Event = field(default_factory=threading.Event)
    is_given_up: bool = False
    reading: threading.Lock = field(default_factory=threading.Lock)  # while its blocks are read


@dataclass(slots=True)
class Result:
    """What is reported to the engine after a step."""

    report: WorkerReport = field(default_factory=WorkerReport)
    bad_blocks: set[int] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)  # requests that waited for a load ahead
    not_arrived: set[str] = field(default_factory=set)  # of those: it has failed
    ended: set[str] = field(default_factory=set)  # requests whose blocks are not read any more


class Worker:
    """All methods but those of its own threads are called by the engine, one after the other."""

    def __init__(
        self,
        names: Sequence[str],
        groups: Sequence[BlockGroup],
        half: WorkerServer,
        *,
        goes_on_from_blocks: bool = True,
    ) -> None:
        """`names` of the groups. The decider opens a shard of each, called after it and a number.

        `goes_on_from_blocks`: report to the engine which blocks of a load ahead failed; else only of
        which request it was.
        """
        self._goes_on_from_blocks = goes_on_from_blocks
        self._clock = time.monotonic
        self._names = names
        self.groups = groups
        self._half = half
        self._loading = StepLoads(self, Step())
        self._result = Result()
        self._ahead: queue.SimpleQueue[tuple[Order, LoadResult]] = queue.SimpleQueue()
        self._ahead_count = 0  # loads ahead that have not been told yet
        self._is_idle = False  # the step
        self._has_ended = threading.Event()  # a load ahead, or a save
        self._loader = start_pool(1, "load")  # of the step
        self._readers = start_pool(READERS, "read")  # that help it
        self._loaders_ahead = start_pool(LOADS_AHEAD_AT_ONCE, "load ahead")
        self._saves: dict[int, Save] = {}  # that are not over
        self._by_request: dict[str, set[int]] = {}
        self._ending: set[str] = set()
        self._lock = threading.Lock()
        sizes = [of.shape.column_bytes for of in groups]
        self._at_once = [max(1, min(BATCH_MAX, STAGING_BYTES // size)) for size in sizes]
        self._staging = [
            memoryview(bytearray(size * count)) for size, count in zip(sizes, self._at_once, strict=True)
        ]
        self._waiting: queue.Queue[Save | None] = queue.Queue()
        self._saver = threading.Thread(target=self._save_all, name="save", daemon=True)
        self._saver.start()

    def close(self) -> None:
        self._waiting.put(None)
        self._saver.join()
        self._loader.shutdown()
        self._readers.shutdown()
        self._loaders_ahead.shutdown()
        self._half.close()

    def shard(self, group: int) -> Shard | None:
        """None until it was opened for the first time."""
        return self._half.shard_of(self._names[group])

    # A step

    def begin(self, step: Step) -> None:
        """Called before anything of the step is computed. Wait for saves whose blocks it overwrites."""
        until = time.monotonic() + TURN_SECONDS
        for number in step.over_first:
            save = self._saves.get(number)
            if save and not save.is_over.wait(max(0.0, until - time.monotonic())):
                with save.reading:
                    save.is_given_up = True
        self._ending.update(step.ending)

    def load(self, step: Step) -> None:
        """Begin the loads of the step, and those ahead."""
        self._loading, self._is_idle = StepLoads(self, step, self._readers), step.is_idle
        self._ahead_count += len(step.loads_ahead)
        if step.loads:
            self._loader.submit(self._loading.run)
        for order in step.loads_ahead:
            self._loaders_ahead.submit(self._load_ahead, StepLoads(self, Step(loads=[order])))

    def wait_for_layer(self, name: str) -> None:
        self._loading.wait_for_layer(name)

    def computed(self, step: Step) -> None:
        """Called when all of the step is in the blocks. Begin its saves."""
        self._end_loads()
        marks = [of.mark() for of in self.groups] if step.stores else []
        for order in step.stores:
            save = Save(order, self._clock() + SAVE_SECONDS_MAX, marks)
            with self._lock:
                self._saves[order.number] = save
                self._by_request.setdefault(order.request, set()).add(order.number)
                has_room = len(self._saves) <= SAVES_MAX
            save.is_given_up = not has_room
            self._waiting.put(save)
        self._loading = StepLoads(self, Step())

    def take_result(self) -> Result:
        """The results of this step's loads, and of loads ahead and saves that have ended.

        Called after `computed`, or before it with speculative decoding: then the model has computed and
        its draft model has not. Failed loads have to be reported now: in the next step, tokens that were
        computed without them would have been sent already.
        """
        self._end_loads()
        self._rest()
        result, self._result = self._result, Result()
        while not self._ahead.empty():
            order, loaded = self._ahead.get()
            self._ahead_count -= 1
            result.report.loads[order.number] = loaded
            result.arrived.add(order.request)
            if self._goes_on_from_blocks:
                result.bad_blocks |= _blocks_of(order, loaded.refused)
            elif loaded.refused:
                result.not_arrived.add(order.request)
        with self._lock:
            result.ended = {one for one in self._ending if not self._by_request.get(one)}
        self._ending -= result.ended
        return result

    def _rest(self) -> None:
        """Where nothing is computed, an engine asks again and again whether something has come. Without
        a rest the threads that load and save would wait for the interpreter at each piece."""
        if not self._is_idle:
            return
        self._has_ended.clear()  # before it is looked: what ends from here on is noticed
        with self._lock:
            is_saving = any(self._by_request.get(one) for one in self._ending)
        if is_saving or (self._ahead_count and self._ahead.empty()):
            self._has_ended.wait(REST_SECONDS)

    def _end_loads(self) -> None:
        """Wait for the loads of the step and note their results, once."""
        for order, loaded in self._loading.take():
            self._result.report.loads[order.number] = loaded
            self._result.bad_blocks |= _blocks_of(order, loaded.refused)

    def _load_ahead(self, loading: StepLoads) -> None:
        loading.run()
        loading.wait_for_all()
        for done in loading.take():
            self._ahead.put(done)
        self._has_ended.set()

    # Saves

    def _save_all(self) -> None:
        while save := self._waiting.get():
            began = time.monotonic()
            failed = {(one.group, one.at) for one in _all_of(save.order)}
            size = 0
            try:
                size = self._saved(save, failed)
            except Exception:
                log.exception("Columns could not be saved")
            order = save.order
            with self._lock:
                del self._saves[order.number]
                mine = self._by_request[order.request]
                mine.discard(order.number)
                if not mine:
                    del self._by_request[order.request]
            save.is_over.set()
            self._has_ended.set()
            seconds = time.monotonic() - began
            self._half.send(SaveResult(order.number, sorted(failed), size, seconds, save.is_given_up))

    def _saved(self, save: Save, failed: set[tuple[int, int]]) -> int:
        """Send the columns to their shards, and remove them from `failed`. Returns how many bytes that
        were."""
        size = 0
        for group, columns in enumerate(save.order.columns):
            shard, blocks = self.shard(group), self.groups[group]
            if shard is None:
                continue
            each = blocks.shape.column_bytes
            memory, at_once = self._staging[group], self._at_once[group]
            for first in range(0, len(columns), at_once):
                batch = columns[first : first + at_once]
                out = [
                    Evict(
                        one.slot,
                        one.key,
                        save.order.tag,
                        COLUMN_TOKENS,
                        memory[at * each : (at + 1) * each],
                    )
                    for at, one in enumerate(batch)
                ]
                with save.reading:
                    save.is_given_up |= self._clock() >= save.until
                    if save.is_given_up:
                        return size
                    wanted = [block for one in batch for block in one.blocks]
                    with blocks.near(wanted, save.marks[group]) as (here, places):
                        here.gather(
                            [
                                PlacedColumn(
                                    one.part, tuple(places[at] for at in one.blocks), column.payload
                                )
                                for one, column in zip(batch, out, strict=True)
                            ]
                        )
                if not shard.evict(out, save.order.shown):
                    return size
                failed -= {(group, first + at) for at in range(len(batch))}
                size += each * len(batch)
        return size


class Portion(NamedTuple):
    """Some columns of a load, from this one of its group on."""

    order: Order
    transfer: PortionedTransfer
    first: int
    columns: Sequence[ColumnOrder]


class StepLoads:
    """The loads of one step."""

    def __init__(self, worker: Worker, step: Step, readers: Executor | None = None) -> None:
        """The thread that runs it reads. With `readers`, which help, each load is read in portions;
        without, as a whole: what comes from afar is asked for once."""
        self._worker = worker
        self._step = step
        self._readers = readers
        names = [layer.name for group in worker.groups for layer in group.layers] if step.loads else []
        self._layers = {name: threading.Event() for name in names}
        # Of layers that are on their way into blocks
        self._marks: dict[str, tuple[BlockGroup, Mark]] = {}
        # Requests that had the blocks before may still be computing with them.
        self._after = [of.mark() for of in worker.groups] if step.loads else []
        self._is_over = threading.Event()
        self._loaded: dict[int, LoadResult] = {}
        if not step.loads:
            self.end()

    def wait_for_layer(self, name: str) -> None:
        if layer := self._layers.get(name):
            layer.wait()
            if found := self._marks.get(name):
                bank, mark = found
                bank.follow(mark)

    def wait_for_all(self) -> None:
        """Return when all of it is in the blocks."""
        for bank, mark in self._marks.values():
            bank.wait(mark)

    def take(self) -> list[tuple[Order, LoadResult]]:
        """The result of each load, when all are over. Each is returned once."""
        self._is_over.wait()
        taken, self._loaded = self._loaded, {}
        return [(order, taken[order.number]) for order in self._step.loads if order.number in taken]

    def end(self) -> None:
        self._is_over.set()
        for layer in self._layers.values():
            layer.set()

    def run(self) -> None:
        """Any error here only means that columns are refused."""
        for order in self._step.loads:
            self._loaded[order.number] = LoadResult(refused=_all_of(order))
        try:
            for group in range(len(self._worker.groups)):
                self._load(group)
        except Exception:
            log.exception("A load has failed")
        finally:
            self.end()

    def _portions(self, group: int, shard: Shard, seen: contextlib.ExitStack) -> Iterator[Portion]:
        """Each of one load: they may be of several orgs."""
        for order in self._step.loads:
            columns = order.columns[group]
            if not columns:
                continue
            transfer = seen.enter_context(shard.transfer(order.shown))
            each = max(1, READ_BYTES // self._worker.groups[group].shape.column_bytes)
            each = each if self._readers else len(columns)
            for first in range(0, len(columns), each):
                yield Portion(order, transfer, first, columns[first : first + each])

    def _read(
        self, read: Callable[[Portion], dict[int, str]], portions: Sequence[Portion]
    ) -> list[tuple[Portion, dict[int, str]]]:
        """Read these portions. When this returns nobody reads any more: what came later would be written
        over what the engine has computed instead."""
        left = deque(portions)
        done: queue.SimpleQueue[tuple[Portion, dict[int, str]]] = queue.SimpleQueue()

        def read_some() -> None:
            while True:
                try:
                    portion = left.popleft()
                except IndexError:
                    return
                done.put((portion, read(portion)))

        if self._readers:
            for _ in range(min(READERS, len(portions)) - 1):
                self._readers.submit(read_some)
        read_some()
        return [done.get() for _ in portions]

    def _load(self, group: int) -> None:
        began = time.perf_counter()
        blocks, shard = self._worker.groups[group], self._worker.shard(group)
        if shard is None or not any(order.columns[group] for order in self._step.loads):
            return
        misses: dict[tuple[int, int], str] = {}
        with contextlib.ExitStack() as seen:
            landing = blocks.landing(self._after[group])
            size = blocks.shape.column_bytes
            read = partial(_read, shard, size, landing, seen)
            for portion, missed in self._read(read, list(self._portions(group, shard, seen))):
                for at, miss in missed.items():
                    misses[portion.order.number, portion.first + at] = miss
            last = {of.name: layer for layer, of in enumerate(blocks.layers)}  # it may have several
            for layer, of in enumerate(blocks.layers):
                self._marks[of.name] = blocks, landing.flush(layer)
                if last[of.name] == layer:
                    self._layers[of.name].set()
            del landing, read  # and with them the views, which are over
        for order in self._step.loads:
            loaded = self._loaded[order.number]
            loaded.refused = [one for one in loaded.refused if one.group != group] + [
                RefusedColumn(group, index, miss)
                for (number, index), miss in misses.items()
                if number == order.number
            ]
            came = len(order.columns[group]) - sum(number == order.number for number, _ in misses)
            loaded.bytes += came * blocks.shape.column_bytes
            loaded.seconds += time.perf_counter() - began


def _read(
    shard: Shard, size: int, landing: Landing, seen: contextlib.ExitStack, portion: Portion
) -> dict[int, str]:
    """Check these columns and take them in. Returns which are missed, by their places, and why."""
    order, transfer, _, carried = portion
    try:
        looks = [ViewColumn(one.slot, one.key, order.tag, COLUMN_TOKENS) for one in carried]
        columns = seen.enter_context(shard.view(looks, transfer))
        there: list[PlacedColumn] = []
        missed: dict[int, str] = {}
        for at, (one, column) in enumerate(zip(carried, columns, strict=True)):
            if isinstance(column, Miss):
                missed[at] = column
            elif len(column) != size:
                missed[at] = Miss.STALE
            else:
                there.append(PlacedColumn(one.part, one.blocks, column))
        landing.take(there)
    except Exception:
        log.exception("Columns could not be loaded")
        return dict.fromkeys(range(len(carried)), Miss.LOST)
    return missed


def _all_of(order: Order) -> list[RefusedColumn]:
    return [
        RefusedColumn(group, index, Miss.LOST)
        for group, of in enumerate(order.columns)
        for index in range(len(of))
    ]


def _blocks_of(order: Order, refused: Sequence[RefusedColumn]) -> set[int]:
    return {
        block
        for one in refused
        for block in order.columns[one.group][one.at].blocks
        if block != SKIP_BLOCK
    }
