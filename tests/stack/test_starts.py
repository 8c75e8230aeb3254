"""`make up`, with everything: how it starts, how it ends, and what it says if it can't."""

from __future__ import annotations

import itertools
import os
import pty
import pwd
import re
import signal
import subprocess

import httpx
import psutil
import pytest

from console.demo import places
from console.environment import PROJECT
from console.stack import redis
from console.stack.privileges import Identity, launcher
from tests.embedded import running
from tests.prepared import database, migrated
from tests.stack import tutorial
from tests.stack.sessions import is_running
from tests.stack.whole import (
    COMMAND,
    OURS,
    PATIENCE_SECONDS,
    SERVERS,
    Whole,
    browser_of,
    ended,
    log_in,
    new_token,
    until,
)

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(300)]

ROLLOUTS_SECONDS_MAX = 900.0  # one and a half minutes where nothing else runs
NOBODY = pwd.getpwnam("nobody")
AS_NOBODY = tuple(
    launcher(
        identity=Identity(NOBODY.pw_uid, NOBODY.pw_gid, "dac_read_search"),
        dies_with_us=signal.SIGTERM,
    )
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a moment")


def test_it_ends_with_nothing_left_and_begins_again_with_everything_kept(again: Whole) -> None:
    before = ended()
    assert before.processes >= len(SERVERS) + len(OURS)
    assert before.exit_code == os.EX_OK
    assert "Stopped. All processes have ended; the data is kept." in before.said
    again.up()
    assert "Password" not in again.said
    assert log_in(again, before.password).url.path == "/"
    pids = again.pids()
    down = again.run("down")
    assert (down.returncode, down.stderr) == (os.EX_OK, "")
    assert "Stopped after" in down.stdout
    assert again.end() == os.EX_OK
    again.assert_nothing_is_left(pids)
    assert again.run("down").stdout == "Tidegate is not running.\n"


def test_a_killed_supervisor_leaves_nothing_in_the_way_of_the_next(again: Whole) -> None:
    again.up()
    pids = again.pids()
    os.kill(again.pid("worker"), signal.SIGSTOP)  # which even the death of its parent does not wake
    again.signal(signal.SIGKILL)
    again.end()
    again.up()
    assert "Stopped processes of an earlier start:" in again.said
    assert not [pid for pid in pids if is_running(pid)]
    assert log_in(again, again.password).url.path == "/"
    again.signal(signal.SIGKILL)
    again.end()
    pids = again.pids()
    assert again.run("down").returncode == os.EX_OK
    again.assert_nothing_is_left(pids)


def test_any_path_will_do_and_a_terminal_that_is_closed_ends_it_in_order(own: Whole) -> None:
    own.state = own.state.with_name("a b {c} %20 ü" + "n" * 60)
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
    while b"Tidegate is up" not in drawn or "╰".encode() not in drawn:
        drawn += os.read(ours, 65_536)
    own.said_file.write_bytes(re.sub(rb"\x1b\[[\d;?]*[a-zA-Z]", b"", drawn))
    assert "●".encode() in drawn, "a list that is drawn while things start"
    assert b"\x1b[3" not in drawn, "no colours for NO_COLOR"
    assert log_in(own, own.password).url.path == "/"
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


@pytest.mark.timeout(1800)  # four minutes where nothing else runs
def test_the_demo_is_a_fleet_that_joins_and_serves_and_leaves_nothing_behind(again: Whole) -> None:
    again.up(TIDEGATE_DEMO="1")
    assert {"demo", *places.NODES, places.BRAIN} <= again.rows().keys()
    assert "TIDEGATE_DEMO=0 turns it off" in re.sub(r"[│\s]+", " ", again.said)
    with browser_of(again, again.password) as browser:

        def moved(**asked: str) -> float:
            told = {"name": "tidegate_driver_path_bytes_total", "fold": "sum", **asked}
            answer = browser.get("/api/v1/metrics/query", params=told)
            if answer.status_code != httpx.codes.OK:  # nobody has told anything of it yet
                return 0.0
            lines = answer.json()["series"]
            return sum(value or 0.0 for line in lines for value in line["values"])

        for session in ("chat", "code"):
            for direction in ("out", "in"):
                which = {"topic": f"session:{session}", "label": f"direction:{direction}"}
                until(lambda which=which: moved(**which) > 0, 90)  # type: ignore[misc]
            assert moved(topic=f"session:{session}", label="tier:unknown") == 0, (
                "the console tells paths"
            )
        stop_half_way(again, "incident", "2/6", "The fleet is restored.")
        streams = browser.get("/api/v1/sessions/chat/streams").json()["items"]
        assert [one["path"] for one in streams] == ["rail"] * 8
        stop_half_way(again, "rollout", "2/5", "The workload is restored.")
        stage_rollouts(again)
        spec = browser.get("/api/v1/workloads/chat").json()["spec"]
        assert "arguments" not in spec["engine"], "as it was before"
        tutorial.follow(again, new_token(browser))
        before = again.pid("ax-1")
        os.kill(before, signal.SIGKILL)
        until(lambda: again.is_back("ax-1", before))
    pids = again.pids()
    again.signal(signal.SIGINT)
    assert again.end() == os.EX_OK
    again.assert_nothing_is_left(pids)
    assert "differ from what was stored" not in again.said, "some were wrong"
    assert "Unauthorized" not in again.said, "heartbeats of those who have not joined"


def stop_half_way(stack: Whole, story: str, step: str, restored: str) -> None:
    """`make incident` or `make rollout` at a terminal, and Ctrl-C as soon as a step has begun."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*stack.launch, *COMMAND, story],
        cwd=PROJECT,
        env=stack.environment,
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        try:
            os.write(ours, b"\n")  # the first time that it asks whether to go on
            heard = list(itertools.takewhile(lambda line: step not in line, process.stdout))
            process.send_signal(signal.SIGINT)
            said = process.stdout.read()
        except BaseException:
            process.kill()  # or the test would wait for it for ever, however long ago its time was up
            raise
    os.close(ours)
    os.close(theirs)
    assert "All is well" in heard[0]
    assert process.returncode == os.EX_OK
    assert restored in said


def stage_rollouts(stack: Whole) -> None:
    """`make rollout`, to its end: nobody waits for Enter."""
    with subprocess.Popen(
        [*stack.launch, *COMMAND, "rollout"],
        cwd=PROJECT,
        env=stack.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said = process.communicate(timeout=ROLLOUTS_SECONDS_MAX)[0]
        except BaseException:
            process.kill()
            raise
    assert process.returncode == os.EX_OK, said
    assert "3/5  Rolled out in " in said
    assert "was restarted 5 times." in said
    assert "equals the last good one" in said
    assert "The workload is restored." in said


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
