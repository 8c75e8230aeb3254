"""The broker: work goes through it as JSON, by users who reach nothing else, and nothing is pickled."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from django.conf import settings
from django.db import connection
from kombu.exceptions import ContentDisallowed, OperationalError
from kombu.serialization import loads

from console.beat import LOCK
from console.broker import broker
from console.celery import app
from console.environment import PROJECT
from console.stack import redis as redis_server
from console.stack import redis_users
from tests.embedded import running
from tests.live import wait_until

QUEUE = "tidegate:celery:celery"
OURS = ("console", "telemetry", "kvss_agent", "swdriver_shim")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis_server.RedisServer]:
    made = redis_server.prepare(tmp_path / "b", users=redis_users.BROKER, durable=False)
    with running(made, tmp_path / "redis.log"):
        yield made


@contextlib.contextmanager
def celery(
    log: Path, url: str, folder: Path, *arguments: str, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process over this test's database, and this broker."""
    name = connection.settings_dict["NAME"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "console.celery", *arguments],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(PROJECT),
                "DATABASE_URL": os.environ["DATABASE_URL"].replace("/tidegate?", f"/{name}?"),
                "REDIS_URL": url,
                "TIDEGATE_TELEMETRY_URL": settings.REDIS_URL,
                **environment,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_work_is_asked_for_and_done_by_the_user_that_is_for_it(
    server: redis_server.RedisServer, tmp_path: Path
) -> None:
    url, log = server.url_of("broker"), tmp_path / "log"
    admin = redis.Redis.from_url(server.url)
    worker = ("worker", "--pool", "solo", "--without-gossip", "--without-mingle", "--loglevel", "INFO")
    with celery(log, url, tmp_path, *worker):
        with app.connection_for_write(url=broker(url).url) as asking:
            app.send_task("console.shell.tasks.forget_what_is_over", connection=asking)
        wait_until("it is done", lambda: b"dead letters" in log.read_bytes(), 60)
        wait_until("it is acknowledged", lambda: not admin.exists("tidegate:celery:unacked"), 30)
    assert not admin.exists(QUEUE)
    refused = [
        (str(entry["object"]), str(entry["username"]))
        for entry in admin.acl_log()  # what client it is, older versions of Redis let nobody say
        if "client" not in str(entry["object"])
    ]
    assert refused == []
    admin.close()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_worker_whose_redis_is_away_says_that_it_is_alive(tmp_path: Path) -> None:
    """Whoever looks after it would end a worker that goes on by itself once Redis is back."""
    server = redis_server.prepare(tmp_path / "b", users=redis_users.BROKER, durable=False)
    alive, log = tmp_path / "alive", tmp_path / "log"
    url = server.url_of("broker")
    worker = ("worker", "--pool", "solo", "--without-gossip", "--without-mingle")
    with contextlib.ExitStack() as until_it_dies:
        until_it_dies.enter_context(running(server, tmp_path / "redis.log"))
        with celery(log, url, tmp_path, *worker, NOTIFY_FILE=str(alive)):
            wait_until("it is ready", alive.exists, 60)
            until_it_dies.close()
            wait_until("it tries to connect", lambda: b"Trying again" in log.read_bytes(), 30)
            os.utime(alive, (0, 0))
            wait_until("it is alive", lambda: alive.stat().st_mtime > 0, 30)


