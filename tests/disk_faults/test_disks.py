"""That disks fail as a test tells them to."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from tests.disk_faults.disks import CREATE, Disks
from tests.live import wait_until

# Creates files until it is told to stop, and says how many times it could.
CREATES = """
import sys, threading
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set())).start()
print("begins", flush=True)
made = 0
while not stop.is_set():
    try:
        open(sys.argv[1], "w").close()
        made += 1
    except OSError:
        pass
print(made)
"""


def test_one_fault_follows_another_without_a_call_that_is_well(disks: Disks, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    disk = disks.at(folder)
    disk.be_full()
    process = subprocess.Popen(
        [sys.executable, "-c", CREATES, str(folder / "file")],
        env={**os.environ, **disks.more["environment"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "begins\n"
    for _ in range(20_000):
        disk.fail(CREATE, errno.EIO)
    wait_until("it has gone on meanwhile", lambda: disk.met > 0)
    out, _ = process.communicate("", timeout=60)
    assert int(out) == 0
