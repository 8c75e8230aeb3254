"""What each Redis user may do, tried command by command against a real Redis with our users."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
import redis

from console.environment import PROJECT
from console.stack import redis as redis_server
from console.stack import redis_users
from telemetry.credentials import own_url, rules
from telemetry.emit.deltas import Collect
from telemetry.emit.emitter import Emitter
from telemetry.ingest.batches import DELIVERIES_MAX, SHAPE_SECONDS_MAX
from telemetry.ingest.service import Ingest
from telemetry.ingest.streams import Streams
from telemetry.metrics import Catalog, Sink
from telemetry.models import DeadLetter, DeadLetterCount, Source
from telemetry.records import (
    FIELD,
    LATE_SECONDS_MAX,
    OWN_STREAM,
    OWN_STREAM_LENGTH_MAX,
    SHAPE_KEY,
    STREAM,
    TOLD_SECONDS,
)
from telemetry.redis_clients import database
from tests.embedded import running
from tests.telemetry.writers import Writer

TOKEN: Final = "token-of-the-control-api"
OURS: Final = f"{OWN_STREAM}node:ax-1"
FOREIGN: Final = f"{OWN_STREAM}node:ax-2"
WORK: Final = "tidegate:celery:celery"
FUTURE_MS: Final = 1 << 62  # as an entry's id says it
KEYS: Final = (OURS, FOREIGN, f"{OWN_STREAM}console", STREAM, f"{SHAPE_KEY}00", WORK)
IN_PARTS: Final = {"acl", "xgroup", "xinfo"}  # tried part by part
# Redis lets everybody do these, so that they can log in; none of them reads or writes anything.
ALWAYS: Final = {"auth", "hello", "quit", "reset"}
CATALOG = Catalog()
COLUMNS = CATALOG.counter("test_columns_total", "Columns.", "org")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    """The telemetry server of `make up`."""
    made = redis_server.prepare(
        tmp_path_factory.mktemp("redis") / "t", users=redis_users.TELEMETRY, durable=False, strict=True
    )
    with running(made, made.home.parent / "log"):
        yield made


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    made = redis_server.prepare(
        tmp_path_factory.mktemp("redis") / "b", users=redis_users.BROKER, durable=False
    )
    with running(made, made.home.parent / "log"):
        yield made


@pytest.fixture
def admin(server: redis_server.RedisServer) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(server.url)
    client.flushall()
    for name in ("node:ax-1", "node:ax-2"):
        client.execute_command("ACL", "SETUSER", name, *rules(name, TOKEN))  # type: ignore[no-untyped-call]
    for key in (OURS, FOREIGN, STREAM):
        client.xadd(key, {"some": "thing"})
    client.set(f"{SHAPE_KEY}00", "x")
    client.rpush(WORK, "x")
    yield client
    client.close()


def own(server: redis_server.RedisServer, topic: str = "node:ax-1") -> str:
    return own_url(server.url_of("own", ""), topic, TOKEN)


def commands(client: redis.Redis) -> dict[str, int]:
    """All that this Redis knows, with the least number of arguments."""
    answer: Any = client.execute_command("COMMAND")  # type: ignore[no-untyped-call]
    return {name: abs(int(about["arity"])) - 1 for name, about in answer.items()}


def is_let_in(url: str, *command: str) -> bool:
    """Whether the user may do this: it is refused by name of the permission, before it is looked at.
    What blocks is let in, so that a busy server has long to refuse it."""
    with redis.Redis.from_url(url, socket_timeout=60, driver_info=None) as client:
        try:
            client.execute_command(*command)
        except redis.exceptions.NoPermissionError:
            return False
        except redis.RedisError as error:
            return "NOPERM" not in str(error)  # EXEC says so in its own way
    return True


def let_in(url: str, arity: dict[str, int]) -> set[str]:
    """The commands that the user may do on at least one key."""
    found = set()
    for name, count in arity.items():
        if name in ALWAYS:
            continue
        for key in KEYS:
            if is_let_in(url, name, *[key] * count):
                found.add(name)
                break
    return found


def test_a_telemetry_writer_may_add_to_its_own_stream_and_nothing_else(
    server: redis_server.RedisServer, admin: redis.Redis
) -> None:
    known = commands(admin)
    assert len(known) > 200
    assert let_in(own(server), known) == {"xadd", "ping"}
    for key in KEYS:
        assert is_let_in(own(server), "XADD", key, "*", "a", "b") == (key == OURS)
        assert is_let_in(own(server), "XADD", key, "MAXLEN", "0", "*", "a", "b") == (key == OURS)
    assert admin.xlen(FOREIGN) == admin.xlen(STREAM) == admin.llen(WORK) == 1


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("console", {"xadd", "ping"}),
        (
            "ingest",
            {
                "ping",
                "scan",
                "xreadgroup",
                "xautoclaim",
                "xack",
                "xdel",
                "xlen",
                "xpending",
                "xtrim",
                "mget",
            },
        ),
        ("observer", {"ping", "scan", "xlen", "info"}),
        ("registrar", {"ping", "unlink"}),
    ],
)
def test_each_role_may_do_its_work_and_nothing_else(
    user: str, expected: set[str], server: redis_server.RedisServer, admin: redis.Redis
) -> None:
    url = server.url_of(user)
    assert let_in(url, commands(admin)) - IN_PARTS == expected
    assert not is_let_in(url, "DEL", WORK)
    assert not is_let_in(url, "UNLINK", WORK)
    assert not is_let_in(url, "XADD", OURS, "*", "a", "b")
    assert (
        is_let_in(url, "ACL", "SETUSER", "x") == is_let_in(url, "ACL", "LIST") == (user == "registrar")
    )
    assert not is_let_in(url, "XGROUP", "DESTROY", OURS, "ingest")
    assert not is_let_in(url, "ACL", "SAVE")


DANGEROUS: Final = (
    *("FLUSHALL NONSENSE", "FLUSHDB NONSENSE", "KEYS *", "CONFIG GET *", "CONFIG SET a b", "ACL LIST"),
    *(
        "SCRIPT FLUSH NONSENSE",
        "DEBUG SLEEP nonsense",
        "MONITOR",
        "CLIENT LIST",
        "CLIENT KILL ID 99999999",
    ),
    *("SHUTDOWN NOSAVE NONSENSE", "SWAPDB 0 nonsense", "REPLICAOF nonsense nonsense", "SLOWLOG GET 1"),
    *("SET other 1", "LPUSH other 1", "GET other", "DEL other", "PUBLISH other x", "SUBSCRIBE other"),
    *(f"XADD {STREAM} * a b", f"GET {SHAPE_KEY}00", "RENAME tidegate:celery:a other", "BGREWRITEAOF"),
    "SORT tidegate:celery:x BY other* GET other*",
)


@pytest.mark.parametrize("user", ["broker", "observer"])
@pytest.mark.parametrize("command", DANGEROUS)
def test_who_asks_for_work_reaches_work_and_nothing_else(
    user: str, command: str, broker: redis_server.RedisServer
) -> None:
    if command.startswith("SORT") and broker.installation.version[0] < 7 and user == "broker":
        pytest.skip("before Redis 7 patterns of SORT are not looked at; nothing else is on that server")
    assert not is_let_in(broker.url_of(user), *command.split())


def test_observers_of_work_can_only_see_that_it_is_there(broker: redis_server.RedisServer) -> None:
    assert let_in(broker.url_of("observer"), commands(redis.Redis.from_url(broker.url))) == {
        "ping",
        "info",
    }


@pytest.mark.parametrize("name", redis_users.FILES)
def test_the_files_for_operators_are_what_is_tried_here(
    name: str, server: redis_server.RedisServer, admin: redis.Redis
) -> None:
    text = (PROJECT / "deploy" / "redis" / name).read_text()
    assert text == redis_users.acl_file(redis_users.FILES[name])
    for line in text.splitlines():
        if line.startswith("user ") and not line.startswith("user default"):
            _, user, *its = line.split()
            admin.execute_command("ACL", "SETUSER", f"file-{user}", *its)  # type: ignore[no-untyped-call]


def test_who_has_no_user_or_the_token_of_another_gets_in_nowhere(
    server: redis_server.RedisServer, admin: redis.Redis
) -> None:
    place = server.url_of("own", "")
    for url in (
        place,
        own_url(place, "node:ax-1", "another token"),
        own_url(place, "node:ax-3", TOKEN),
        place.replace("own@", ""),
    ):
        with (
            redis.Redis.from_url(url, driver_info=None) as client,
            pytest.raises((redis.AuthenticationError, redis.exceptions.ResponseError)),
        ):
            client.xadd(OURS, {"a": "b"})


def second(url: str) -> str:
    return url.replace("/0?", "/1?").replace("?db=0", "?db=1")


def test_users_reach_the_database_of_the_addresses_and_no_other(
    server: redis_server.RedisServer, admin: redis.Redis
) -> None:
    """In another one nobody would read or trim what they write."""
    url = own(server)
    assert not is_let_in(url, "SELECT", "1")
    assert not is_let_in(second(url), "PING")
    its = rules("node:ax-1", TOKEN, database(second(url)))
    admin.execute_command("ACL", "SETUSER", "node:ax-1", *its)  # type: ignore[no-untyped-call]
    with redis.Redis.from_url(second(url), driver_info=None) as sends:
        sends.xadd(OURS, {"a": "b"})
    assert not is_let_in(second(url), "SELECT", "2")
    with redis.Redis.from_url(second(server.url)) as reads:
        assert reads.xlen(OURS) == 1


# What they do with it


class Numbers:
    def __init__(self) -> None:
        self.columns = 0

    def collect(self, into: Sink) -> None:
        into.put(COLUMNS, [({"org": "acme"}, self.columns)])


def emitter(url: str, name: str, collect: Collect | None = None, kind: str = "agent") -> Emitter:
    return Emitter(url, kind, "1", name=name, collect=collect)


@pytest.fixture
def member(server: redis_server.RedisServer, admin: redis.Redis) -> Iterator[Ingest]:
    admin.delete(OURS, FOREIGN, STREAM)
    client = redis.Redis.from_url(server.url_of("ingest"), driver_info=None)
    made = Ingest(client, "a")
    made.join()
    yield made
    client.close()


def read(member: Ingest) -> None:
    """All that is there, in streams that were there before or not."""
    member.streams.look()
    while member.step():
        pass


@pytest.mark.django_db
def test_processes_with_their_own_users_are_read_like_others(
    server: redis_server.RedisServer, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.ingest.streams.BLOCK_MS", 1)
    numbers = Numbers()
    nodes = [emitter(own(server, f"node:{name}"), name, numbers.collect) for name in ("ax-1", "ax-2")]
    web = emitter(server.url_of("console"), "host", kind="web")
    for second in range(3):
        numbers.columns += 5
        for one in (*nodes, web):
            assert one.emit(time.time() + second)
    read(member)
    assert member.counts.records == {"written": 9}
    assert dict(Source.objects.values_list("topic", "sequence")) == {
        "node:ax-1": 3,
        "node:ax-2": 3,
        "web:host": 3,
    }
    assert member.streams.waiting == 0
    other = Ingest(member.streams.client, "b")  # which has never seen the shapes
    for one in nodes:
        assert one.emit(time.time() + 5)
    read(other)
    assert other.counts.records == {"written": 2}


@pytest.mark.django_db
def test_who_speaks_for_another_is_not_believed(
    server: redis_server.RedisServer, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.ingest.streams.BLOCK_MS", 1)
    with redis.Redis.from_url(own(server), driver_info=None) as client:
        for kind, name in (("agent", "ax-2"), ("driver", "ax-1"), ("web", "host"), ("agent", "ax-1")):
            client.xadd(OURS, {FIELD: Writer(client, kind, name).record()})
    with redis.Redis.from_url(server.url_of("console"), driver_info=None) as client:
        client.xadd(f"{OWN_STREAM}console", {FIELD: Writer(client, "agent", "ax-1").record()})
    read(member)
    assert member.counts.records == {"written": 1, "foreign": 4}
    assert dict(DeadLetterCount.objects.values_list("source", "count")) == {"node:ax-1": 3, "console": 1}
    assert Source.objects.get().topic == "node:ax-1"


@pytest.mark.django_db
def test_a_flood_in_one_stream_delays_and_costs_that_one_only(
    server: redis_server.RedisServer, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut off, counted, and read in turn with others."""
    monkeypatch.setattr("telemetry.ingest.streams.BLOCK_MS", 1)
    monkeypatch.setattr("telemetry.ingest.streams.BATCH_MAX", 100)
    flood = Writer(redis.Redis(), "agent", "ax-1")
    with redis.Redis.from_url(own(server), driver_info=None) as client:
        pipe = client.pipeline(transaction=False)
        for _ in range(OWN_STREAM_LENGTH_MAX + 300):
            pipe.xadd(OURS, {FIELD: flood.record()})
        pipe.execute()
    quiet = emitter(own(server, "node:ax-2"), "ax-2")
    quiet.emit(time.time())
    member.streams.look()
    assert member.step() <= 150
    assert set(Source.objects.values_list("topic", flat=True)) == {"node:ax-1", "node:ax-2"}
    read(member)
    assert member.counts.records == {"written": OWN_STREAM_LENGTH_MAX + 1}
    assert member.counts.dead == {"stream_cut_off": 300}
    assert DeadLetterCount.objects.get().source == "node:ax-1"


