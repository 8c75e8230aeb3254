"""`make up`, with everything, as a user has it while it is up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import psycopg
import pytest

from console.environment import PROJECT
from console.stack.commands import NOT_RUNNING
from console.stack.services import WATCHDOG_SECONDS
from tests.live import ANSWER_SECONDS_MAX
from tests.stack.whole import OURS, SERVERS, Whole, browser_of, log_in, until, whole_stack

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    """One that is up, for all tests that leave it so. Its port was in use when it started."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as name, whole_stack(Path(name)) as stack:
        with socket.create_server(("127.0.0.1", stack.port)):
            stack.up()
        yield stack


def test_the_password_that_is_shown_opens_the_console(whole: Whole) -> None:
    until(whole.is_healthy)
    page = httpx.get(whole.address + "/log-in/", timeout=ANSWER_SECONDS_MAX)
    assert page.status_code == httpx.codes.OK
    home = log_in(whole, whole.password)
    assert home.status_code == httpx.codes.OK
    assert home.url.path == "/"


def test_a_port_that_is_taken_is_passed_over(whole: Whole) -> None:
    assert f"Port {whole.port} is in use; using port" in whole.said
    assert whole.address != f"http://127.0.0.1:{whole.port}"
    until(whole.is_healthy)


def test_the_password_is_shown_once_and_written_nowhere(whole: Whole) -> None:
    assert whole.said.count(whole.password) == 1
    for path in whole.state.rglob("*"):
        if path.is_file():
            assert whole.password.encode() not in path.read_bytes(), path


def test_each_stage_tells_how_long_it_took(whole: Whole) -> None:
    timings = re.sub(r"[│\s]+", " ", whole.said[whole.said.index("started in ") :])
    for stage in ("files", "migrate", *SERVERS, *OURS):
        assert re.search(rf" {stage} [\d.]+ (µs|ms|s|min)\b", timings), stage


class Changes:
    """A person who changes one thing after the other, and knows what was answered."""

    def __init__(self, browser: httpx.Client, prefix: str) -> None:
        self.browser = browser
        self.prefix = prefix
        self.tried = 0
        self.answered: set[str] = set()

    def make_one(self) -> bool:
        """Add an org; whether that was answered with success."""
        self.tried += 1
        slug = f"{self.prefix}-{self.tried}"
        headers = {"Idempotency-Key": slug, "X-CSRFToken": self.browser.cookies["tidegate_csrf"]}
        with contextlib.suppress(httpx.TransportError):
            made = self.browser.post("/api/v1/orgs", json={"slug": slug, "name": slug}, headers=headers)
            if made.status_code == httpx.codes.CREATED:
                self.answered.add(slug)
                return True
        return False


def audited(stack: Whole) -> set[str]:
    """The names of what the trail says was made."""
    env = dict(line.split("=", 1) for line in (stack.state / "env").read_text().splitlines())
    with psycopg.connect(env["DATABASE_URL"]) as connection:
        rows = connection.execute("SELECT object_name FROM audit_auditentry WHERE action = 'org.create'")
        return {str(name) for (name,) in rows}


@pytest.mark.parametrize("name", [*SERVERS, *OURS])
def test_whatever_is_killed_comes_back_and_nothing_that_was_answered_is_lost(
    whole: Whole, name: str
) -> None:
    before = whole.pid(name)
    with browser_of(whole, whole.password) as browser:
        changes = Changes(browser, name)
        until(changes.make_one)
        os.kill(before, signal.SIGKILL)
        until(lambda: (changes.make_one(), whole.is_back(name, before))[1])
        until(changes.make_one)
    until(whole.is_healthy)
    until(lambda: f"{name:<12}│ exited: killed by SIGKILL; restarting" in whole.said)
    assert changes.answered <= audited(whole)


def test_whatever_hangs_is_noticed_and_comes_back(whole: Whole) -> None:
    """All at once, for it takes a while to be sure of it."""
    before = {name: whole.pid(name) for name in (*SERVERS, *OURS)}
    for pid in before.values():
        os.kill(pid, signal.SIGSTOP)
    for name, pid in before.items():
        until(partial(whole.is_back, name, pid))
        said = f"{name:<12}│ exited: silent for {WATCHDOG_SECONDS:g} s; restarting"
        until(lambda said=said: said in whole.said)  # type: ignore[misc]
    until(whole.is_healthy)
    assert f"Last restart of web: silent for {WATCHDOG_SECONDS:g} s" in whole.run("status").stdout


def test_a_second_one_says_where_the_first_one_is(whole: Whole) -> None:
    second = whole.run("up")
    assert second.returncode == os.EX_OK
    assert f"Tidegate is already running: {whole.address} (process " in second.stdout
    assert second.stderr == ""
    until(whole.is_healthy)


def test_the_status_is_a_table(whole: Whole) -> None:
    until(lambda: all(row.state in ("ready", "done") for row in whole.rows().values()))
    status = whole.run("status", COLUMNS="120")
    assert status.returncode == os.EX_OK
    for name in (*SERVERS, *OURS):
        assert re.search(rf"\b{name} +ready .* {whole.pid(name)} ", status.stdout), status.stdout
    assert whole.address in status.stdout
    narrow = whole.run("status", COLUMNS="40").stdout
    assert re.search(r"\bpostgres +ready +\d.* (s|min) *$", narrow, re.MULTILINE), narrow


def test_the_logs_can_be_read(whole: Whole) -> None:
    assert set(whole.run("logs").stdout.split()) >= {"postgres", "redis", "worker"}
    assert "ready to accept connections" in whole.run("logs", "postgres").stdout
    unknown = whole.run("logs", "nobody")
    assert unknown.returncode == os.EX_USAGE
    assert "There is no log of “nobody”. Services: " in unknown.stderr
    assert "no log of ?nobody?" in whole.run("logs", "nobody", PYTHONIOENCODING="latin-1").stderr


def test_other_commands_find_the_running_stack(whole: Whole) -> None:
    code = "from console.accounts.models import User; print(User.objects.get().username)"
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "-c", code],
        cwd=PROJECT,
        env=whole.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("admin"), done.stderr


def test_an_incident_needs_a_demo_that_runs(whole: Whole, own: Whole) -> None:
    for stack, sentence in (
        (own, "Start it in another terminal with `make up`"),
        (whole, "TIDEGATE_DEMO=0"),
    ):
        said = stack.run("incident")
        assert sentence in said.stdout
        assert said.returncode == NOT_RUNNING
