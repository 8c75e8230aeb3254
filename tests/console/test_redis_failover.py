"""A Redis that dies or hangs, behind Sentinels: work goes on, is done once, and what was lost
is counted. Real servers, Sentinels, worker and schedule."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import pytest
import redis
from django.db import connection, transaction
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.fleet.membership.telemetry_users import keep_users
from console.fleet.models import Driver
from console.operations import services
from console.operations.core import State
from console.operations.models import Operation
from console.redis_client import connected
from console.stack import redis_users
from console.stack.binaries import find_redis
from telemetry.credentials import own_url
from telemetry.emit.emitter import Emitter
from telemetry.ingest.service import Counts, Ingest
from telemetry.management.commands.ingest import Reading
from telemetry.metrics import Catalog, Sink
from telemetry.models import Source
from telemetry.records import ENDPOINTS
from telemetry.redis_clients import client
from tests.console.operations import machines
from tests.kvss_agent.authority import Authority
from tests.live import wait_until
from tests.processes import Process, start
from tests.redis_group import RedisGroup, redis_group

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(600)]

# Ten seconds on a machine that does little else: `make bench NAME=availability` measures it.
RECOVERY_SECONDS_MAX: Final = 120.0
# Where the machine stood still for two seconds, all Sentinels do nothing for thirty.
DOWN_AFTER_MS: Final = 6000
AT_ONCE: Final = 10
TOKEN: Final = "token of job1"
CATALOG = Catalog()
COLUMNS = CATALOG.counter("test_columns_total", "Columns.", "shard")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisGroup]:
    users = (redis_users.BROKER[0], *redis_users.TELEMETRY)
    folder = tmp_path_factory.mktemp("group")
    with redis_group(folder, users, down_after_ms=DOWN_AFTER_MS) as made:
        yield made


@contextlib.contextmanager
def celery(log: Path, group: RedisGroup, *arguments: str) -> Iterator[Process]:
    name = connection.settings_dict["NAME"]
    with log.open("wb") as output:
        process = start(
            *("celery", "-A", "console.celery", *arguments),
            environment={
                **os.environ,
                "DATABASE_URL": os.environ["DATABASE_URL"].replace("/tidegate?", f"/{name}?"),
                "REDIS_URL": group.url("broker"),
                "TIDEGATE_TELEMETRY_URL": group.url("console"),
            },
            descriptors={1: output.fileno(), 2: output.fileno()},
            is_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


class Load:
    """Begins operations, each on a target of its own, from a thread: as many as are done, so that
    nothing waits for long."""

    def __init__(self) -> None:
        self.count = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(0.1):
            if Operation.objects.filter(done=False).count() < AT_ONCE:
                begin(f"session:load{self.count}")
                self.count += 1
        connection.close()


def begin(target: str) -> Operation:
    with transaction.atomic():
        return services.start(SYSTEM, "tests.steps", target, "Do it", plan={})


def is_done(operation: Operation) -> bool:
    operation.refresh_from_db()
    return bool(operation.state == State.SUCCEEDED)


@pytest.mark.django_db(transaction=True)
def test_work_goes_on_and_each_effect_happens_once(group: RedisGroup, tmp_path: Path) -> None:
    worker = ("worker", "--include", "tests.console.operations.machines", "--pool", "prefork")
    quiet = ("--concurrency", "1", "--without-gossip", "--without-mingle", "--without-heartbeat")
    group.wait_until_whole()
    with (
        celery(tmp_path / "worker", group, *worker, *quiet),
        celery(tmp_path / "beat", group, "beat", "--pidfile="),
        Load() as load,
    ):
        first = begin("session:first")
        wait_until("work is done", lambda: is_done(first), 120)

        def goes_on(what: str) -> None:
            asked = begin(f"session:{what}")
            wait_until(f"work goes on after {what}", lambda: is_done(asked), RECOVERY_SECONDS_MAX)

        killed = group.primary
        group.kill(killed)
        goes_on("kill")
        group.bring_back(killed)
        group.wait_until_whole()
        before = group.primary
        with group.stopped(before):
            goes_on("stop")
        group.wait_until_whole()
        assert group.primary is not before
        goes_on("resume")
        load.__exit__()
        ended = {State.SUCCEEDED}
        wait_until(
            "all is done", lambda: set(Operation.objects.values_list("state", flat=True)) == ended, 120
        )
    assert Operation.objects.count() == load.count + 4
    for operation in Operation.objects.all():
        assert machines.effects(operation) == ["a", "b", "c"]


class Driving:
    """A driver that counts one more with each record."""

    def __init__(self, url: str) -> None:
        self.columns = 0
        self.emitter = Emitter(url, "driver", "1", name="job1", collect=self._collect)

    def _collect(self, into: Sink) -> None:
        self.columns += 1
        into.put(COLUMNS, [({"shard": "s0"}, self.columns)])

    def emit(self) -> bool:
        return self.emitter.emit(time.time())

    def tell(self, count: int) -> int:
        """Records that Redis has then, so many or more: it may take longer to answer than is waited for
        it. Returns how many."""
        before = self.emitter.sequence
        wait_until("it has them", lambda: self.emit() and self.emitter.sequence >= before + count)
        return self.emitter.sequence - before


@pytest.mark.django_db
def test_numbers_that_a_failover_loses_are_counted_and_shown(group: RedisGroup, settings: Any) -> None:
    settings.REGISTRAR_URL = group.url("registrar")
    Driver.objects.create(
        name="job1",
        control_token=TOKEN,
        control_url="http://127.0.0.1:1",
        heartbeat_sha256=b"x" * 32,
        joined_at=timezone.now(),
    )
    group.wait_until_whole()
    keep_users()
    driving = Driving(own_url(group.url("own", ""), "driver:job1", TOKEN))
    reader = client(group.url("ingest"), answer_seconds=3.0)
    reading = Reading(Ingest(reader, "one", Counts()))

    def is_read() -> bool:
        with contextlib.suppress(redis.RedisError):
            reading.round()
        return Source.objects.filter(topic="driver:job1", sequence=driving.emitter.sequence).exists()

    driving.tell(5)
    wait_until("it is read", is_read)
    primary = group.primary
    with group.stopped(group.replica), connected(primary.url, 5) as admin:
        admin.execute_command("CLIENT", "KILL", "TYPE", "replica")  # type: ignore[no-untyped-call]
        lost = driving.tell(7)  # the primary takes them, and nobody else has them
        group.kill(primary)

    def is_taken() -> bool:
        with contextlib.suppress(redis.RedisError):
            keep_users()  # as workers do every two seconds: the new primary knows no users of drivers
        return driving.emit()

    wait_until("numbers are taken again", is_taken, RECOVERY_SECONDS_MAX)
    wait_until("and read", is_read)
    group.bring_back(primary)
    found = Source.objects.get(topic="driver:job1")
    assert found.missing == lost
    assert len(driving.emitter._backlog) == driving.emitter.dropped == 0
    driving.emitter._redis.close()
    reader.close()


def _sets(asked: redis.Redis, value: str) -> bool:
    """Whether the leader's user can write at the primary that its address leads to now."""
    try:
        return bool(asked.set(ENDPOINTS + "m", value))
    except redis.RedisError:
        return False


