"""An engine that is a table of blocks, on real agents: it does with the connector's halves what vLLM
does.

It computes bytes that depend on all tokens so far, so that a wrong block is seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvss_agent.client import Credentials
from kvss_agent.data_plane.breach import Cause
from kvss_agent.data_plane.tier_requests import TierRequests
from kvss_agent.shard.arena import Arena, slot_bytes_for
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from swdriver_shim.adapters.vllm.blocks import Blocks, Layer, unit_tokens
from swdriver_shim.adapters.vllm.events import UnitEvents
from swdriver_shim.adapters.vllm.orders import SaveResult, Step
from swdriver_shim.adapters.vllm.scheduling import (
    ConnectorScheduler,
    GroupShape,
    Requester,
    goes_on_from_blocks,
)
from swdriver_shim.adapters.vllm.worker import Worker
from swdriver_shim.data_plane.homes import Home
from swdriver_shim.data_plane.worker.client import RemoteShard, WorkerConnection
from swdriver_shim.data_plane.worker.server import WorkerServer
from swdriver_shim.decider.decider import Decider
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Media
from swdriver_shim.layout import Group, Layout
from swdriver_shim.policy import AS_USUAL, Rules
from tests.kvss_agent.plane import DRIVER, SECRET, Plane, running
from tests.live import wait_until
from tests.swdriver_shim.integrity import check_integrity
from tests.swdriver_shim.prompts import NAMESPACE
from tests.swdriver_shim.prompts import SECRET as ORG_SECRET

C = COLUMN_TOKENS
COUNT = 400  # blocks of an engine


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool | None = None
    org: str = "acme"
    rules: Rules = AS_USUAL
    media: list[Media] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """As vLLM would, of each 32 tokens."""
        ends = range(32, self.num_tokens + 1, 32)
        return [hashlib.sha256(repr(self.all_token_ids[:end]).encode()).digest() for end in ends]


@dataclass
class GroupOf:
    layers: tuple[int, ...]  # of each: bytes per token, or of a state
    block_tokens: int
    window: int | None = None
    is_state: bool = False

    def block_bytes(self, layer: int) -> int:
        return self.layers[layer] * (1 if self.is_state else self.block_tokens)

    @property
    def column_bytes(self) -> int:
        return sum(self.layers) * (1 if self.is_state else C)

    def of_layout(self, name: str, workers: int) -> Group:
        if self.is_state:
            return Group(name, bytes_per_state=(sum(self.layers),) * workers)
        return Group(name, (sum(self.layers),) * workers, self.window)


class Engine:
    """As vLLM: it has blocks, computes what is not there, and checks every block that it is given.

    Of states it does what vLLM does in its mode `align`: a step goes on from the block with the state of
    the tokens so far, and writes to a new one where it ends in another block; a block is free two steps
    later. Steps of a prompt end where blocks do, one of them at the last such place before its end.
    """

    def __init__(
        self,
        plane: Plane,
        groups: Sequence[GroupOf],
        workers: int = 1,
        *,
        is_far: bool = False,
        speculates: bool = False,
        writes_early: bool = False,
    ) -> None:
        """`writes_early`: to new blocks, before workers are told of the step."""
        self.groups, self.plane = groups, plane
        self.speculates, self.writes_early = speculates, writes_early
        self.later = 0.0  # so many seconds are over that nobody has waited for
        self.unit = unit_tokens([one.block_tokens for one in groups])
        self.halves = [WorkerServer() for _ in range(workers)]
        names = [str(at) for at in range(len(groups))]
        self.blocks = [[self._blocks(one, at) for at, one in enumerate(groups)] for _ in range(workers)]
        shapes = [GroupShape(one.block_tokens, one.window, one.is_state) for one in groups]
        self.workers = [
            Worker(names, blocks, half, goes_on_from_blocks=goes_on_from_blocks(shapes))
            for blocks, half in zip(self.blocks, self.halves, strict=True)
        ]
        self.lines = [WorkerConnection(half.address, self._told) for half in self.halves]
        layout = Layout(tuple(one.of_layout(str(at), workers) for at, one in enumerate(groups)))
        self.far = [
            [self._shard(f"{name}.{at}", line) for at, line in enumerate(self.lines)] for name in names
        ]
        self.driver = Decider(layout, "llama", self.far)
        kv = next((at for at, one in enumerate(groups) if not one.is_state), 0)
        self.events = UnitEvents(self.unit, 32, kv)
        self.driver.ledger.add_listener(self.events)
        pins = self if writes_early else None
        self.scheduling = ConnectorScheduler(
            shapes, self.unit, workers, self._who, events=self.events, pins=pins, clock=self.clock
        )
        self.scheduling.use(self.driver, is_far=is_far)
        self.free = list(range(1, COUNT))  # the last one is the next that somebody gets
        self.holders: Counter[int] = Counter()  # of each block that is not free
        self.short = 0
        self.bad: set[int] = set()
        self.saved: list[SaveResult] = []

    def clock(self) -> float:
        return time.monotonic() + self.later

    def _blocks(self, group: GroupOf, at: int) -> Blocks:
        layers = []
        for index in range(len(group.layers)):
            size = group.block_bytes(index)
            layers.append(Layer(f"{at}.{index}", memoryview(bytearray(size * COUNT)), 0, size, size))
        return Blocks(layers, group.block_tokens, self.unit, is_state=group.is_state)

    def _shard(self, name: str, line: WorkerConnection) -> RemoteShard:
        home = Home(f"unix:{self.plane.unix}", name, lambda: Credentials(DRIVER, SECRET), 0)
        return RemoteShard(name, line, home)

    def _who(self, request: FakeRequest) -> Requester | None:
        if not request.org:
            return None
        keys = Keys(request.org, ORG_SECRET, NAMESPACE, self.unit)
        return Requester(keys, request.rules, request.media)

    def _told(self, raw: msgspec.Raw) -> None:
        told = msgspec.msgpack.decode(raw, type=SaveResult)
        self.saved.append(told)
        self.scheduling.saved(told)

    def close(self) -> None:
        self.scheduling.close()
        self.driver.close()
        for line in self.lines:
            line.close()
        for worker in self.workers:
            worker.close()

    def take(self) -> int:
        block = self.free.pop()
        self.holders[block] = 1
        if self.writes_early:
            for of in (layer for groups in self.blocks for group in groups for layer in group.layers):
                of.part(block, 0, of.size)[:] = bytes([block % 251]) * of.size
        return block

    def pin(self, blocks: Collection[int]) -> None:
        for block in blocks:
            assert self.holders[block], "somebody has it"
            self.holders[block] += 1

    def unpin(self, blocks: Collection[int]) -> None:
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free.append(block)

    def is_short(self) -> bool:
        return len(self.free) < self.short

    def kv(self, request: FakeRequest, worker: int, group: int, layer: int, block: int) -> bytes:
        """What a model would compute: it depends on all tokens and images so far."""
        end = (block + 1) * self.groups[group].block_tokens
        return self.after(request, worker, group, layer, end)

    def after(self, request: FakeRequest, worker: int, group: int, layer: int, end: int) -> bytes:
        """The same for a block that ends with this token, or a state after it."""
        upto = request.all_token_ids[:end], [image for image in request.media if image.start < end]
        what = repr((upto, worker, group, layer)).encode()
        return hashlib.shake_128(what).digest(self.groups[group].block_bytes(layer))

    def part(self, request: FakeRequest, worker: int, group: int, layer: int, block: int) -> memoryview:
        of = self.blocks[worker][group].layers[layer]
        return of.part(request.tables[group][block], 0, of.size)

    def each(self, request: FakeRequest, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Worker, group, layer and block of whole blocks with these tokens' KV, where there are any."""
        for worker in range(len(self.workers)):
            for group, one in enumerate(self.groups):
                for block in range(begin // one.block_tokens, end // one.block_tokens):
                    if not one.is_state and request.tables[group][block]:
                        for layer in range(len(one.layers)):
                            yield worker, group, layer, block

    def begin(self, request: FakeRequest, local: int = 0) -> int:
        """It gets blocks, and what is stored of it is asked for: so many tokens of it will be loaded."""
        external, _ = self.scheduling.matched(request, local)
        assert external is not None
        done = local + external
        request.tables = []
        for one in self.groups:
            if one.is_state:
                last = -(-done // one.block_tokens) - 1
                request.tables.append([*[0] * last, self.take()] if done else [])
                continue
            count = -(-request.num_tokens // one.block_tokens) + 1
            gone = max(0, done - one.window) // one.block_tokens if one.window and done else 0
            request.tables.append([0] * gone + [self.take() for _ in range(count - gone)])
        self.scheduling.allocated(request, request.tables, external)
        request.num_computed_tokens = done
        return external

    def run(self, scheduled: dict[FakeRequest, int], spoil: Callable[[], None] = lambda: None) -> Step:
        """One step: what is loaded is checked, and the rest computed."""
        by_id = {request.request_id: request for request in scheduled}
        offered = {
            request.request_id: self._make_room(request, count) for request, count in scheduled.items()
        }
        step = self.scheduling.step(
            {request.request_id: count for request, count in scheduled.items()},
            lambda name: by_id[name].tables,
            [(request.tables, request.num_computed_tokens) for request in scheduled],
            offered,
        )
        spoil()
        for worker in self.workers:
            worker.begin(step)
            worker.load(step)
        for request, count in scheduled.items():
            end = request.num_computed_tokens + count
            for at, group, layer, block in self.each(request, request.num_computed_tokens, end):
                self.workers[at].wait_for_layer(f"{group}.{layer}")
                made = self.kv(request, at, group, layer, block)
                self.part(request, at, group, layer, block)[:] = made
            self._advance(request, end)
        if self.speculates:  # vLLM asks for results before the draft model computes
            self.results = [worker.take_result() for worker in self.workers]
        for worker in self.workers:
            worker.computed(step)
        if not self.speculates:
            self.results = [worker.take_result() for worker in self.workers]
        self.bad = set().union(*(result.bad_blocks for result in self.results))
        self.scheduling.stepped()
        for request, count in scheduled.items():
            bad = [
                block * self.groups[0].block_tokens
                for block, number in enumerate(request.tables[0])
                if number in self.bad
            ]
            request.num_computed_tokens = min([request.num_computed_tokens + count, *bad])
        for result in self.results:
            self.scheduling.heard(result.report)
        return step

    def _make_room(self, request: FakeRequest, count: int) -> list[tuple[int, int, int]]:
        """Blocks for the states at the end of a step. Which states are offered: group, block, and after
        how many tokens."""
        offered, end = [], request.num_computed_tokens + count
        for group, one in enumerate(self.groups):
            if not one.is_state:
                continue
            table, last = request.tables[group], -(-end // one.block_tokens) - 1
            for at in range(len(table) - 1):  # before that which the step goes on from
                if table[at]:
                    self.unpin([table[at]])
                    table[at] = 0
            if last >= len(table):
                table += [*[0] * (last - len(table)), self.take()]
            if end % one.block_tokens == 0:
                offered.append((group, table[last], end))
        return offered

    def _advance(self, request: FakeRequest, end: int) -> None:
        """Go on from the states of all tokens so far to those after `end`."""
        begin = request.num_computed_tokens
        for worker, blocks in enumerate(self.blocks):
            for group, one in enumerate(self.groups):
                if not one.is_state:
                    continue
                table = request.tables[group]
                for layer, of in enumerate(blocks[group].layers):
                    if begin:
                        now = of.part(table[-(-begin // one.block_tokens) - 1], 0, of.size)
                        assert now == self.after(request, worker, group, layer, begin), "a wrong state"
                    made = self.after(request, worker, group, layer, end)
                    of.part(table[-(-end // one.block_tokens) - 1], 0, of.size)[:] = made

    def check(self, request: FakeRequest, tokens: int) -> None:
        """All whole blocks of so many tokens are what a model would have computed."""
        for worker, group, layer, block in self.each(request, 0, tokens):
            there = self.part(request, worker, group, layer, block)
            assert there == self.kv(request, worker, group, layer, block), (worker, group, layer, block)

    def end(self, request: FakeRequest) -> bool:
        waits = self.scheduling.finished(request, request.tables)
        if not waits:
            self.give_back(request)
        return waits

    def give_back(self, request: FakeRequest) -> None:
        self.unpin([block for table in request.tables for block in table if block])

    def settle(self) -> None:
        """Empty steps, until nobody waits for a save."""
        wait_until("saves are over", lambda: not self.scheduling._stores and not self.run({}).stores)

    def arrives(self, request: FakeRequest) -> bool:
        """Wait for a load ahead. Whether all of it has come."""
        name, came, failed = request.request_id, Counter[str](), set[str]()

        def has_ended() -> bool:
            self.run({})
            for result in self.results:
                came.update(result.arrived)
                failed.update(result.not_arrived)
            return came[name] == len(self.workers)

        wait_until("the load is over", has_ended)
        return name not in failed

    def count(self, request: FakeRequest, most: int) -> int:
        """So many of its tokens are computed in the next step, of at most so many."""
        begin, end = request.num_computed_tokens, request.num_tokens
        each = [one.block_tokens for one in self.groups if one.is_state]
        if not each:
            return min(end - begin, most)
        last, stop = (end - 1) // each[0] * each[0], min(begin + most, end)
        if stop < end and stop // each[0] * each[0] > begin:
            stop = stop // each[0] * each[0]
        return (last if begin < last < stop else stop) - begin

    def serve(self, request: FakeRequest, step_tokens: int = 10_000) -> int:
        """A whole request; how many tokens were loaded."""
        external = self.begin(request)
        while external and self.scheduling.loads_ahead and not self.arrives(request):
            self.give_back(request)
            request.num_computed_tokens = 0
            external = self.begin(request)
        while request.num_computed_tokens < request.num_tokens:
            self.run({request: self.count(request, step_tokens)})
            external = 0 if self.bad else external
        self.check(request, request.num_tokens)
        self.end(request)
        self.settle()
        return external


FULL = [GroupOf((8, 4, 4), 32)]
HYBRID = [GroupOf((8, 8), 32), GroupOf((4,), 32, window=200)]


@contextlib.contextmanager
def engine(
    directory: Path,
    groups: Sequence[GroupOf],
    workers: int = 1,
    slots: int = 60,
    *,
    is_far: bool = False,
    speculates: bool = False,
    writes_early: bool = False,
    tier: TierRequests | None = None,
) -> Iterator[Engine]:
    with running(directory, tier_requests=tier) as plane:
        for at, group in enumerate(groups):
            for worker in range(workers):
                add(plane, f"{at}.{worker}", group.column_bytes, slots)
        made = Engine(
            plane, groups, workers, is_far=is_far, speculates=speculates, writes_early=writes_early
        )
        try:
            yield made
            with made.driver._lock:  # the housekeeper goes on
                check_integrity(made.driver.ledger)
        finally:
            made.close()


def add(plane: Plane, name: str, payload: int, slots: int) -> None:
    identity = ShardIdentity(name, slot_bytes_for(payload), DRIVER, part=name)
    arena = Arena.allocate(identity.slot_bytes, slots)
    plane.shards[name] = HostedShard(identity, arena, 0, wake_me=plane.plane.wake)


def lose(one: Engine, name: str) -> None:
    half = one.halves[int(name.partition(".")[2])]
    one.plane.shards.pop(name).end(Cause.GONE, "killed")
    wait_until("the worker knows", lambda: not half.shards[name].is_open)
    half.shards[name].open()


def damage(one: Engine, depth: int, group: int = 0) -> None:
    columns = one.driver.ledger.accounts["acme"].columns(group)
    [column] = [each for each in columns if each.depth == depth]
    one.plane.shards[f"{group}.0"].arena.slot(column.slot)[100] ^= 1


_names = iter(range(1 << 30))


def request(tokens: Sequence[int], org: str = "acme", rules: Rules = AS_USUAL) -> FakeRequest:
    return FakeRequest(f"request {next(_names)}", list(tokens), org=org, rules=rules)


def some(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1000 + at // 7).randrange(1000) for at in range(count)]
