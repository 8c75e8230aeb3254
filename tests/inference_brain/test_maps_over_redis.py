"""Cache maps on their way over a real Redis, with the users that drivers and brains have there."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from console.stack import redis as redis_server
from console.stack import redis_users
from inference_brain.maps import CacheMaps, DriverPlace, Hit
from inference_brain.maps.mirror import Mirror
from inference_brain.maps.reader import MapReader
from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache_map.codec import FIELD
from swdriver_shim.cache_map.follower import Follower
from swdriver_shim.cache_map.messages import MessageLog
from swdriver_shim.cache_map.publisher import MapPublisher
from swdriver_shim.desired import GroupSpec, ModelSpec
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from telemetry.credentials import own_url, rules
from telemetry.records import MAP_STREAM
from tests.embedded import running
from tests.inference_brain.map_worlds import SECRET, model_of, tokens_of
from tests.kvss_agent.plane import DRIVER
from tests.kvss_agent.process import agent, document, spec
from tests.live import wait_until
from tests.swdriver_shim.daemons import ACME, CONTROL, EACH, Daemon, kv, told
from tests.swdriver_shim.prompts import FULL

C = COLUMN_TOKENS
TOKEN = "token-of-the-control-api"
MODEL = model_of(FULL)
STREAM = f"{MAP_STREAM}driver:job"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    """The telemetry server of `make up`."""
    made = redis_server.prepare(
        tmp_path_factory.mktemp("redis") / "t", users=redis_users.TELEMETRY, durable=False, strict=True
    )
    with running(made, made.home.parent / "log"):
        yield made


@pytest.fixture
def admin(server: redis_server.RedisServer) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(server.url)
    client.flushall()
    for topic in ("driver:job", "driver:other", "brain:one"):
        client.execute_command("ACL", "SETUSER", topic, *rules(topic, TOKEN))  # type: ignore[no-untyped-call]
    yield client
    client.close()


class Job:
    """A driver with a ledger, whose time is real."""

    def __init__(self, url: str) -> None:
        self.ledger = Ledger(FULL, "llama")
        self.ledger.set_slot_limit(0, 100_000)
        self.lock = FairLock()
        ledger = self.ledger
        follower = Follower(FULL, ledger.accounts, self.lock, lambda: ledger.is_reachable)
        ledger.add_listener(follower)
        self.publisher = MapPublisher(url, "driver:job", lambda: follower)

    def store(self, prompt: Prompt) -> None:
        with self.lock:
            now = time.monotonic()
            self.ledger.finish_store(self.ledger.begin_store(prompt, prompt.tokens, now), now)


def prompt(*columns: int) -> Prompt:
    return Keys("acme", SECRET, MODEL.namespace()).prompt(tokens_of(columns))


def hit(maps: CacheMaps, asked: Prompt) -> Hit | None:
    [found] = maps.hits(["job"], {MODEL: asked}, time.time())
    return found


@asynccontextmanager
async def brain(
    server: redis_server.RedisServer, place: DriverPlace | None = None
) -> AsyncIterator[CacheMaps]:
    maps = CacheMaps()
    maps.follow({"job": place or DriverPlace("driver:job", MODEL)})
    reader = MapReader(maps, own_url(server.url_of("own", ""), "brain:one", TOKEN))
    task = asyncio.create_task(reader.run())
    try:
        yield maps
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not is_so():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)


def tokens(maps: CacheMaps, asked: Prompt) -> int | None:
    found = hit(maps, asked)
    return found.tokens if found else None


@pytest.fixture
def job(server: redis_server.RedisServer, admin: redis.Redis) -> Iterator[Job]:
    made = Job(own_url(server.url_of("own", ""), "driver:job", TOKEN))
    yield made
    made.publisher._redis.close()


async def test_what_a_driver_stores_its_brain_knows(
    server: redis_server.RedisServer, job: Job, admin: redis.Redis
) -> None:
    one, two = prompt(*[1] * 20), prompt(*[2] * 20)
    job.store(one)
    assert job.publisher.publish()
    async with brain(server) as maps:
        await until(lambda: tokens(maps, one) == 20 * C)
        job.store(two)
        assert job.publisher.publish()
        await until(lambda: tokens(maps, two) == 20 * C)
        job.ledger.purge("acme")
        assert job.publisher.publish()
        await until(lambda: tokens(maps, one) == tokens(maps, two) == 0)
        age = maps.age("job", time.monotonic())
        assert age is not None
        assert age < 5


async def test_a_stream_that_was_emptied_begins_anew(
    server: redis_server.RedisServer, job: Job, admin: redis.Redis
) -> None:
    one, two = prompt(*[1] * 20), prompt(*[2] * 20)
    job.store(one)
    assert job.publisher.publish()
    async with brain(server) as maps:
        await until(lambda: tokens(maps, one) == 20 * C)
        admin.delete(STREAM)
        job.store(two)
        assert not job.publisher.publish()
        assert tokens(maps, one) == 20 * C  # nobody forgets what is known
        assert job.publisher.publish()
        await until(lambda: tokens(maps, two) == 20 * C)
        assert tokens(maps, one) == 20 * C


async def test_compaction_keeps_the_stream_short_and_readable_from_its_start(
    server: redis_server.RedisServer, job: Job, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swdriver_shim.cache_map.messages.DELTAS_MAX", 3)
    for kind in range(1, 20):
        job.store(prompt(*[kind] * 8))
        assert job.publisher.publish()
        assert admin.xlen(STREAM) <= 4
    async with brain(server) as maps:
        await until(lambda: tokens(maps, prompt(*[7] * 8)) == 8 * C)


async def test_messages_that_are_no_messages_are_left_behind_with_the_next_snapshot(
    server: redis_server.RedisServer, job: Job, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_brain.maps.reader.READ_AGAIN_SECONDS", 0.05)
    one = prompt(*[1] * 20)
    job.store(one)
    assert job.publisher.publish()
    async with brain(server) as maps:
        await until(lambda: tokens(maps, one) == 20 * C)
        for fields in ({FIELD: b"nonsense"}, {b"other": b"x"}):
            nonsense: Any = fields
            admin.xadd(STREAM, nonsense)
        await until(lambda: tokens(maps, one) is None)
        assert job.publisher.log
        job.publisher.log.follower.wants_snapshot = True
        assert job.publisher.publish()
        await until(lambda: tokens(maps, one) == 20 * C)


@pytest.mark.slow
async def test_a_redis_that_stops_answering_costs_nothing_but_news(
    server: redis_server.RedisServer, job: Job, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_brain.maps.reader.ANSWER_SECONDS", 1.0)
    monkeypatch.setattr("swdriver_shim.cache_map.publisher.RETRY_SECONDS", 0.1)
    one, two = prompt(*[1] * 20), prompt(*[2] * 20)
    process = admin.info()["process_id"]
    job.store(one)
    job.publisher.start()
    try:
        async with brain(server) as maps:
            await until(lambda: tokens(maps, one) == 20 * C)
            os.kill(process, signal.SIGSTOP)
            try:
                job.store(two)
                seconds = []
                for _ in range(40):
                    began = time.monotonic()
                    assert tokens(maps, one) == 20 * C
                    seconds.append(time.monotonic() - began)
                    await asyncio.sleep(0.05)
                assert statistics.median(seconds) < 0.5, "requests wait for Redis"
            finally:
                os.kill(process, signal.SIGCONT)
            await until(lambda: tokens(maps, two) == 20 * C)
            assert tokens(maps, one) == 20 * C
    finally:
        await asyncio.to_thread(job.publisher.stop)


@pytest.mark.slow
async def test_a_daemon_reports_what_its_callers_store(
    server: redis_server.RedisServer, admin: redis.Redis, tmp_path: Path
) -> None:
    topic = f"driver:{DRIVER}"
    admin.execute_command("ACL", "SETUSER", topic, *rules(topic, CONTROL))  # type: ignore[no-untyped-call]
    told_model = ModelSpec(name="llama", groups=(GroupSpec(name="full", bytes_per_token=(EACH,)),))
    asked = Keys("acme", b"acme".ljust(32, b"!"), told_model.namespace()).prompt(tokens_of([1] * 10, 5))
    with agent(tmp_path / "agent") as one:
        one.tell(document(1, spec("s", 20, EACH * C)))
        options = ("--name", DRIVER, "--telemetry", server.url_of("own", ""))
        daemon = Daemon(tmp_path / "driver", *options)
        try:
            assert daemon.control("desired", told([one])).status_code == 202
            await asyncio.to_thread(wait_until, "it is ready", daemon.is_ready)
            raw = tokens_of([1] * 10, 5)
            assert daemon.store(ACME, raw, kv(len(raw))).json()["failed"] == 0
            async with brain(server, DriverPlace(topic, told_model)) as maps:

                def known() -> int | None:
                    [found] = maps.hits(["job"], {told_model: asked}, time.time())
                    return found.tokens if found else None

                await until(lambda: known() == len(raw))
                one.kill()
                await until(lambda: known() == 0)  # it promises nothing that it can't serve
        finally:
            daemon.kill()


@pytest.mark.parametrize("ahead", [600.0, -600.0])
async def test_how_long_a_driver_is_silent_does_not_depend_on_its_clock(
    server: redis_server.RedisServer, job: Job, admin: redis.Redis, ahead: float
) -> None:
    one = prompt(*[1] * 20)
    job.publisher._wall_clock = lambda: time.time() + ahead
    job.store(one)
    before = time.monotonic()
    assert job.publisher.publish()
    await asyncio.sleep(1.0)
    async with brain(server) as maps:  # it reads what was sent a while ago
        await until(lambda: maps.age("job", 0.0) is not None)
        now = time.monotonic()
        age = maps.age("job", now)
        assert age is not None
        assert 1.0 <= age < now - before + 0.5
        job.store(prompt(*[2] * 20))
        before = time.monotonic()
        assert job.publisher.publish()

        def is_from_now() -> bool:
            now = time.monotonic()
            age = maps.age("job", now)
            return age is not None and age < now - before + 0.5

        await until(is_from_now)


async def test_requests_come_in_between_any_two_messages(
    server: redis_server.RedisServer, job: Job, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.publisher.log = MessageLog(job.publisher._follower())  # type: ignore[arg-type]
    job.publisher.log.follower.wants_snapshot = True
    for number in range(1, 8):
        job.store(prompt(*[number] * 8))
        assert job.publisher.publish()
    turns, read_at = 0, list[int]()
    read = Mirror.read

    def noted(mirror: Mirror, raw: bytes, at: float) -> bool:
        read_at.append(turns)
        return read(mirror, raw, at)

    monkeypatch.setattr(Mirror, "read", noted)
    async with brain(server) as maps:
        while tokens(maps, prompt(*[7] * 8)) != 8 * C:
            turns += 1
            await asyncio.sleep(0)
    assert len(read_at) == len({*read_at}) == 7


def test_a_driver_may_write_its_own_map_only_and_a_brain_reads_all(
    server: redis_server.RedisServer, admin: redis.Redis
) -> None:
    def may(topic: str, *command: str) -> bool:
        url = own_url(server.url_of("own", ""), topic, TOKEN)
        with redis.Redis.from_url(url, driver_info=None) as client:
            try:
                client.execute_command(*command)
            except redis.exceptions.NoPermissionError:
                return False
        return True

    other = f"{MAP_STREAM}driver:other"
    for key in (STREAM, other):
        admin.xadd(key, {"a": "b"})
    assert may("driver:job", "XADD", STREAM, "*", "a", "b")
    assert may("driver:job", "XTRIM", STREAM, "MINID", "0-1")
    assert not may("driver:job", "XADD", other, "*", "a", "b")
    assert not may("driver:job", "XTRIM", other, "MAXLEN", "0")
    assert not may("driver:job", "XREAD", "STREAMS", other, "0-0")
    assert not may("driver:job", "DEL", STREAM)
    for key in (STREAM, other):
        assert may("brain:one", "XREAD", "STREAMS", key, "0-0")
        assert not may("brain:one", "XTRIM", key, "MAXLEN", "0")
        assert not may("brain:one", "DEL", key)
    assert may("brain:one", "SET", "tidegate:routing:x", "1")
    assert not may("brain:one", "SET", "tidegate:celery:x", "1")
    assert not may("driver:job", "GET", "tidegate:routing:x")