def test_both_servers_start_again_after_a_failover(tmp_path: Path) -> None:
    """Sentinel has Redis write redis.conf anew, with its users: they are in it once, as
    docs/production.md says, and not in a file beside it."""
    folder = tmp_path / "group"
    with redis_group(folder, redis_users.TELEMETRY, down_after_ms=DOWN_AFTER_MS) as group:
        asked = client(group.url("leader"), answer_seconds=3.0)
        before = group.primary
        group.kill(before)
        group.wait_for_new_primary(before)
        group.restart()  # the former primary as one, until Sentinels tell it whom to follow
        group.wait_until_whole()
        written = [(node.home / "redis.conf").read_text() for node in group.servers]
        assert all("# Generated by CONFIG REWRITE" in text for text in written)
        group.restart()
        group.wait_until_whole()
        wait_until("the leader writes", lambda: _sets(asked, "x"), RECOVERY_SECONDS_MAX)
        asked.close()


def test_a_failover_with_tls_everywhere(tmp_path: Path) -> None:
    """By names: the certificates are for no address, which is what Sentinels would tell otherwise."""
    if not _has_tls(find_redis().path):
        pytest.skip("this Redis is built without TLS")
    tls = Authority.make(tmp_path / "authority").issue("localhost", has_address=False)
    with redis_group(tmp_path / "group", redis_users.TELEMETRY, tls, DOWN_AFTER_MS) as group:
        asked = client(group.url("leader"), answer_seconds=3.0)
        assert _sets(asked, "1")
        before = group.primary
        group.kill(before)
        wait_until("the leader writes again", lambda: _sets(asked, "2"), RECOVERY_SECONDS_MAX)
        group.bring_back(before)
        group.wait_until_whole()
        assert group.primary is not before
        assert asked.get(ENDPOINTS + "m") == b"2"
        asked.close()


def _has_tls(server: Path) -> bool:
    """Whether it takes a certificate, of which there is none here, for what it is."""
    asked = [str(server), "--port", "0", "--tls-port", "1", "--tls-cert-file", "/nowhere"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    assert answer.returncode != 0
    return "Bad directive" not in answer.stdout + answer.stderr
