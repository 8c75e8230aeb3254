"""`make up`, with everything, as a user has it."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import pwd
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
import psutil
import psycopg
import pytest

from console.demo import places
from console.environment import PROJECT
from console.stack import endpoint, redis
from console.stack.commands import NOT_RUNNING
from console.stack.embedded import running
from console.stack.privileges import Identity, launcher
from tests.prepared import database, migrated
from tests.stack.sessions import is_running
from tests.stack.whole import COMMAND, PATIENCE_SECONDS, Whole, until, whole_stack

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(300)]

OURS = ("web", "worker", "beat", "ingest", "rollup")
SERVERS = ("postgres", "redis", "telemetry")
NOBODY = pwd.getpwnam("nobody")
AS_NOBODY = tuple(
    launcher(
        identity=Identity(NOBODY.pw_uid, NOBODY.pw_gid, "dac_read_search"),
        dies_with_us=signal.SIGTERM,
    )
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a moment")


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    """One that is up, for all tests that leave it so."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as name, whole_stack(Path(name)) as stack:
        stack.up()
        yield stack


@pytest.fixture
def own() -> Iterator[Whole]:
    """One for a test that ends it."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as name, whole_stack(Path(name)) as stack:
        yield stack


@contextlib.contextmanager
def browser_of(stack: Whole, password: str) -> Iterator[httpx.Client]:
    """A browser in which the first admin has logged in, if the password is right."""
    with httpx.Client(base_url=stack.address, follow_redirects=True, timeout=10) as browser:
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', browser.get("/log-in/").text)
        assert token
        form = {"username": "admin", "password": password, "csrfmiddlewaretoken": token[1]}
        browser.post("/log-in/", data=form, headers={"Referer": stack.address + "/log-in/"})
        yield browser


def log_in(stack: Whole, password: str) -> httpx.Response:
    """What the home page answers to whoever has logged in with the password of the first start."""
    with browser_of(stack, password) as browser:
        return browser.get("/")


def test_the_password_that_is_shown_opens_the_console(whole: Whole) -> None:
    assert whole.is_healthy()
    assert httpx.get(whole.address + "/log-in/").status_code == httpx.codes.OK
    home = log_in(whole, whole.password)
    assert home.status_code == httpx.codes.OK
    assert home.url.path == "/"


def test_the_password_is_shown_once_and_written_nowhere(whole: Whole) -> None:
    assert whole.said.count(whole.password) == 1
    for path in whole.state.rglob("*"):
        if path.is_file():
            assert whole.password.encode() not in path.read_bytes(), path


def test_each_stage_tells_how_long_it_took(whole: Whole) -> None:
    timings = re.sub(r"[│\s]+", " ", whole.said[whole.said.index("started in ") :])
    for stage in ("files", "migrate", *SERVERS, *OURS):
        assert re.search(rf" {stage} [\d.]+ (µs|ms|s)\b", timings), stage


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
    assert f"{name:<9}│ exited: killed by SIGKILL; restarting" in whole.said
    assert changes.answered <= audited(whole)


def test_whatever_hangs_is_noticed_and_comes_back(whole: Whole) -> None:
    """All at once, for it takes a while to be sure of it."""
    before = {name: whole.pid(name) for name in (*SERVERS, *OURS)}
    for pid in before.values():
        os.kill(pid, signal.SIGSTOP)
    for name, pid in before.items():
        until(partial(whole.is_back, name, pid))
        assert f"{name:<9}│ exited: silent for 10 s; restarting" in whole.said
    until(whole.is_healthy)


def test_a_second_one_says_where_the_first_one_is(whole: Whole) -> None:
    second = whole.run("up")
    assert second.returncode == os.EX_OK
    assert f"Tidegate is already running: {whole.address} (process " in second.stdout
    assert second.stderr == ""
    assert whole.is_healthy()


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


def test_it_ends_with_nothing_left_and_begins_again_with_everything_kept(own: Whole) -> None:
    own.up()
    password, pids = own.password, own.pids()
    assert len(pids) >= len(SERVERS) + len(OURS)
    own.signal(signal.SIGINT)
    assert own.end() == os.EX_OK
    assert "Stopped. All processes have ended; the data is kept." in own.said
    own.assert_nothing_is_left(pids)
    own.up()
    assert "Password" not in own.said
    assert log_in(own, password).url.path == "/"
    pids = own.pids()
    down = own.run("down")
    assert (down.returncode, down.stderr) == (os.EX_OK, "")
    assert "Stopped after" in down.stdout
    assert own.end() == os.EX_OK
    own.assert_nothing_is_left(pids)
    assert own.run("down").stdout == "Tidegate is not running.\n"


def test_a_killed_supervisor_leaves_nothing_in_the_way_of_the_next(own: Whole) -> None:
    own.up()
    password, pids = own.password, own.pids()
    os.kill(own.pid("worker"), signal.SIGSTOP)  # which even the death of its parent does not wake
    own.signal(signal.SIGKILL)
    own.end()
    own.up()
    assert "Stopped processes of an earlier start:" in own.said
    assert not [pid for pid in pids if is_running(pid)]
    assert log_in(own, password).url.path == "/"
    own.signal(signal.SIGKILL)
    own.end()
    pids = own.pids()
    assert own.run("down").returncode == os.EX_OK
    own.assert_nothing_is_left(pids)


def test_a_port_that_is_taken_is_passed_over(own: Whole) -> None:
    with socket.create_server(("127.0.0.1", own.port)):
        own.up()
    assert f"Port {own.port} is in use; using port" in own.said
    assert own.address != f"http://127.0.0.1:{own.port}"
    until(own.is_healthy)


def test_a_terminal_that_is_closed_ends_it_in_order(own: Whole) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "up"],
        cwd=PROJECT,
        env={**own.environment, "TERM": "xterm-256color", "COLUMNS": "120", "NO_COLOR": "1"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,  # noqa: PLW1509 - this process has no other threads to hold locks
    )
    os.close(theirs)
    drawn = b""
    while b"Tidegate is up" not in drawn:
        drawn += os.read(ours, 65_536)
    assert "●".encode() in drawn, "a list that is drawn while things start"
    assert b"\x1b[3" not in drawn, "no colours for NO_COLOR"
    pids = own.pids()
    os.close(ours)
    assert process.wait(PATIENCE_SECONDS) == os.EX_OK
    until(lambda: not [pid for pid in pids if is_running(pid)])
    assert not list((own.state / "run").iterdir())


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have said nohup


@pytest.mark.timeout(600)  # a minute where nothing else runs
def test_the_demo_is_a_fleet_that_joins_and_serves_and_leaves_nothing_behind(own: Whole) -> None:
    own.up(TIDEGATE_DEMO="1")
    assert {"demo", *places.NODES, *places.DRIVERS} <= own.rows().keys()
    assert "TIDEGATE_DEMO=0 turns it off" in re.sub(r"[│\s]+", " ", own.said)
    with browser_of(own, own.password) as browser:

        def moved(**asked: str) -> float:
            told = {"name": "tidegate_driver_path_bytes_total", "fold": "sum", **asked}
            answer = browser.get("/api/v1/metrics/query", params=told)
            if answer.status_code != httpx.codes.OK:  # nobody has told anything of it yet
                return 0.0
            lines = answer.json()["series"]
            return sum(value or 0.0 for line in lines for value in line["values"])

        for session in ("assistants", "coding"):
            for direction in ("out", "in"):
                which = {"topic": f"session:{session}", "label": f"direction:{direction}"}
                until(lambda which=which: moved(**which) > 0, 90)  # type: ignore[misc]
            assert moved(topic=f"session:{session}", label="tier:unknown") == 0, (
                "the console tells paths"
            )
        stop_an_incident_half_way(own)
        streams = browser.get("/api/v1/sessions/assistants/streams").json()["items"]
        assert [one["path"] for one in streams] == ["rail"] * 4
        before = own.pid("ax-1")
        os.kill(before, signal.SIGKILL)
        until(lambda: own.is_back("ax-1", before))
    pids = own.pids()
    own.signal(signal.SIGINT)
    assert own.end() == os.EX_OK
    own.assert_nothing_is_left(pids)
    assert "differ from what was stored" not in own.said, "some were wrong"
    assert "Unauthorized" not in own.said, "heartbeats of those who have not joined"


def stop_an_incident_half_way(stack: Whole) -> None:
    """`make incident` at a terminal, and Ctrl-C as soon as a stream is on its way across the spine."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*stack.launch, *COMMAND, "incident"],
        cwd=PROJECT,
        env=stack.environment,
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        try:
            os.write(ours, b"\n")  # the first time that it asks whether to go on
            heard = list(itertools.takewhile(lambda line: "2/6" not in line, process.stdout))
            process.send_signal(signal.SIGINT)
            said = process.stdout.read()
        except BaseException:
            process.kill()  # or the test would wait for it for ever, however long ago its time was up
            raise
    os.close(ours)
    os.close(theirs)
    assert "All is well" in heard[0]
    assert process.returncode == os.EX_OK
    assert "The fleet is restored." in said


