"""The Cluster Server of a stack: its address, what it is told, and what a killed one has left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_server.processes.folder import Folder
from cluster_server.processes.kernel import MARK, LinuxKernel, Order
from console.stack import alone, cluster
from tests.live import wait_until

SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.mark.parametrize("name", ["n" * 100, "a b", "100%", "a,b"])
def test_a_path_that_no_address_can_have_is_none(tmp_path: Path, name: str) -> None:
    assert cluster.url(Path("/short")) == "unix:///short/cluster/cluster.sock"
    assert cluster.url(Path("/") / name) == ""


def test_what_it_runs_is_not_told_the_settings_of_the_console() -> None:
    told = {
        "DATABASE_URL": "postgresql://secret",
        "TIDEGATE_SECRET_KEY": "secret",
        "TIDEGATE_STATE_DIR": "/state",
        "PATH": "/bin",
        "NOTIFY_SOCKET": "@here",
    }
    kept = {"TIDEGATE_STATE_DIR": "/state", "PATH": "/bin", "NOTIFY_SOCKET": "@here"}
    assert alone.without_settings(told) == kept


def test_instances_of_a_killed_server_are_ended_with_all_that_they_started(tmp_path: Path) -> None:
    kernel = LinuxKernel()
    folders = []
    for kind, name in (("instances", "chat-0-r1-aaaa"), ("jobs", "compile-chat")):
        path = cluster.folder(tmp_path) / kind / name
        path.mkdir(parents=True)
        started = kernel.start(Order(path, SLEEPS, dict(os.environ)))
        Folder(path).record(started.identity)
        started.release()
        folders.append(path)
    idle = cluster.folder(tmp_path) / "instances" / "chat-1-r1-bbbb"
    idle.mkdir()
    environment = {**os.environ, MARK: str(idle)}  # of an engine whose manager has ended
    with subprocess.Popen(SLEEPS, env=environment, start_new_session=True) as orphan:
        wait_until("they run", lambda: kernel.others(idle, None) == [orphan.pid], 60)
        ended = cluster.end_leftovers(tmp_path)
        assert ended == ["chat-0-r1-aaaa", "chat-1-r1-bbbb", "compile-chat"]
        orphan.wait(60)
    for path in folders:
        process = Folder(path).process()
        assert process is not None
        assert not kernel.is_running(process)
    assert cluster.end_leftovers(tmp_path) == []
