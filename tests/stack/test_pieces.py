"""The small pieces of the stack: keys, lock, endpoint, port, logs, printer, folders, settings."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from console.environment import PROJECT
from console.stack import display, elsewhere, endpoint, keys, lock
from console.stack.display import Printer, SteadyConsole
from console.stack.endpoint import address, listening_socket
from console.stack.errors import StackError, sentences
from console.stack.folders import Folders
from console.stack.logs import Logs
from console.stack.up import brain_address
from tests.live import wait_until

not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")


def test_a_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = keys.kept(path)
    assert len(key) >= 50
    assert keys.kept(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_the_lock_has_one_holder_who_can_be_asked(tmp_path: Path) -> None:
    assert lock.holder(tmp_path) is None
    with lock.held(tmp_path) as held:
        held.describe(address="http://here")
        with pytest.raises(lock.HeldError) as refused, lock.held(tmp_path):
            pass
        assert refused.value.holder["address"] == "http://here"
        holder = lock.holder(tmp_path)
        assert holder
        assert holder["pid"] == os.getpid()
    assert lock.holder(tmp_path) is None


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom console.stack import lock\n"
        "with lock.held(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=PROJECT
    )
    assert process.stdout
    process.stdout.readline()
    assert lock.holder(tmp_path)
    process.kill()
    process.wait()
    process.stdout.close()
    with lock.held(tmp_path):
        pass


@pytest.mark.parametrize(
    ("path", "is_socket"),
    [("/run/x", True), ("/run/" + "x" * 98, True), ("/run/" + "x" * 99, False), ("/a,b", False)],
)
def test_a_socket_where_its_name_can_be_used(path: str, *, is_socket: bool) -> None:
    chosen = endpoint.choose(Path(path))
    assert isinstance(chosen, endpoint.UnixEndpoint if is_socket else endpoint.TcpEndpoint)


def test_a_port_that_is_taken_is_passed_over() -> None:
    with listening_socket("127.0.0.1", 20_000) as first:
        taken = first.getsockname()[1]
        with listening_socket("127.0.0.1", taken) as second:
            assert second.getsockname()[1] > taken
            assert address("127.0.0.1", second) == f"http://127.0.0.1:{second.getsockname()[1]}"


def test_the_brains_of_two_demos_have_two_ports() -> None:
    """Both are chosen before either listens. Far from the ports that connections of others get: one of
    those would be passed over."""
    base = 10_000 + os.getpid() % 10_000
    with listening_socket("127.0.0.1", base) as first, listening_socket("127.0.0.1", base) as second:
        assert brain_address(first) != brain_address(second)


def test_make_stops_what_runs_whatever_was_installed_since(tmp_path: Path) -> None:
    """An install that fails leaves its mark away, and the stack running."""
    python = tmp_path / ".venv" / "bin" / "python"

    def down() -> str:
        command = ["make", "--no-print-directory", "-f", str(PROJECT / "Makefile"), "down"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert down() == "Tidegate is not running.\n"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    assert down() == "-m console.stack down\n"


def test_the_address_is_one_that_a_browser_can_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert address("0.0.0.0", listener) == f"http://127.0.0.1:{port}"  # noqa: S104
        assert address("[::]", listener) == f"http://[::1]:{port}"


def test_a_host_that_is_not_ours_is_refused_in_a_sentence() -> None:
    with pytest.raises(StackError, match=r"Cannot listen on 192\.0\.2\.1, port 8400: .*TIDEGATE_"):
        listening_socket("192.0.2.1", 8400)


def test_when_every_port_is_taken() -> None:
    own = f"127.{1 + os.getpid() % 250}.0.1"  # another run of this test has the same port
    with (
        listening_socket(own, 65_535),
        pytest.raises(StackError, match="Every port from 65535 to 65535"),
    ):
        listening_socket(own, 65_535)


def test_a_log_never_grows_beyond_its_bound(tmp_path: Path) -> None:
    logs = Logs(tmp_path, file_bytes_max=1_000)
    for number in range(200):
        logs.write("web", f"line {number} ü")
    logs.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["web.log", "web.log.1"]
    assert all(path.stat().st_size < 1_200 for path in tmp_path.iterdir())
    assert "line 199 ü" in (tmp_path / "web.log").read_text() + (tmp_path / "web.log.1").read_text()
    assert logs.last_lines("web")[-1] == "line 199 ü"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "web.log").symlink_to("/dev/full")
    logs = Logs(tmp_path)
    logs.write("web", "a line")
    logs.close()
    assert logs.lines_lost == 1
    assert logs.last_lines("web") == ["a line"]


def test_what_the_file_system_refuses_becomes_a_sentence(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(StackError, match="is in the way and is not a directory") as refused:
        Folders(in_the_way / "state").make()
    assert refused.value.exit_code == os.EX_CANTCREAT


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_becomes_a_sentence() -> None:
    path = Path("/dev/full")
    with (
        pytest.raises(StackError, match=r"Cannot write: .* holds /dev/full is full\.") as refused,
        sentences("write", path),
        path.open("wb", buffering=0) as file,
    ):
        file.write(b"x")
    assert refused.value.exit_code == os.EX_IOERR


@not_as_root
def test_a_missing_permission_becomes_a_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StackError, match="has no permission for") as refused:
        Folders(tmp_path / "state").make()
    assert refused.value.exit_code == os.EX_NOPERM


class Blocked:
    """A terminal on which somebody has pressed Ctrl-S."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.let_go.wait(60)
        self.written.append(text)
        return len(text)

    def flush(self) -> None:
        pass


def test_nobody_waits_for_a_terminal_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "QUEUE_MAX", 10)
    terminal = Blocked()
    prints = Printer(Console(file=terminal, width=80))  # type: ignore[arg-type]
    for number in range(50):
        prints.print(Text(f"line {number}"))
    terminal.let_go.set()
    wait_until("it is written", lambda: any("line 9" in text for text in terminal.written))
    prints.print(Text("the last line"))
    prints.close()
    shown = "".join(terminal.written)
    assert "lines are not shown here, but are in the logs" in shown
    assert shown.endswith("the last line\n")


def test_nobody_minds_a_terminal_that_is_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    file = os.fdopen(writing, "w")
    prints = Printer(SteadyConsole(file=file, width=80))
    for number in range(100):
        prints.print(Text(f"line {number}"))
    prints.close()
    with pytest.raises(BrokenPipeError):
        file.close()


def test_servers_elsewhere_that_cannot_be_reached_are_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen: so nobody else does there
        port = silent.getsockname()[1]
        with pytest.raises(StackError, match="DATABASE_URL is set, but PostgreSQL can't be reached"):
            elsewhere.check_postgres(f"postgresql://user:secret@127.0.0.1:{port}/x")
        with pytest.raises(StackError, match="REDIS_URL is set, but Redis can't be reached") as refused:
            elsewhere.check_redis(f"redis://:secret@127.0.0.1:{port}/0")
    assert "secret" not in str(refused.value)


def test_servers_elsewhere_that_can_be_reached_tell_their_version() -> None:
    assert "PostgreSQL" in elsewhere.check_postgres(os.environ["DATABASE_URL"])
    assert "Redis" in elsewhere.check_redis(os.environ["REDIS_URL"])