def test_an_incident_needs_a_demo_that_runs(whole: Whole, own: Whole) -> None:
    for stack, sentence in (
        (own, "Start it in another terminal with `make up`"),
        (whole, "TIDEGATE_DEMO=0"),
    ):
        said = stack.run("incident")
        assert sentence in said.stdout
        assert said.returncode == NOT_RUNNING


@pytest.mark.parametrize(
    ("variables", "sentence", "exit_code"),
    [
        ({"TIDEGATE_PROT": "1"}, "TIDEGATE_PROT is not a setting of Tidegate. Did you mean", 78),
        ({"TIDEGATE_PORT": "many"}, "TIDEGATE_PORT is 'many', but must be a whole number", 78),
        ({"TIDEGATE_HOST": "192.0.2.1"}, "Cannot listen on 192.0.2.1, port", 69),
        ({"REDIS_URL": "redis://127.0.0.1:1/0"}, "REDIS_URL is set, but Redis can't be reached", 69),
        ({"DATABASE_URL": "postgresql://127.0.0.1:1/x"}, "DATABASE_URL is set, but PostgreSQL", 69),
        ({"TIDEGATE_STATE_DIR": "/dev/null/state"}, "is in the way and is not a directory", 73),
        ({"TIDEGATE_STATE_DIR": "/proc/1/state"}, "Cannot make a directory: ", 71),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_said_in_a_sentence(
    own: Whole, variables: dict[str, str], sentence: str, exit_code: int
) -> None:
    tried = own.run("up", **variables)
    assert sentence in tried.stderr
    assert "Traceback" not in tried.stderr
    assert tried.returncode == exit_code
    assert not own.pids()


def test_servers_of_ones_own_are_used(own: Whole) -> None:
    directory = own.state.with_name("theirs")
    directory.mkdir()
    theirs = redis.prepare(directory)
    with database(like=migrated()) as url, running(theirs, directory / "log"):
        own.up(DATABASE_URL=url, REDIS_URL=theirs.url)
        assert own.rows().keys() == {"prepare", *OURS}
        assert "PostgreSQL" in own.said
        assert log_in(own, own.password).url.path == "/"
        own.signal(signal.SIGTERM)
        assert own.end() == os.EX_OK


def test_any_path_will_do(own: Whole) -> None:
    own.state = own.state.with_name("a b {c} %20 ü" + "n" * 60)
    own.port = endpoint.free_port()
    own.up()
    assert log_in(own, own.password).url.path == "/"


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        ("32k", "Cannot write: the disk (or the quota) that holds"),
        ("8m", "PostgreSQL can't create its data: could not "),
    ],
)
def test_a_full_disk_is_said_in_a_sentence(own: Whole, size: str, sentence: str) -> None:
    own.state.mkdir()
    mount = f"mount -t tmpfs -o size={size} none {own.state}"
    own.launch = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    if subprocess.run([*own.launch, "true"], capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk, and not in every container")
    tried = own.run("up")
    assert sentence in tried.stderr
    assert "Traceback" not in tried.stderr
    assert tried.returncode == os.EX_IOERR


@as_root
def test_who_may_not_write_there_is_told_so(own: Whole) -> None:
    own.launch = AS_NOBODY
    tried = own.run("up")
    assert f"nobody has no permission for {own.state}" in tried.stderr
    assert "Traceback" not in tried.stderr
    assert tried.returncode == os.EX_NOPERM


@as_root
def test_who_is_not_root_has_the_same(own: Whole) -> None:
    """The capability only lets it reach a checkout that may lie under /root."""
    own.state.mkdir()
    os.chown(own.state, NOBODY.pw_uid, NOBODY.pw_gid)
    own.launch = AS_NOBODY
    own.up()
    assert log_in(own, own.password).url.path == "/"
    pids = own.pids()
    assert {psutil.Process(pid).uids().effective for pid in pids} == {NOBODY.pw_uid}
    own.signal(signal.SIGINT)
    assert own.end() == os.EX_OK
    own.assert_nothing_is_left(pids)
