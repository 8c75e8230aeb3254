"""A server that starts the core of its engine as vLLM does, which says on standard output how it ends.

    python -m tests.swdriver_shim.orphans HOW METHOD STATE_DIR

HOW is what the core does when it is told to stop: it stops *in order*, is *deaf*, or is *stuck* in its
driver's end as well. *unnoticed*: it stops in order, and is told at a bad moment, with its server alive.
*stopping*: it has been told to stop before, and has got so far that vLLM handles signals no more.
*before*: it stops in order, and its server is killed before it has a driver. *replaced*: likewise, and
another process has got its server's number by then.
*without files*: it stops in order, and can't open any for a while before its server is killed.
*without stderr*: it stops in order, has no standard error, and can't open files from then on.
*objects*: it stops in order, and its driver is that of an adapter with objects, in STATE_DIR.
METHOD: *spawn* or *fork*.
"""

from __future__ import annotations

import _thread
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from swdriver_shim.adapters import process_end
from swdriver_shim.adapters.objects_config import open_objects
from swdriver_shim.adapters.process_end import end_with_parent, notice_stops

SECONDS: Final = 0.2
BEFORE: Final = ("before", "replaced")  # for these the server says when all are started


def core(how: str) -> None:
    stopped, closed = threading.Event(), threading.Event()
    stops = how in ("in order", "unnoticed", "without files", "without stderr", *BEFORE)

    def close() -> None:
        print("closed", flush=True)
        closed.set()
        if how == "stuck":
            threading.Event().wait()

    def stop(*_: object) -> None:
        print("told to stop", flush=True)
        if stops:
            stopped.set()

    signal.signal(signal.SIGTERM, stop)
    server: Any = multiprocessing.parent_process()
    while how in BEFORE and os.getppid() == server.pid:
        time.sleep(0.01)
    if how == "replaced":
        other = [sys.executable, "-c", "import signal; signal.pause()"]
        server._pid = subprocess.Popen(other, stdout=subprocess.DEVNULL).pid
    if how == "without stderr":
        sys.__stderr__ = None  # type: ignore[misc]
    process_end.ORDER_SECONDS = 60.0 if stops else SECONDS  # type: ignore[misc]
    process_end.CLOSE_SECONDS = SECONDS  # type: ignore[misc]
    end_with_parent(close)
    notice_stops()
    if how == "unnoticed":
        threading.Thread(target=signal_while_it_waits).start()
    if how == "stopping":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if how == "without files":
        look_without_files(stopped)
    if how == "without stderr":
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    if how not in BEFORE:
        print("ready", flush=True)
    (closed if how == "stopping" else stopped).wait()
    if how != "stopping":
        close()


def look_without_files(stopped: threading.Event) -> None:
    """Until it was looked twice for the server meanwhile."""
    parent: Any = multiprocessing.parent_process()
    join, looks = parent.join, threading.Semaphore(0)

    def counted(seconds: float) -> None:
        looks.release()
        join(seconds)

    parent.join = counted
    looks.acquire()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    for _ in range(2):
        while not looks.acquire(timeout=0.01) and not stopped.is_set():
            pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def core_with_objects(state_dir: str) -> None:
    """As vLLM's tiers and LMCache open them, in a core that knows nothing of that."""
    stopped = threading.Event()

    def stop(*_: object) -> None:
        print("told to stop", flush=True)
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    opened = open_objects({"state_dir": state_dir, "org": "acme"})
    print("ready", flush=True)
    stopped.wait()
    opened.close()
    print("closed", flush=True)


def signal_while_it_waits() -> None:
    """As if the signal had come before the main thread began to: its wait is not interrupted."""
    waits_in = Path(f"/proc/self/task/{threading.main_thread().native_id}/wchan")
    in_a_row = 0
    while in_a_row < 100:
        in_a_row = in_a_row + 1 if "futex" in waits_in.read_text() else 0
    _thread.interrupt_main(signal.SIGTERM)


def wait_for(its_end: int, ours: int) -> None:
    """Until the processes at the other end of this pipe are gone."""
    os.close(ours)
    os.read(its_end, 1)


def main() -> None:
    how, method, state_dir = sys.argv[1:]
    start: Any = multiprocessing.get_context(method)
    pipe = os.pipe()
    work, told = (core_with_objects, state_dir) if how == "objects" else (core, how)
    start.Process(target=work, args=(told,), name="EngineCore_DP0").start()
    if method == "fork":  # one forked later keeps the pipe that tells the core of our end, until it ends
        start.Process(target=wait_for, args=pipe, name="EngineCore_DP1").start()
    if how in BEFORE:
        print("ready", flush=True)
    if how != "unnoticed":
        signal.pause()  # until it is killed


if __name__ == "__main__":
    main()