def test_a_worker_that_redis_refuses_does_not_say_that_it_is_alive(
    server: redis_server.RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not go on by itself, and should be seen."""
    alive = tmp_path / "alive"
    alive.touch()
    os.utime(alive, (0, 0))
    monkeypatch.setenv("NOTIFY_FILE", str(alive))
    url = re.sub(r":[^:@]+@", ":wrong@", broker(server.url_of("broker")).url)
    calls: list[None] = []
    with app.connection_for_write(url=url) as asking, pytest.raises(OperationalError):
        asking.ensure_connection(callback=lambda: calls.append(None), max_retries=1)
    assert calls
    assert alive.stat().st_mtime == 0


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_the_schedule_is_kept_in_no_file(server: redis_server.RedisServer, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    admin = redis.Redis.from_url(server.url)
    with celery(tmp_path / "log", server.url_of("broker"), folder, "beat", "--pidfile="):
        wait_until("work is asked for", lambda: admin.exists(QUEUE), 60)
        assert list(folder.iterdir()) == []
    assert list(folder.iterdir()) == []
    admin.close()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_beat_that_is_ended_in_the_middle_of_a_statement_ends(
    server: redis_server.RedisServer, tmp_path: Path
) -> None:
    """It waited for ever for the lock of its connection, which the statement has."""
    with contextlib.closing(connection.copy()) as other, connection.cursor() as cursor:
        other.cursor().execute("BEGIN; LOCK TABLE operations_operation IN ACCESS EXCLUSIVE MODE")
        with celery(tmp_path / "log", server.url_of("broker"), tmp_path, "beat", "--pidfile=") as beat:

            def waits() -> bool:
                cursor.execute(
                    "SELECT FROM pg_stat_activity WHERE application_name = %s "
                    "AND wait_event_type = 'Lock'",
                    [f"{LOCK} {beat.pid}"],
                )
                return len(cursor.fetchall()) == 1

            wait_until("it asks whether operations are to be swept", waits, 60)
            beat.terminate()
            assert beat.wait(30) == 0

        def is_free() -> bool:
            cursor.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [LOCK])
            return bool(cursor.fetchone()[0])

        # PostgreSQL notices an ended connection when the statement has waited for LOCK_MS.
        wait_until("another one may lead", is_free, 30)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("signals", [1, 2])
def test_beat_ends_while_postgres_does_not_answer(
    server: redis_server.RedisServer, tmp_path: Path, signals: int
) -> None:
    """The second signal waited for ever for the lock of the connection that the first one used."""
    with (
        connection.cursor() as cursor,
        celery(tmp_path / "log", server.url_of("broker"), tmp_path, "beat", "--pidfile=") as beat,
    ):

        def leads() -> bool:
            cursor.execute(
                "SELECT pid FROM pg_stat_activity JOIN pg_locks USING (pid) "
                "WHERE application_name = %s AND locktype = 'advisory' AND granted",
                [f"{LOCK} {beat.pid}"],
            )
            return bool(cursor.rowcount == 1)

        wait_until("it leads", leads, 60)
        [backend] = cursor.fetchone()
        os.kill(backend, signal.SIGSTOP)
        try:
            beat.terminate()
            if signals == 2:
                wait_until("it has taken the first one", lambda: not _catches(beat.pid), 30)
                beat.terminate()
            assert beat.wait(30) in (0, -signal.SIGTERM)
        finally:
            os.kill(backend, signal.SIGCONT)


def _catches(process: int) -> bool:
    """Whether it handles SIGTERM. False as well for one that has ended."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> signal.SIGTERM - 1 & 1)


def test_sentinels_are_told_to_celery_as_it_spells_them() -> None:
    about = broker("rediss+sentinel://broker:p%40@a,[::1]:1,c:2/work/3?ssl_ca_certs=/ca")
    assert about.url == (
        "sentinel://broker:p%40@a:2/3;sentinel://broker:p%40@[::1]:1/3;sentinel://broker:p%40@c:2/3"
    )
    assert about.options["master_name"] == "work"
    assert about.options["sentinel_kwargs"]["ssl"] is True
    assert about.options["sentinel_kwargs"]["ssl_ca_certs"] == "/ca"
    assert "password" not in about.options["sentinel_kwargs"]
    assert about.tls == {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/ca"}
    assert broker("redis+sentinel://a/work").tls is None
    assert broker("redis://:p@h:1/0?protocol=2").url == "redis://:p@h:1/0"


def test_work_is_json_and_nothing_else_is_opened() -> None:
    conf = app.conf
    assert (conf.task_serializer, conf.accept_content, conf.result_accept_content) == (
        "json",
        ["json"],
        ["json"],
    )
    assert not conf.worker_enable_remote_control
    for content_type in (
        "application/x-python-serialize",
        "application/x-yaml",
        "application/x-msgpack",
    ):
        with pytest.raises(ContentDisallowed):
            loads(b"x", content_type, "binary", accept=conf.accept_content)


def test_nothing_of_ours_opens_what_could_be_code() -> None:
    pattern = re.compile(r"^\s*(import|from) (pickle|shelve|marshal|dill|cloudpickle)\b", re.MULTILINE)
    found = [
        str(path)
        for folder in OURS
        for path in (PROJECT / folder).rglob("*.py")
        if pattern.search(path.read_text())
    ]
    assert found == []
