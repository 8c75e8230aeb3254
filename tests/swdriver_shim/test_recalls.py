"""What brains ask a driver to recall while requests wait: over a real Redis, from a real tier 2."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from console.stack import redis as redis_server
from console.stack import redis_users
from inference_brain.recalls import PENDING_MAX, Recalls, Result
from swdriver_shim.cache_map.codec import FIELD, SPACE_BYTES
from swdriver_shim.cache_map.recall_reader import AT_ONCE, BLOCK_MS, RecallReader
from swdriver_shim.cache_map.recalls import (
    LATE_SECONDS_MAX,
    OF_ORG_A_SECOND,
    OF_ORG_AT_ONCE,
    SPACES_MAX,
    Allowances,
    Recalled,
    request,
)
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.data_plane.tier2 import SEARCHES_AHEAD_MAX
from swdriver_shim.driver import Driver
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.policy import Policy, Tiers
from telemetry.credentials import own_url, rules
from telemetry.records import RECALL_STREAM
from tests.embedded import running as running_server
from tests.kvss_agent.plane import running
from tests.live import wait_until
from tests.swdriver_shim.fleets import Engine, Fleet, tokens
from tests.swdriver_shim.prompts import prompt
from tests.swdriver_shim.shims import document
from tests.swdriver_shim.tiers import kept, tier_requests

C = COLUMN_TOKENS
SLOTS, COLUMNS = 64, 20
TOKEN = "token-of-the-control-api"
TOPIC = "driver:job"
KEPT = Policy(tiers=Tiers.TIER2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis_server.RedisServer]:
    made = redis_server.prepare(
        tmp_path / "redis", users=redis_users.TELEMETRY, durable=False, strict=True
    )
    with running_server(made, tmp_path / "log"):
        with redis.Redis.from_url(made.url) as admin:
            for topic in (TOPIC, "driver:other", "brain:one"):
                admin.execute_command("ACL", "SETUSER", topic, *rules(topic, TOKEN))
        yield made


def space_of(asked: Prompt) -> bytes:
    return asked.maker.tag + asked.maker.namespace.digest()[:SPACE_BYTES]


def evict(driver: Driver, fleet: Fleet) -> None:
    for slots in (0, SLOTS):
        for shard in fleet.plane.shards.values():
            shard.resize(slots)
        wait_until("it follows", lambda: {pool.limit for pool in driver.ledger.pools} == {slots})  # noqa: B023


def test_a_prompt_is_in_memory_before_its_request_comes(
    server: redis_server.RedisServer, tmp_path: Path
) -> None:
    files, state = tmp_path / "files", tmp_path / "engine"
    state.mkdir()
    url = server.url_of("own", "")
    asked = prompt(tokens(*range(1, COLUMNS + 1)))
    counted: Counter[Result] = Counter()

    async def ask(driver: str, of: Prompt, times: int = 1) -> None:
        def count(result: Result) -> None:
            counted[result] += 1

        recalls = Recalls(own_url(url, "brain:one", TOKEN), count)
        for _ in range(times):
            recalls.ask(driver, of, 0, COLUMNS * C)
        wanted = counted.total() + len(recalls._pending)
        while counted.total() < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await recalls.close()

    with tier_requests(files) as tier, running(tmp_path, tier_requests=tier) as plane:
        fleet = Fleet(plane)
        fleet.make(SLOTS)
        (state / "desired.json").write_bytes(document(plane.unix, {"acme": KEPT}))
        shim = Shim("engine", state)
        shim.start()
        reader = RecallReader(own_url(url, TOPIC, TOKEN), TOPIC, shim.recall, shim.recalls).start()
        try:
            engine = Engine(shim.mover)
            engine.store(asked)
            assert engine.load(asked) == COLUMNS * C
            wait_until(
                "tier 2 has them",
                lambda: sum(file.name.endswith(".0.0") for file in kept(files)) >= COLUMNS,
            )
            spilled = engine.driver.ledger.tier2.spilled
            wait_until("the driver knows", lambda: spilled.columns >= COLUMNS)
            evict(engine.driver, fleet)
            assert engine.driver.query(asked) == 0
            asyncio.run(ask("other", asked))
            asyncio.run(ask("job", prompt(tokens(*range(1, COLUMNS + 1)), "globex")))
            wait_until("it was asked for another org", lambda: shim.recalls["unknown"] == 1)
            assert engine.driver.query(asked) == 0
            asyncio.run(ask("job", asked, times=3))
            wait_until("it is here", lambda: engine.driver.query(asked) == COLUMNS * C)
        finally:
            reader.stop()
            shim.stop()
    assert shim.recalls == {"unknown": 1, "asked": 1}
    assert counted == {Result.ASKED: 3, Result.REPEATED: 2}


def test_what_is_late_or_no_request_asks_for_nothing(server: redis_server.RedisServer) -> None:
    asked: list[object] = []
    told = prompt(tokens(1, 2, 3))

    def recall(*what: object) -> Recalled:
        asked.append(what)
        return Recalled.ASKED

    reader = RecallReader(server.url, TOPIC, recall, Counter())
    now = time.time()
    good = request(space_of(told), told.keys, now)
    for raw in (b"", good[:-1], good + b"!", good.replace(told.keys[-1], told.keys[-1][:-1])):
        assert reader.take(raw) == Recalled.MALFORMED
    for away in (-2, 2):
        late = request(space_of(told), told.keys, now + away * LATE_SECONDS_MAX)
        assert reader.take(late) == Recalled.LATE
    assert asked == []
    assert reader.take(good) == Recalled.ASKED
    assert reader.take(request(space_of(told), told.keys, now, "sibling")) == Recalled.ASKED
    wanted = space_of(told), list(told.keys)
    assert asked == [(*wanted, ""), (*wanted, "sibling")]


def test_an_org_that_asks_for_too_much_takes_nothing_from_others(
    server: redis_server.RedisServer,
) -> None:
    asked: Counter[bytes] = Counter()

    def recall(space: bytes, *_: object) -> Recalled:
        asked[space] += 1
        return Recalled.ASKED

    now = 0.0
    reader = RecallReader(server.url, TOPIC, recall, Counter(), clock=lambda: now)
    much, little = (prompt(tokens(1, 2, 3), org) for org in ("acme", "globex"))

    def take(of: Prompt) -> Recalled:
        return reader.take(request(space_of(of), of.keys, time.time()))

    found = Counter(take(much) for _ in range(3 * OF_ORG_AT_ONCE))
    assert found == {Recalled.ASKED: OF_ORG_AT_ONCE, Recalled.TOO_MANY: 2 * OF_ORG_AT_ONCE}
    assert take(little) == Recalled.ASKED
    now = 1.0
    assert Counter(take(much) for _ in range(OF_ORG_AT_ONCE))[Recalled.ASKED] == OF_ORG_A_SECOND
    assert asked == {
        space_of(much): OF_ORG_AT_ONCE + OF_ORG_A_SECOND,
        space_of(little): 1,
    }


def test_made_up_orgs_take_no_memory() -> None:
    allowances = Allowances(lambda: 0.0)
    for number in range(SPACES_MAX + 500):
        assert allowances.take(b"%d" % number)
    assert len(allowances._full_at) == SPACES_MAX


class Waits(threading.Event):
    """Waits for nothing, and remembers for how long it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return False


