"""The commands besides `up`. Each prints what it did and returns an exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from console import manage
from console.environment import command, env_file
from console.stack import cluster, lock, snapshot
from console.stack.errors import StackError, sentences
from console.stack.folders import Folders
from console.stack.remembered import Remembered
from telemetry.units import duration, size

DOWN_SECONDS_MAX = 90.0
PAUSE_SECONDS = 0.05
FOLLOW_PAUSE_SECONDS = 0.25
FOLLOW_CHARACTERS_MAX = 64 * 1024
STATUS = ("service", "state", "for", "restarts", "pid", "memory")
STATUS_WIDTH = 64  # narrower terminals get the first few columns
STATUS_NARROW = 3
NOT_RUNNING = 3  # exit code, as of init scripts


def down() -> int:
    """Stop the running stack, or the processes of a killed one."""
    folders = Folders.given(os.environ)
    holder = lock.holder(folders.state)
    if holder is None:
        return _sweep(folders)
    pid = holder.get("pid")
    if not isinstance(pid, int):
        raise StackError("Tidegate is starting. Try again in a moment.", exit_code=os.EX_TEMPFAIL)
    services = ", ".join(Remembered(folders.run).facts())
    print(f"Stopping Tidegate (process {pid}): {services or 'no services yet'} …")
    began = time.monotonic()
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError as error:
        sentence = f"Process {pid} belongs to another user."
        raise StackError(sentence, exit_code=os.EX_NOPERM) from error
    while lock.holder(folders.state) is not None:
        if time.monotonic() - began > DOWN_SECONDS_MAX:
            sentence = f"Process {pid} has not stopped after {duration(DOWN_SECONDS_MAX)}."
            raise StackError(sentence)
        time.sleep(PAUSE_SECONDS)
    print(f"Stopped after {duration(time.monotonic() - began)}. The data is kept.")
    return os.EX_OK


def _sweep(folders: Folders) -> int:
    """Stop the processes of a supervisor that was killed."""
    if not folders.run.is_dir():
        print("Tidegate is not running.")
        return os.EX_OK
    try:
        with lock.held(folders.state), sentences("clean up", folders.state):
            left = [*Remembered(folders.run).stop_all(), *cluster.end_leftovers(folders.state)]
            env_file(folders.state).unlink(missing_ok=True)
            folders.status.unlink(missing_ok=True)
    except lock.HeldError as error:
        raise StackError(
            "Tidegate has just been started. Try again.", exit_code=os.EX_TEMPFAIL
        ) from error
    if left:
        print(f"The supervisor had been killed; stopped its processes: {', '.join(left)}.")
    else:
        print("Tidegate is not running.")
    return os.EX_OK


def status() -> int:
    """Print a row per service, and the console's address. The exit code says whether it is running."""
    folders = Folders.given(os.environ)
    holder = lock.holder(folders.state)
    if holder is None:
        print(f"Tidegate is not running. `{command('up')}` starts it.")
        return NOT_RUNNING
    console = Console(highlight=False)
    shown = len(STATUS) if console.width >= STATUS_WIDTH else STATUS_NARROW
    table = Table(*STATUS[:shown], box=None)
    rows = snapshot.read(folders.status)
    for row in rows:
        how_long = duration(max(0, int(time.time() - row.since)))
        memory = size(row.memory_bytes) if row.memory_bytes else ""
        pid = str(row.pid) if row.pid else ""
        cells = (row.name, row.state, how_long, str(row.restarts), pid, memory)
        table.add_row(*cells[:shown])
    console.print(table)
    for row in rows:
        if row.restarts:
            console.print(f"Last restart of {row.name}: {row.reason}", markup=False)
    console.print(f"{holder.get('address', 'starting')}, supervisor: process {holder.get('pid')}")
    return os.EX_OK


def stage(story: str) -> int:
    """Stage a story on the running demo: `incident` or `rollout`. Returns its exit code."""
    folders = Folders.given(os.environ)
    holder = lock.holder(folders.state)
    address = holder.get("address") if holder else None
    if address is None:
        start = command("up")
        print(f"Tidegate is not running. Start it in another terminal with `{start}`, then try again.")
        return NOT_RUNNING
    if "demo" not in {row.name for row in snapshot.read(folders.status)}:
        print("The demo is off. Restart Tidegate without TIDEGATE_DEMO=0.")
        return NOT_RUNNING
    sys.stdout.flush()
    manage.main(["manage.py", story, str(address)])
    return os.EX_OK


def logs(service: str | None, lines: int, *, follow: bool) -> int:
    """Print the last lines of a service's log, and with `follow` new lines as they come."""
    folder = Folders.given(os.environ).logs
    with sentences("read the logs", folder):
        names = sorted(path.stem for path in folder.glob("*.log"))
    if service is None:
        print("\n".join(names) if names else "There are no logs yet.")
        return os.EX_OK
    if service not in names:
        known = f"Services: {', '.join(names)}." if names else "There are no logs yet."
        sentence = f"There is no log of “{service}”. {known}"
        raise StackError(sentence, exit_code=os.EX_USAGE)
    path = folder / f"{service}.log"
    with sentences("read a log", path):
        for text in _last_lines_and_on(path, lines, follow=follow):
            print(text, end="", flush=True)
    return os.EX_OK


def _last_lines_and_on(path: Path, lines: int, *, follow: bool) -> Iterator[str]:
    """The last lines; with `follow`, then new lines without end, across rotations."""
    file = path.open(encoding="utf-8", errors="replace")
    try:
        yield "".join(deque(file, maxlen=max(1, lines)))
        while follow:
            added = file.read(FOLLOW_CHARACTERS_MAX)
            if added:
                yield added
            elif path.exists() and path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                file.close()
                file = path.open(encoding="utf-8", errors="replace")
            else:
                time.sleep(FOLLOW_PAUSE_SECONDS)
    finally:
        file.close()
