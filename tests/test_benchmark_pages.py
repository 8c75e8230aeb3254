"""The console that pages are measured with, small: every page is there, and none asks for each row."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import httpx
import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from benchmarks import large_console, pages
from benchmarks.pages import MORE, server_rows
from console.accounts.roles import Role
from console.environment import PROJECT
from tests.conftest import make_user
from tests.console.ctl.peers import peer
from tests.every_page import addresses
from tests.live import LiveConsole
from tests.prepared import DIRECTORY

ROWS = 60  # of each kind: whoever asks for each of them asks more often than this
QUERIES_MAX = 45


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.django_db
def test_no_page_asks_the_database_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for what in ("NODES", "ORGS", "SESSIONS", "ALERTS_OPEN"):
        monkeypatch.setattr(large_console, what, ROWS)
    things = large_console.fill(0.02)
    browser = Client()
    browser.force_login(make_user("admin", Role.PLATFORM_ADMIN))
    queries = {}
    for name, path in {**addresses(things), **MORE}.items():
        with CaptureQueriesContext(connection) as asked:
            answer = browser.get(path)
        assert answer.status_code in (200, 302, 405), (name, path, answer.status_code)
        queries[name] = len(asked)
    assert {name: count for name, count in queries.items() if count > QUERIES_MAX} == {}


# What fills it takes long, and is another test's.
OPENED = """
import sys
from pathlib import Path
from types import SimpleNamespace
import httpx
from benchmarks import pages
sys.modules["benchmarks.large_console"] = SimpleNamespace(fill=lambda share: {})
pages.addresses = lambda things: {}
with pages.large_console(Path(sys.argv[1]), quick=True) as (console, _):
    print(httpx.get(f"{console.address}/-/health/live").status_code)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_console_that_is_measured_starts_without_the_tests(tmp_path: Path) -> None:
    ours = ("TIDEGATE_", "DATABASE_URL", "REDIS_URL", "DJANGO_", DIRECTORY)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-c", OPENED, str(tmp_path)],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "200"


def test_the_console_that_is_measured_is_dropped_also_where_it_can_not_be_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL drops no database by its own address: that error would hide why it can't be filled."""
    server, console = "postgres://localhost/server", "postgres://localhost/console"
    dropped_by = []

    @contextlib.contextmanager
    def servers(_: Path) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(database_url=server, redis_url="redis://localhost")

    @contextlib.contextmanager
    def live(_: Path) -> Iterator[SimpleNamespace]:
        try:
            yield SimpleNamespace(environment={"DATABASE_URL": console})
        finally:
            dropped_by.append(os.environ["DATABASE_URL"])

    def fail(_: float) -> NoReturn:
        assert os.environ["DATABASE_URL"] == console
        raise RuntimeError("It can't be filled")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(pages, "embedded_servers", servers)
    monkeypatch.setattr(pages, "live_console", live)
    monkeypatch.setattr(large_console, "fill", fail)
    monkeypatch.setattr("django.db.connections", SimpleNamespace(close_all=lambda: None))
    with pytest.raises(RuntimeError, match="can't be filled"), pages.large_console(tmp_path, quick=True):
        pass
    assert dropped_by == [server]


@pytest.mark.parametrize("status", [302, 429, 500])
def test_a_page_that_fails_is_no_fast_one(status: int) -> None:
    console = cast("LiveConsole", SimpleNamespace(process=SimpleNamespace(pid=os.getpid())))
    with (
        peer(lambda *_: (status, {"Location": "/login/"}, b"")) as address,
        httpx.Client(base_url=address) as client,
        pytest.raises(httpx.HTTPStatusError),
    ):
        list(server_rows(console, client, {"broken": "/"}, 2))
