"""Processes that have joined get Redis users of their own, and those that are removed lose them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.utils import timezone

from console.fleet.membership import telemetry_users
from console.fleet.membership.telemetry_users import keep_users
from console.fleet.models import Brain, Driver
from console.stack import redis as redis_server
from console.stack import redis_users
from telemetry.credentials import own_url
from telemetry.emit.emitter import Emitter
from telemetry.ingest.service import Ingest
from telemetry.models import Source
from telemetry.records import ENDPOINTS, OWN_STREAM
from tests.embedded import running

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    made = redis_server.prepare(
        tmp_path_factory.mktemp("redis") / "t", users=redis_users.TELEMETRY, durable=False, strict=True
    )
    with running(made, made.home.parent / "log"):
        yield made


@pytest.fixture(autouse=True)
def _registrar(server: redis_server.RedisServer, settings: Any) -> Iterator[None]:
    """The server is as new before each test: the tests' order is random."""
    settings.REGISTRAR_URL = server.url_of("registrar")
    yield
    with redis.Redis.from_url(server.url) as admin:
        admin.flushall()
        for name in admin.acl_users():
            if name.startswith(("driver:", "brain")):
                admin.acl_deluser(name)


def driver(name: str, token: str) -> Driver:
    return Driver.objects.create(
        name=name,
        control_token=token,
        control_url="http://127.0.0.1:1",
        heartbeat_sha256=b"x" * 32,
        joined_at=timezone.now(),
    )


def brain(name: str, token: str) -> Brain:
    return Brain.objects.create(
        name=name,
        control_token=token,
        control_url="http://127.0.0.1:1",
        heartbeat_sha256=b"x" * 32,
        joined_at=timezone.now(),
    )


def second(url: str) -> str:
    """The same address with the second database."""
    return url.replace("/0?", "/1?").replace("?db=0", "?db=1")


def tells(server: redis_server.RedisServer, name: str, token: str, own: str = "") -> bool:
    url = own_url(own or server.url_of("own", ""), f"driver:{name}", token)
    emitter = Emitter(url, "driver", "1", name=name)
    try:
        return emitter.emit(time.time())
    finally:
        emitter._redis.close()


def test_users_follow_who_has_joined(server: redis_server.RedisServer) -> None:
    one, other = driver("job1", "token of job1"), driver("job2", "token of job2")
    assert not tells(server, "job1", "token of job1")
    assert keep_users() == 2
    assert keep_users() == 0
    assert tells(server, "job1", "token of job1")
    assert not tells(server, "job1", "token of job2")
    one.control_token = "token after it was made anew"
    one.save()
    other.delete()
    assert keep_users() == 3
    assert not tells(server, "job1", "token of job1")
    assert tells(server, "job1", "token after it was made anew")
    assert not tells(server, "job2", "token of job2")
    with redis.Redis.from_url(server.url) as admin:
        assert admin.keys("*") == [b"tidegate:telemetry:of:driver:job1"]
        admin.execute_command("ACL", "DELUSER", "driver:job1")
    assert keep_users() == 1  # as after a restart of Redis


@pytest.mark.parametrize(
    "change", ["off", "nopass", "+get", "-ping", "+@all", "&other", "~other", "resetkeys", "resetpass"]
)
def test_a_user_that_is_not_as_it_should_be_is_made_anew(
    change: str, server: redis_server.RedisServer
) -> None:
    """As after an older version, or by somebody's hand."""
    driver("job1", "token of job1")
    keep_users()
    with redis.Redis.from_url(server.url) as admin:
        before = set(admin.acl_list())
        admin.execute_command("ACL", "SETUSER", "driver:job1", change)
        assert set(admin.acl_list()) != before
        assert keep_users() == 1
        assert set(admin.acl_list()) == before
    assert keep_users() == 0


@pytest.mark.parametrize("is_given", [True, False])
def test_users_reach_the_database_of_the_address_that_processes_have(
    server: redis_server.RedisServer,
    settings: Any,
    is_given: bool,  # noqa: FBT001
) -> None:
    """Users are those of the whole server, so the registrar may be in another one."""
    own = second(server.url_of("own", ""))
    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "registrar", "+select|1")
    if is_given:
        settings.OWN_TELEMETRY_URL = own
    else:
        settings.REGISTRAR_URL = second(settings.REGISTRAR_URL)
    driver("job1", "token of job1")
    assert keep_users() == 1
    assert keep_users() == 0
    assert tells(server, "job1", "token of job1", own)


def test_a_user_that_another_worker_has_just_made_stays(
    server: redis_server.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process joins while one worker compares, and another worker makes its user."""
    joined = telemetry_users._wanted

    def and_then_one_joins(in_database: int) -> Iterator[tuple[str, list[str]]]:
        yield from list(joined(in_database))
        monkeypatch.setattr(telemetry_users, "_wanted", joined)
        driver("job5", "token of job5")
        assert keep_users() == 1
        assert tells(server, "job5", "token of job5")

    monkeypatch.setattr(telemetry_users, "_wanted", and_then_one_joins)
    assert keep_users() == 0
    assert tells(server, "job5", "token of job5")
    with redis.Redis.from_url(server.url) as admin:
        assert admin.xlen(f"{OWN_STREAM}driver:job5") == 2


def test_numbers_of_own_users_arrive(server: redis_server.RedisServer) -> None:
    driver("job3", "token of job3")
    keep_users()
    assert tells(server, "job3", "token of job3")
    with redis.Redis.from_url(server.url_of("ingest"), driver_info=None) as client:
        member = Ingest(client, "a")
        member.join()
        member.step()
    assert Source.objects.get(name__contains="driver").topic == "driver:job3"


def test_a_brain_has_a_second_user_that_ends_with_it(server: redis_server.RedisServer) -> None:
    """It reads where replicas are, which the first one must not do: it could write there."""
    joined = brain("brain-1", "token of brain-1")
    assert keep_users() == 2
    url = own_url(server.url_of("own", ""), "brain-reader:brain-1", "token of brain-1")
    with redis.Redis.from_url(url, driver_info=None) as client:
        assert client.mget([ENDPOINTS + "m"]) == [None]
        joined.delete()
        assert keep_users() == 4  # with what may be left of their streams
        with pytest.raises(redis.RedisError):
            client.mget([ENDPOINTS + "m"])
    with redis.Redis.from_url(server.url) as admin:
        assert not [name for name in admin.acl_users() if "brain" in name]


def test_roles_of_the_console_are_left_alone(server: redis_server.RedisServer) -> None:
    keep_users()
    with redis.Redis.from_url(server.url_of("observer"), driver_info=None) as client:
        assert client.ping()


def test_without_an_address_nothing_is_done(settings: Any) -> None:
    settings.REGISTRAR_URL = None
    driver("job4", "token")
    assert keep_users() == 0


def test_users_that_the_server_tells_back_in_other_words_are_made_once() -> None:
    """Brains may run scripts: Redis 6.2 tells that back as a category of commands."""
    brain("brain-1", "t" * 40)
    assert keep_users() == 2
    assert keep_users() == 0