def test_a_flood_is_read_at_a_pace(server: redis_server.RedisServer) -> None:
    counts: Counter[str] = Counter()
    url = server.url_of("own", "")
    reader = RecallReader(own_url(url, TOPIC, TOKEN), TOPIC, lambda *_: Recalled.ASKED, counts)
    reader._stopped = waits = Waits()
    with redis.Redis.from_url(own_url(url, "brain:one", TOKEN)) as brain:
        for _ in range(3 * AT_ONCE):
            brain.xadd(f"{RECALL_STREAM}{TOPIC}", {FIELD: b"no request"})
    for _ in range(3):
        reader._read()
    with redis.Redis.from_url(server.url) as admin:
        assert admin.xlen(f"{RECALL_STREAM}{TOPIC}") == 0
    reader._redis.close()
    assert counts == {Recalled.MALFORMED: 3 * AT_ONCE}
    assert waits.seconds == [0.25] * 3


def test_searches_of_loads_go_before_what_brains_ask_for(tmp_path: Path) -> None:
    with tier_requests(tmp_path / "files") as tier, running(tmp_path, tier_requests=tier) as plane:
        fleet = Fleet(plane)
        fleet.make(SLOTS)
        state = tmp_path / "engine"
        state.mkdir()
        (state / "desired.json").write_bytes(document(plane.unix, {"acme": KEPT}))
        shim = Shim("engine", state)
        shim.start()
        try:
            asked = prompt(tokens(1, 2, 3))
            tier2 = shim.driver._tier2
            assert shim.recall(space_of(asked), asked.keys) == Recalled.ASKED
            wait_until("it has looked", lambda: tier2._searching == 0)
            tier2._searching = SEARCHES_AHEAD_MAX
            assert shim.recall(space_of(asked), asked.keys) == Recalled.BUSY
            assert shim.driver.prefetch_prompt(asked)
            wait_until("it has looked", lambda: tier2._searching == SEARCHES_AHEAD_MAX)
            tier2._searching = 0
        finally:
            shim.stop()


