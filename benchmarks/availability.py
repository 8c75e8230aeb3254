"""How long work and writes stand still when a Redis or a PostgreSQL dies, and whether anything is lost.

    make bench NAME=availability

Redis: a primary, a replica and three Sentinels; half of the tries kill the primary, half stop it
(SIGSTOP). A try ends when a real worker has done what was asked for after that moment. PostgreSQL: a
primary and a synchronous standby; the primary is killed, and somebody who asks it twice a second
promotes the standby after two failures. A try ends with the first answer to a write over REST that was
begun after that moment.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import httpx
import psycopg
import redis
from kombu.exceptions import OperationalError

from benchmarks.availability_tasks import NOTES
from benchmarks.children import running
from benchmarks.harness import Row, limited, options, percentile, progress, show
from benchmarks.own_console import own_console, token
from console.stack.endpoint import free_port
from tests.postgres_pair import PostgresPair, postgres_pair
from tests.redis_group import RedisGroup, redis_group

TRIES, TRIES_QUICK = 20, 4
GOAL_SECONDS: Final = 10.0
GIVE_UP_SECONDS: Final = 600.0  # a worker starts within that on a machine that does much else
SENT_A_SECOND: Final = 50
WAITING_MAX: Final = 20  # tasks that are not done, before more are sent
WAITING_SECONDS: Final = 5.0  # after which one may be lost
WRITERS: Final = 4
NOTICE_SECONDS: Final = 0.5  # between two questions of who promotes
NOTICE_FAILURES: Final = 2
DATABASE: Final = "tidegate"


class Load:
    """Does something again and again in threads, and notes what was answered and when it was begun."""

    def __init__(self, do: Callable[[str], bool], threads: int, pause: float) -> None:
        self._do = do
        self._pause = pause
        self._names = itertools.count()
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        self.begun: dict[str, float] = {}
        self.answered: dict[str, float] = {}

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def first_answer(self, since: float) -> float | None:
        """When the first was answered of those that were begun since then."""
        at = [when for name, when in self.answered.copy().items() if self.begun[name] >= since]
        return min(at, default=None)

    def _run(self) -> None:
        while not self._ends.wait(self._pause):
            name = f"n-{next(self._names)}"
            self.begun[name] = time.monotonic()
            if self._do(name):
                self.answered[name] = time.monotonic()


def until(what: str, found: Callable[[], float | None]) -> float:
    """What it finds at last."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while (value := found()) is None:
        if time.monotonic() > deadline:
            raise SystemExit(f"Not within {GIVE_UP_SECONDS:g} s: {what}.")
        time.sleep(0.02)
    return value


# Redis


@contextlib.contextmanager
def worker(group: RedisGroup, log: Path) -> Iterator[None]:
    words = [
        *("-m", "celery", "-A", "console.celery", "worker", "--concurrency", "1"),
        *("--include", "benchmarks.availability_tasks", "--without-gossip", "--without-mingle"),
    ]
    with running(words, log, REDIS_URL=group.url("broker")):
        yield


class Done:
    """When the worker has noted each task."""

    def __init__(self) -> None:
        self._client = redis.Redis.from_url(os.environ["NOTES_URL"])
        self.at: dict[str, float] = {}
        self.count = 0

    def look(self) -> None:
        found: Any = self._client.lrange(NOTES, self.count, -1)
        self.count += len(found)
        for raw in found:
            self.at.setdefault(raw.decode(), time.monotonic())

    def close(self) -> None:
        self._client.close()


def redis_rows(tries: int, directory: Path) -> list[Row]:
    from console.broker import broker
    from console.celery import app

    took, done = list[float](), Done()
    with redis_group(directory / "group") as group, worker(group, directory / "worker.log"):
        about = broker(group.url("broker"))
        app.conf.update(broker_url=about.url, broker_transport_options={**_ours(app), **about.options})

        def send(name: str) -> bool:
            if _waiting(load.answered, done.at) >= WAITING_MAX:  # what waits is no measure of a failover
                return False
            try:
                app.send_task("benchmarks.availability_tasks.note", (name,))
            except OperationalError:
                return False
            return True

        def done_since(since: float) -> float | None:
            done.look()
            found = [at for name, at in done.at.items() if load.begun.get(name, 0.0) >= since]
            return min(found, default=None)

        with Load(send, 1, 1 / SENT_A_SECOND) as load:
            until("work is done", lambda: done_since(0.0))
            for number in range(tries):
                group.wait_until_whole()
                before, is_stop = group.primary, bool(number % 2)
                with group.stopped(before) if is_stop else contextlib.nullcontext():
                    began = time.monotonic()
                    if not is_stop:
                        group.kill(before)
                    took.append(until("work goes on", lambda: done_since(began)) - began)  # noqa: B023
                    progress(
                        f"redis {number + 1}/{tries} {'stop' if is_stop else 'kill'}: {took[-1]:.1f} s"
                    )
                    if is_stop:
                        group.kill(before)
                group.bring_back(before)
            group.wait_until_whole()
        sent = load.answered.copy()
        last = max(load.begun.values())
        until("the last is done", lambda: 0.0 if _is_quiet(done, last) else None)
    lost = [name for name in sent if name not in done.at]
    twice = done.count - len(done.at)
    done.close()
    return [
        _seconds("failover.redis.seconds", took),
        Row("failover.redis.messages_lost", len(lost), f"of {len(sent):,}"),
        Row("failover.redis.messages_twice", twice, f"of {len(sent):,}"),
    ]


