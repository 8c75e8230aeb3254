"""A process says that it is ready and alive to whoever looks: a socket, a file, or nobody."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from telemetry.notify import notify


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.delenv("NOTIFY_FILE", raising=False)


def test_nobody_is_told_where_nobody_asked() -> None:
    assert not notify("READY=1")


def test_a_file_is_there_while_the_process_is_ready_and_shows_when_it_was_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "alive"
    monkeypatch.setenv("NOTIFY_FILE", str(file))
    assert notify("WATCHDOG=1")
    assert not file.exists(), "alive, but not ready"
    assert notify("READY=1")
    os.utime(file, (0, 0))
    notify("STATUS=busy")
    assert file.stat().st_mtime == 0, "only WATCHDOG says that it is alive"
    notify("WATCHDOG=1")
    assert file.stat().st_mtime > 0
    notify("STOPPING=1")
    assert not file.exists()


def test_file_and_socket_are_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "socket"))
        monkeypatch.setenv("NOTIFY_FILE", str(tmp_path / "alive"))
        assert notify("READY=1")
        assert listener.recv(64) == b"READY=1"
        assert (tmp_path / "alive").exists()


def test_a_listener_that_went_away_is_not_our_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify("READY=1")


def test_a_listener_that_does_not_read_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.notify.SEND_SECONDS_MAX", 0.01)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "socket"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        while notify("WATCHDOG=1"):
            """Until its queue is full."""
        assert listener.recv(64) == b"WATCHDOG=1"
        assert notify("WATCHDOG=1"), "who reads again is told again"