async def test_what_waits_for_redis_is_bounded_and_counted() -> None:
    counted: Counter[Result] = Counter()

    def count(result: Result) -> None:
        counted[result] += 1

    recalls = Recalls("redis://127.0.0.1:1", count)
    asked = prompt(tokens(*range(1, COLUMNS + 1)))
    recalls.ask("job", asked, 10 * C, 10 * C)  # too few to be worth it
    for number in range(PENDING_MAX + 5):
        recalls.ask(f"job{number}", asked, 0, COLUMNS * C)
    async with asyncio.timeout(60):
        while counted[Result.FAILED] < PENDING_MAX:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await recalls.close()
    assert counted == {Result.TOO_MANY: 5, Result.FAILED: PENDING_MAX}


class FakeRedis:
    """Takes requests, or is away."""

    def __init__(self) -> None:
        self.is_away = False
        self.has_answered = asyncio.Event()
        self.has_answered.set()
        self.taken: list[object] = []

    async def xadd(self, *what: object, **_: object) -> None:
        await self.has_answered.wait()
        if self.is_away:
            raise redis.ConnectionError
        self.taken.append(what)

    async def aclose(self) -> None:
        pass


@pytest.fixture
def asking() -> tuple[Recalls, FakeRedis, list[Result]]:
    results: list[Result] = []
    recalls, fake = Recalls("redis://127.0.0.1:1", results.append), FakeRedis()
    recalls._redis = fake  # type: ignore[assignment]
    return recalls, fake, results


async def settled(recalls: Recalls) -> None:
    while recalls._pending:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_what_nobody_was_asked_for_may_be_asked_for_at_once(
    asking: tuple[Recalls, FakeRedis, list[Result]],
) -> None:
    recalls, fake, results = asking
    asked = prompt(tokens(*range(1, COLUMNS + 1)))
    fake.is_away = True
    recalls.ask("job", asked, 0, COLUMNS * C)
    recalls.ask("job", asked, 0, COLUMNS * C)  # it is on its way
    await settled(recalls)
    fake.is_away = False
    recalls.ask("job", asked, 0, COLUMNS * C)
    await settled(recalls)
    recalls.ask("job", asked, 0, COLUMNS * C)
    assert results == [Result.REPEATED, Result.FAILED, Result.ASKED, Result.REPEATED]
    results.clear()
    fake.has_answered.clear()
    for number in range(PENDING_MAX + 1):
        recalls.ask(f"job{number}", asked, 0, COLUMNS * C)
    assert results == [Result.TOO_MANY]
    fake.has_answered.set()
    await settled(recalls)
    recalls.ask(f"job{PENDING_MAX}", asked, 0, COLUMNS * C)
    await settled(recalls)
    assert results[-1] == Result.ASKED
    await recalls.close()