def _waiting(sent: dict[str, float], done: dict[str, float]) -> int:
    """Of what was sent in the last seconds: how much is not done."""
    newest = itertools.takewhile(
        lambda item: item[1] > time.monotonic() - WAITING_SECONDS, reversed(sent.copy().items())
    )
    return sum(name not in done for name, _ in newest)


def _is_quiet(done: Done, last: float) -> bool:
    """Whether nothing was noted for some seconds."""
    done.look()
    return time.monotonic() - max([last, *done.at.values()]) > 5


def _ours(app: Any) -> dict[str, Any]:
    found: dict[str, Any] = app.conf.broker_transport_options
    return found


# PostgreSQL


@contextlib.contextmanager
def web(pair: PostgresPair, log: Path) -> Iterator[str]:
    port = free_port()
    words = ["-m", "console.serve", "--host", "127.0.0.1", "--port", port]
    with running(words, log, DATABASE_URL=pair.url(DATABASE)):
        yield f"http://127.0.0.1:{port}"


def postgres_rows(tries: int, directory: Path, bearer: str) -> list[Row]:
    took = list[float]()
    with (
        postgres_pair(directory / "pair", os.environ["DATABASE_URL"]) as pair,
        web(pair, directory / "web.log") as address,
        httpx.Client(base_url=address, timeout=GIVE_UP_SECONDS) as client,
    ):

        def write(name: str) -> bool:
            try:
                answer = client.post(
                    "/api/v1/orgs",
                    json={"slug": name, "name": name, "reason": "a benchmark"},
                    headers={
                        "Authorization": f"Bearer {bearer}",
                        "Idempotency-Key": f"write-{name}-of-the-benchmark",
                    },
                )
            except httpx.TransportError:
                return False
            return answer.status_code == httpx.codes.CREATED

        with Load(write, WRITERS, 0.02) as load:
            until("a write is answered", lambda: load.first_answer(0.0))
            for number in range(tries):
                began = time.monotonic()
                pair.kill()
                _promote_when_noticed(pair)
                took.append(
                    until("writes go on", lambda: load.first_answer(began)) - began  # noqa: B023
                )
                progress(f"postgres {number + 1}/{tries}: {took[-1]:.1f} s")
                pair.follow()
        with psycopg.connect(pair.url(DATABASE)) as connection:
            there = {slug for [slug] in connection.execute("SELECT slug FROM orgs_org")}
    lost = len(load.answered.keys() - there)
    return [
        _seconds("failover.postgres.seconds", took),
        Row("failover.lost_writes", lost, f"of {len(load.answered):,}", "none", float(not lost), 1.0),
    ]


def _promote_when_noticed(pair: PostgresPair) -> None:
    failures = 0
    while failures < NOTICE_FAILURES:
        time.sleep(NOTICE_SECONDS)
        try:
            psycopg.connect(pair.url_of(pair.primary, DATABASE), connect_timeout=2).close()
            failures = 0
        except psycopg.Error:
            failures += 1
    pair.promote()


def _seconds(name: str, took: list[float]) -> Row:
    more = {"p50": percentile(took, 0.5), "times": float(len(took))}
    return limited(name, percentile(took, 0.95), "s (p95)", GOAL_SECONDS, more)


def main() -> None:
    given = options(str(__doc__).partition("\n\n")[0])
    tries = TRIES_QUICK if given.quick else TRIES
    progress("a console of one's own")
    with own_console() as directory, tempfile.TemporaryDirectory(prefix="tidegate-ha-") as folder:
        os.environ["NOTES_URL"] = os.environ["REDIS_URL"]
        bearer = token()
        from django.db import connections

        connections.close_all()
        progress("PostgreSQL: a primary, its standby, and writes")
        rows = postgres_rows(tries, Path(folder), bearer)
        progress("Redis: a primary, its replica, Sentinels, and work")
        rows += redis_rows(tries, directory)
    show("Availability", rows, given.json)


if __name__ == "__main__":
    main()
