"""Whatever is killed or stopped, and whenever: what was counted is in PostgreSQL afterwards, once.

Redis, PostgreSQL, ingest and rollup as real processes, and emitters that never pause.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis as client_of

from console.environment import PROJECT
from console.stack import postgres, redis
from telemetry.emit.emitter import Emitter
from telemetry.histogram import Histogram
from telemetry.metrics import Catalog, Sink
from telemetry.records import STREAM
from telemetry.shapes import Shape
from telemetry.store.storage import cells_of
from tests.embedded import Server, running
from tests.live import wait_until
from tests.telemetry.ends import own_choice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CATALOG = Catalog()
COLUMNS = CATALOG.counter("test_columns_total", "Columns.", "org")
EVICT = CATALOG.histogram("test_evict_seconds", "Evicts.", "shard")
PATIENCE_SECONDS = 120.0  # four processes start at the same time, on a machine that may do much else
EMITTERS = 8
Running = contextlib.AbstractContextManager[subprocess.Popen[bytes]]


class Host:
    """Counts a little more each time it is looked at, so that no record is empty."""

    def __init__(self) -> None:
        self.columns = 0
        self.evict = Histogram()

    def collect(self, into: Sink) -> None:
        self.columns += 7
        self.evict.record(0.001, 3)
        into.put(COLUMNS, [({"org": "acme"}, self.columns)])
        into.put(EVICT, [({"shard": "s"}, self.evict)])


class Process:
    """One that can be killed and started again."""

    def __init__(self, start: Callable[[], Running]) -> None:
        self._start = start
        self._running = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        self.process = self._running.enter_context(self._start())

    def kill(self) -> None:
        for each in self._all():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait(60)
        self._running.close()

    def stop(self) -> None:
        self._running.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        each = self._all()
        for one in each:
            one.suspend()
        try:
            yield
        finally:
            for one in each:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.resume()

    def _all(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]


class World:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.postgres_server = postgres.prepare(directory / "postgres", durable=True)
        self.redis_server = redis.prepare(directory / "redis", durable=True)
        self.postgres = Process(lambda: self._server(self.postgres_server, "postgres"))
        self.redis = Process(lambda: self._server(self.redis_server, "redis"))
        servers = {
            "DATABASE_URL": self.postgres_server.url,
            "REDIS_URL": self.redis_server.url,
        }
        migrate = [sys.executable, "manage.py", "migrate", "-v", "0"]
        subprocess.run(migrate, cwd=PROJECT, env={**os.environ, **servers}, check=True)
        self.environment = {**own_choice(os.environ), **servers}
        self.ingests = [Process(lambda: self._ours("ingest")) for _ in range(2)]
        self.rollups: list[Process] = []

    def _server(
        self, server: Server, name: str
    ) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        server.stop_leftover()
        return running(server, self._directory / f"{name}.log")

    @contextlib.contextmanager
    def _ours(self, command: str) -> Iterator[subprocess.Popen[bytes]]:
        with (self._directory / f"{command}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "manage.py", command],
                cwd=PROJECT,
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        yield process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)

    def roll_up(self) -> None:
        """Two are at it, of which one works."""
        self.rollups += [Process(lambda: self._ours("rollup")) for _ in range(2)]

    def stop(self) -> None:
        for process in (*self.ingests, *self.rollups, self.redis, self.postgres):
            process.stop()

    def sums(self, *tables: str) -> dict[str, tuple[int, int]]:
        """By topic: columns and evicts."""
        found: dict[str, tuple[int, int]] = {}
        with psycopg.connect(self.postgres_server.url) as connection:
            # All of it as it was at one moment: rows go from table to table.
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            told = connection.execute("SELECT id, encoded FROM telemetry_storedshape").fetchall()
            shapes = {number: Shape.decode(encoded) for number, encoded in told}
            for table in tables:
                rows = connection.execute(
                    "SELECT name, shape, cells "  # noqa: S608 - a table of ours
                    f"FROM telemetry_{table} JOIN telemetry_topic ON id = topic"
                )
                for topic, shape, cells in rows:
                    columns, evicts = found.get(topic, (0, 0))
                    for one, cell in shapes[shape].pairs(cells_of(cells)):
                        columns += cell if one.name == COLUMNS.name else 0
                        evicts += sum(cell[2:]) if one.name == EVICT.name else 0
                    found[topic] = columns, evicts
        return found

    def missing(self) -> list[tuple[int, int]]:
        with psycopg.connect(self.postgres_server.url) as connection:
            return connection.execute(
                "SELECT sequence, missing FROM telemetry_source WHERE kind = 'agent' ORDER BY name"
            ).fetchall()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.stop()


def test_nothing_is_lost_nothing_is_doubled_and_nothing_is_left_to_read(world: World) -> None:
    world.roll_up()
    hosts = [Host() for _ in range(EMITTERS)]
    emitters = [
        Emitter(world.redis_server.url, "agent", "1", name=f"ax-{n}", collect=host.collect).start()
        for n, host in enumerate(hosts)
    ]
    wait_until("numbers arrive", lambda: "fleet" in world.sums("fresh", "10s"), PATIENCE_SECONDS)

    def count(times: int) -> None:
        """Until each has counted so many times more."""
        until = [host.evict.count + 3 * times for host in hosts]
        wait_until(
            "it is counted",
            lambda: all(host.evict.count >= n for host, n in zip(hosts, until, strict=True)),
        )

    for what in (world.redis, world.postgres, *world.ingests, world.rollups[0]):
        with what.paused():
            count(2)
            if what is world.redis:
                wait_until("all have given up waiting", lambda: all(one._retry_at for one in emitters))
        what.kill()
        count(1)
        what.start()
        before = world.sums("fresh", "10s")["fleet"]
        wait_until(
            "it goes on",
            lambda: world.sums("fresh", "10s")["fleet"] > before,  # noqa: B023
            PATIENCE_SECONDS,
        )
    for emitter in emitters:
        emitter.stop()
        emitter._thread.join()
        # Where its last words were not answered in time, they are still there.
        wait_until("it has told all", lambda: not emitter._backlog or emitter._send())  # noqa: B023
    assert [(emitter.dropped, len(emitter._backlog)) for emitter in emitters] == [(0, 0)] * EMITTERS
    expected = {f"node:ax-{n}": (host.columns, host.evict.count) for n, host in enumerate(hosts)}
    expected["org:acme"] = (sum(host.columns for host in hosts), 0)
    expected["fleet"] = (expected["org:acme"][0], sum(host.evict.count for host in hosts))

    def are_all(*tables: str) -> bool:
        found = world.sums(*tables)
        return {topic: found.get(topic) for topic in expected} == expected

    wait_until("all that was counted", lambda: are_all("fresh", "10s"), PATIENCE_SECONDS)
    assert world.missing() == [
        (emitter.sequence, 0) for emitter in sorted(emitters, key=lambda e: e.source)
    ]
    wait_until("all of it is rolled up", lambda: are_all("10s"), PATIENCE_SECONDS)
    with client_of.Redis.from_url(world.redis_server.url) as client:
        # The last of each member is acknowledged when it reads on.
        wait_until("and taken out", lambda: client.xlen(STREAM) <= len(world.ingests), PATIENCE_SECONDS)