@pytest.mark.django_db
def test_a_record_whose_shape_is_on_its_way_with_another_member_is_read_again(
    server: redis_server.RedisServer, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.ingest.streams.BLOCK_MS", 1)
    numbers = Numbers()
    node = emitter(own(server), "ax-1", numbers.collect)
    for second in range(2):
        numbers.columns += 5
        node.emit(time.time() + second)
    member.streams.look()
    first, second_entry = member.streams.read()
    other = Ingest(member.streams.client, "b")
    assert other.write([second_entry], time.time()) == []
    assert other.counts.records == {}
    assert member.write([first], time.time()) == [first]
    assert other.write([second_entry], time.time()) == [second_entry]
    assert other.counts.records == {"written": 1}
    late = Streams(member.streams.client, "c")
    assert late.waiting == 0


@pytest.mark.django_db
def test_the_id_of_an_entry_makes_no_lag_of_decades(
    server: redis_server.RedisServer, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who adds a record chooses its id, which is its time of arrival as a rule."""
    monkeypatch.setattr("telemetry.ingest.streams.BLOCK_MS", 1)
    writer = Writer(redis.Redis(), "agent", "ax-1")
    with redis.Redis.from_url(own(server), driver_info=None) as client:
        client.xadd(OURS, {FIELD: writer.record()}, id="1-1")
        client.xadd(OURS, {FIELD: writer.record()}, id=f"{FUTURE_MS}-1")
    read(member)
    assert member.counts.records == {"written": 2}
    assert sum(member.counts.lag.counts) == 2
    assert LATE_SECONDS_MAX <= member.counts.lag.sum < LATE_SECONDS_MAX + 60


@pytest.mark.django_db
def test_an_entry_of_the_future_whose_shape_never_comes_is_refused_in_the_end(
    server: redis_server.RedisServer, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.ingest.streams.BLOCK_MS", 1)
    monkeypatch.setattr("telemetry.ingest.streams.IDLE_MS_BEFORE_TAKEN_OVER", 0)
    writer = Writer(redis.Redis(), "agent", "ax-1")
    with redis.Redis.from_url(own(server), driver_info=None) as client:
        client.xadd(OURS, {FIELD: writer.record(shape=b"x" * 16)}, id=f"{FUTURE_MS}-1")
    member.streams.look()
    for _ in range(DELIVERIES_MAX - 1):
        assert member.step() == 1
        assert member.counts.records == {}
    assert member.step() == 1
    assert member.counts.records == {"unknown_shape": 1}
    assert member.step() == 0
    letter = DeadLetter.objects.get()
    assert (letter.cause, letter.source) == ("unknown_shape", "node:ax-1")
    assert f"{DELIVERIES_MAX} times" in letter.reason
    assert "claims to be of the future" in letter.reason


@pytest.mark.django_db
def test_a_record_waits_for_its_shape_for_as_long_as_its_writer_may_take_to_tell_it(
    server: redis_server.RedisServer, member: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(redis.Redis(), "agent", "ax-1")
    with redis.Redis.from_url(own(server), driver_info=None) as client:
        client.xadd(OURS, {FIELD: writer.record(shape=b"x" * 16)})
    member.streams.look()
    [entry] = member.streams.read()
    assert member.write([entry], time.time() + TOLD_SECONDS + 30) == []
    assert member.write([entry], time.time() + SHAPE_SECONDS_MAX + 1) == [entry]
    assert member.counts.records == {"unknown_shape": 1}


def test_nothing_large_is_taken(server: redis_server.RedisServer, admin: redis.Redis) -> None:
    with redis.Redis.from_url(own(server), driver_info=None) as client, pytest.raises(redis.RedisError):
        client.xadd(OURS, {"a": b"x" * (2 << 20)})


@pytest.mark.slow
@pytest.mark.django_db
def test_records_that_wait_for_a_shape_leave_room_for_those_of_others(
    server: redis_server.RedisServer,
    member: Ingest,
    admin: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shape may be on its way for six minutes, and what waits for it lies in everybody's memory."""
    monkeypatch.setattr("telemetry.ingest.streams.BLOCK_MS", 1)
    writer = Writer(redis.Redis(), "agent", "ax-1")
    junk = {f"junk-{number}": b"x" * (900 << 10) for number in range(3)}
    with redis.Redis.from_url(own(server), driver_info=None) as client:
        for number in range(300):
            entry: dict[Any, Any] = {FIELD: writer.record(shape=b"%016d" % number), **junk}
            client.xadd(OURS, entry)
            if number % 10 == 9:
                member.streams.look()
                member.step()
    quiet = emitter(own(server, "node:ax-2"), "ax-2")
    assert quiet.emit(time.time())
    assert (admin.memory_usage(OURS, samples=0) or 0) < 100 << 20


@pytest.mark.django_db
def test_what_was_delivered_and_cut_off_takes_no_memory(
    server: redis_server.RedisServer,
    member: Ingest,
    admin: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A writer may cut its own stream off while its records wait for a shape."""
    monkeypatch.setattr("telemetry.ingest.streams.BLOCK_MS", 1)
    writer = Writer(redis.Redis(), "agent", "ax-1")
    with redis.Redis.from_url(own(server), driver_info=None) as client:
        for _ in range(10):
            for number in range(500):
                client.xadd(OURS, {FIELD: writer.record(shape=b"%016d" % number)}, maxlen=500)
            member.streams.look()
            member.step()
    member.streams.look()
    assert admin.xpending(OURS, "ingest")["pending"] <= OWN_STREAM_LENGTH_MAX
