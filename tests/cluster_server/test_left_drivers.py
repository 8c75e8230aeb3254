"""Who deletes what drivers have left where no manager runs any more."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from cluster_server.processes.backend import ProcessBackend, ProcessOptions
from tests.live import wait_until
from workload_manager import left_drivers

TIDY = """
import os, pathlib, sys
pathlib.Path(os.environ["MANAGER_STATE_DIR"], "asked").write_text(" ".join(sys.argv[1:]))
"""


async def test_a_manager_is_started_to_tidy_up_while_there_is_a_driver(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    backend = ProcessBackend(ProcessOptions(tmp_path, (sys.executable, "-c", TIDY)))
    (shared / "drivers" / "chat-1-0").mkdir(parents=True)
    (shared / "drivers" / "chat-1-0" / "token").write_text("t")
    await backend.start()
    try:
        await asyncio.to_thread(wait_until, "it is asked", (shared / "asked").exists)
        await asyncio.to_thread(
            wait_until, "it has said so", lambda: (shared / "asked").read_text() == "tidy"
        )
    finally:
        await backend.stop()


async def test_it_ends_with_its_server(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    backend = ProcessBackend(
        ProcessOptions(tmp_path, (sys.executable, "-c", f"{TIDY}\nimport time; time.sleep(99)"))
    )
    (shared / "drivers" / "chat-1-0").mkdir(parents=True)
    (shared / "drivers" / "chat-1-0" / "token").write_text("t")
    await backend.start()
    try:
        await asyncio.to_thread(wait_until, "it is asked", (shared / "asked").exists)
    finally:
        await backend.stop()
    assert backend._tidier
    assert backend._tidier.returncode == -signal.SIGKILL


def test_a_driver_whose_token_is_no_text_keeps_no_other_from_being_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("chat-1-0", "chat-1-1"):
        left_drivers.note_console(tmp_path / name, "http://127.0.0.1:1", None)
        (tmp_path / name / "token").write_bytes(b"\xff")
    assert left_drivers.delete_left(tmp_path) == []
    assert caplog.text.count("has left can't be deleted") == 2
