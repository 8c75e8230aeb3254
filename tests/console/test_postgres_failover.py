"""A primary of PostgreSQL that dies and a standby that takes its place: no answered write is lost, and
pages, API, numbers and leaders go on. Real servers and processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import httpx
import psycopg
import pytest
from django.conf import settings

from console.environment import PROJECT
from tests.live import SOCKET, START_SECONDS_MAX, LiveConsole, listening, wait_until
from tests.postgres_pair import PostgresPair, postgres_pair
from tests.prepared import prepared
from tests.processes import Process, start

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(900)]

NAME: Final = "failover"
WRITERS: Final = 3
PATIENCE_SECONDS: Final = 90.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresPair]:
    before = prepared()
    with postgres_pair(tmp_path_factory.mktemp("pair"), os.environ["DATABASE_URL"]) as made:
        address = made.url_of(made.primary, "postgres")
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{NAME}" TEMPLATE "{before.database}"')
            # A copied sequence counts on from numbers that were logged for the original. Until a
            # checkpoint nothing of that reaches the standby, which would give the same numbers again.
            connection.execute("CHECKPOINT")
        yield made


@pytest.fixture(scope="module")
def console(pair: PostgresPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveConsole]:
    before = prepared()
    environment = {**os.environ, "DATABASE_URL": pair.url(NAME)}
    folder = tmp_path_factory.mktemp("web")
    with listening() as listener, (folder / "web.log").open("wb") as log:

        def serve() -> Process:
            descriptors = {1: log.fileno(), 2: log.fileno(), SOCKET: listener.fileno()}
            return start(
                "console.serve", "--fd", str(SOCKET), environment=environment, descriptors=descriptors
            )

        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        made = LiveConsole(address, before.username, before.password, environment, serve, serve())
        try:
            httpx.get(f"{address}/-/health", timeout=START_SECONDS_MAX).raise_for_status()
            yield made
        finally:
            made.stop()


@dataclass
class Writing:
    """Orgs made over REST without a pause, by several at once."""

    console: LiveConsole
    token: str
    answered: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)  # statuses

    def __post_init__(self) -> None:
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(WRITERS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def go_on(self, times: int = 5) -> None:
        until = len(self.answered) + times
        wait_until("more is written", lambda: len(self.answered) >= until, PATIENCE_SECONDS)

    def _run(self, number: int) -> None:
        count = 0
        with asking(self.console, self.token) as client:
            while not self._ends.wait(0.02):
                count += 1
                slug = f"org-{number}-{count}"
                answer = client.post(
                    "/api/v1/orgs",
                    json={"slug": slug, "name": slug, "reason": "a test"},
                    headers={"Idempotency-Key": f"make-{slug}-of-the-test"},
                )
                if answer.status_code == httpx.codes.CREATED:
                    self.answered.append(slug)
                else:
                    self.refused.append(answer.status_code)


def asking(console: LiveConsole, token: str) -> httpx.Client:
    return httpx.Client(
        base_url=console.address,
        headers={"Authorization": f"Bearer {token}"},
        timeout=PATIENCE_SECONDS,
    )


@contextlib.contextmanager
def process(pair: PostgresPair, log: Path, *command: str) -> Iterator[Process]:
    """One that PostgreSQL knows by the name of its log."""
    environment = {
        **os.environ,
        "DATABASE_URL": pair.url(NAME, application_name=log.name),
        "TIDEGATE_CLUSTER_URL": f"unix://{log.parent}/nobody.sock",  # an orchestrator waits for it
    }
    with log.open("wb") as output:
        made = start(
            *command,
            environment=environment,
            descriptors={1: output.fileno(), 2: output.fileno()},
            is_session=True,
        )
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.pid, signal.SIGKILL)
        made.wait(30)


def value(pair: PostgresPair, statement: str) -> object:
    with psycopg.connect(pair.url_of(pair.primary, NAME), autocommit=True) as connection:
        row = connection.execute(statement.encode()).fetchone()
    return row[0] if row else None


def leaders(pair: PostgresPair) -> int:
    found = value(pair, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1")
    return int(str(found))


def written_again(pair: PostgresPair) -> Callable[[], bool]:
    """Whether ingest writes numbers of processes that are later than those there are now."""
    newest = "SELECT extract(epoch FROM max(seen_at)) FROM telemetry_source"
    before = value(pair, newest)
    return lambda: value(pair, newest) != before


def test_no_answered_write_is_lost_and_all_goes_on(
    pair: PostgresPair, console: LiveConsole, tmp_path: Path
) -> None:
    token = console.token()
    with (
        process(pair, tmp_path / "ingest", "console.manage", "ingest"),
        process(pair, tmp_path / "one", "console.manage", "orchestrate"),
        process(pair, tmp_path / "two", "console.manage", "orchestrate"),
        Writing(console, token) as writing,
        asking(console, token) as client,
    ):
        wait_until("one leads", lambda: leaders(pair) == 1, PATIENCE_SECONDS)
        wait_until("numbers are written", written_again(pair), PATIENCE_SECONDS)
        for _ in range(2):  # there and back
            writing.go_on()
            pair.kill()
            pair.promote()
            assert client.get("/api/v1/orgs").status_code == httpx.codes.OK
            writing.go_on()
            wait_until("one leads again", lambda: leaders(pair) == 1, PATIENCE_SECONDS)
            wait_until("numbers are written again", written_again(pair), PATIENCE_SECONDS)
            pair.follow()
        page = client.get("/")
        assert page.status_code in {httpx.codes.OK, httpx.codes.FOUND}
        writing.go_on()
    with psycopg.connect(pair.url(NAME)) as connection:
        there = {slug for [slug] in connection.execute("SELECT slug FROM orgs_org")}
    assert len(writing.answered) > 6 * WRITERS
    assert set(writing.answered) <= there
    assert set(writing.refused) <= {httpx.codes.SERVICE_UNAVAILABLE}


def documented() -> dict[str, int]:
    """Connections of one process by its kind, as docs/availability.md has them."""
    text = (PROJECT / "docs" / "availability.md").read_text().partition("## Connections")[2]
    rows = re.findall(r"^\| ([a-z]+) \| ([0-9]+) \|$", text.partition("\n## ")[0], re.MULTILINE)
    return {kind: int(count) for kind, count in rows}


def connections(pair: PostgresPair) -> Counter[str]:
    """By the kind of the process. A leader puts its election and process into its name."""
    kinds = {"tidegate orchestrator": "orchestrate", "tidegate beat": "beat"}
    found: Counter[str] = Counter()
    with psycopg.connect(pair.url_of(pair.primary, NAME)) as asking:
        for [name] in asking.execute(
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid()"
        ):
            election = name.rpartition(" ")[0]
            found[str(kinds.get(election, name))] += 1
    return found


def test_processes_have_no_more_connections_than_docs_say(pair: PostgresPair, tmp_path: Path) -> None:
    allowed, most = documented(), Counter[str]()
    celery = ("celery", "-A", "console.celery")
    alone = ("--without-gossip", "--without-mingle", "--without-heartbeat")
    with (
        process(pair, tmp_path / "ingest", "console.manage", "ingest"),
        process(pair, tmp_path / "rollup", "console.manage", "rollup"),
        process(pair, tmp_path / "orchestrate", "console.manage", "orchestrate"),
        process(pair, tmp_path / "beat", *celery, "beat", "--pidfile="),
        process(pair, tmp_path / "worker", *celery, "worker", "--concurrency", "2", *alone),
    ):
        watched = allowed.keys() - {"web"}

        def all_are_seen() -> bool:
            most.update(connections(pair) - most)
            return watched <= most.keys()

        wait_until("each has a connection", all_are_seen, 4 * PATIENCE_SECONDS)
        for _ in range(20):
            assert all_are_seen()
    assert {kind: most[kind] for kind in watched if most[kind] > allowed[kind]} == {}
    assert allowed["web"] == settings.ENVIRONMENT.database_connections_max + 1
