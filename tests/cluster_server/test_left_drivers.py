"""Who deletes what drivers have left where no manager runs any more."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from cluster_server.processes.backend import ProcessBackend, ProcessOptions
from tests.live import wait_until

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