async def test_of_another_sibling_a_prompt_may_be_borrowed_at_once(
    asking: tuple[Recalls, FakeRedis, list[Result]],
) -> None:
    recalls, _, results = asking
    asked = prompt(tokens(*range(1, COLUMNS + 1)))
    for sibling in ("one", "other", "one"):
        recalls.borrow("job", asked, 0, COLUMNS * C, sibling)
    recalls.ask("job", asked, 0, COLUMNS * C)
    await settled(recalls)
    assert results == [Result.REPEATED, Result.ASKED, Result.ASKED, Result.ASKED]
    await recalls.close()


async def test_after_a_purge_nobody_is_asked_for_what_was_purged(
    asking: tuple[Recalls, FakeRedis, list[Result]],
) -> None:
    recalls, fake, results = asking
    fake.has_answered.clear()
    purged, other = prompt(tokens(*range(1, COLUMNS + 1))), prompt(tokens(*range(COLUMNS)), "globex")
    for asked in (purged, other):
        recalls.ask("job", asked, 0, COLUMNS * C)
    recalls.forget([purged.maker.tag])
    assert not recalls._asked
    await asyncio.sleep(0)
    fake.has_answered.set()
    await settled(recalls)
    assert (len(fake.taken), results) == (1, [Result.ASKED])
    await recalls.close()


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_a_driver_whose_clock_is_wrong_reads_from_its_start_on(
    server: redis_server.RedisServer, ahead: float
) -> None:
    stream, counts = f"{RECALL_STREAM}{TOPIC}", Counter[str]()
    url = own_url(server.url_of("own", ""), TOPIC, TOKEN)
    with redis.Redis.from_url(server.url) as admin:
        for _ in range(2 * AT_ONCE + 1):
            admin.xadd(stream, {FIELD: b"of an earlier life"})
        reader = RecallReader(
            *(url, TOPIC, lambda *_: Recalled.ASKED, counts), wall_clock=lambda: time.time() + ahead
        ).start()
        try:
            wait_until("it has begun", lambda: reader._has_begun)
            assert not admin.xlen(stream)
            admin.xadd(stream, {FIELD: b"no request"})
            wait_until("it has read", lambda: counts == {Recalled.MALFORMED: 1})
            admin.delete(stream)  # as another Redis, whose clock is behind
            time.sleep(1.2 * BLOCK_MS / 1000)
            admin.xadd(stream, {FIELD: b"no request"}, id="1-1")
            wait_until("it has read", lambda: counts == {Recalled.MALFORMED: 2})
        finally:
            reader.stop()


def test_only_brains_ask_and_only_the_driver_reads(server: redis_server.RedisServer) -> None:
    def may(topic: str, *command: str | bytes) -> bool:
        with redis.Redis.from_url(own_url(server.url_of("own", ""), topic, TOKEN)) as client:
            try:
                client.execute_command(*command)
            except redis.exceptions.NoPermissionError:
                return False
        return True

    stream = f"{RECALL_STREAM}{TOPIC}"
    assert may("brain:one", "XADD", stream, "*", FIELD, b"x")
    assert may(TOPIC, "XREAD", "STREAMS", stream, "0-0")
    assert not may("driver:other", "XADD", stream, "*", FIELD, b"x")
    assert not may("driver:other", "XREAD", "STREAMS", stream, "0-0")
    assert not may("brain:one", "DEL", stream)
