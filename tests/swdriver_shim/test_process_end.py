"""An engine's core ends when it is told to, and when its server is gone, and its driver is closed."""

from __future__ import annotations

import base64
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from console.environment import PROJECT
from swdriver_shim.adapters.process_end import WAKE, end_with_parent, notice_stops
from swdriver_shim.objects import object_model
from tests.kvss_agent.plane import DRIVER, SECRET
from tests.swdriver_shim.daemons import ACME, org


def said_of_the_end(how: str, method: str, state_dir: str = "") -> list[str]:
    """What a core says until it has ended, whose server is killed once it is ready."""
    command = [sys.executable, "-m", "tests.swdriver_shim.orphans", how, method, state_dir]
    with subprocess.Popen(
        command,
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as server:
        assert server.stdout
        try:
            assert server.stdout.readline() == "ready\n"
            if how != "unnoticed":
                server.kill()
            return server.stdout.read().splitlines()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # those that have not ended


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_core_whose_server_is_killed_stops_in_order(method: str) -> None:
    assert said_of_the_end("in order", method) == ["told to stop", "closed"]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_core_whose_server_was_killed_before_it_had_a_driver_stops(method: str) -> None:
    """As while it loads weights."""
    assert said_of_the_end("before", method) == ["told to stop", "closed"]


def test_a_core_whose_server_s_number_is_another_s_by_now_stops() -> None:
    assert said_of_the_end("replaced", "fork") == ["told to stop", "closed"]


def test_a_core_that_can_not_open_files_is_not_told_that_its_server_is_gone() -> None:
    assert said_of_the_end("without files", "fork") == ["told to stop", "closed"]


def test_a_core_without_standard_error_that_can_not_open_files_stops_as_well() -> None:
    assert said_of_the_end("without stderr", "fork") == ["told to stop", "closed"]


def test_a_core_with_the_driver_of_objects_stops_as_well(tmp_path: Path) -> None:
    model = object_model("llama", 1000)
    home = {"group": model.groups[0].name, "index": 0, "address": f"unix:{tmp_path}/none", "shard": "s"}
    document = {
        "generation": 1,
        "driver": DRIVER,
        "secret": base64.b64encode(SECRET).decode(),
        "model": msgspec.to_builtins(model),
        "homes": [home],
        "orgs": [org("acme", ACME)],
    }
    (tmp_path / "desired.json").write_text(json.dumps(document))
    assert said_of_the_end("objects", "spawn", str(tmp_path)) == ["told to stop", "closed"]


def test_a_core_that_stops_while_its_server_is_killed_ends_after_its_driver_is_closed() -> None:
    assert said_of_the_end("stopping", "spawn") == ["closed"]


@pytest.mark.parametrize("how", ["deaf", "stuck"])
def test_a_core_that_does_not_stop_is_ended_after_its_driver_was_closed(how: str) -> None:
    assert "closed" in said_of_the_end(how, "spawn")


def test_a_core_that_is_told_to_stop_just_before_it_waits_stops() -> None:
    assert said_of_the_end("unnoticed", "spawn") == ["told to stop", "closed"]


def test_another_thread_than_the_main_one_sees_to_no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore_DP0")
    with ThreadPoolExecutor(1) as other:
        other.submit(notice_stops).result()
    assert signal.getsignal(WAKE) is signal.SIG_DFL


def test_a_process_that_the_engine_has_not_started_is_left_alone() -> None:
    before = threading.active_count()
    end_with_parent(lambda: None)
    notice_stops()
    assert multiprocessing.parent_process() is None
    assert threading.active_count() == before
    assert signal.getsignal(WAKE) is signal.SIG_DFL
