"""`python -m tests.stack.stand_in BEHAVIOUR…`: a process that behaves, or not, as a test wants it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import FrameType

from telemetry.notify import notify

ALIVE_SECONDS = 0.1


def main(behaviour: set[str]) -> int:
    told_to_stop = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        print("told to stop", flush=True)
        if "ignores-stop" not in behaviour:
            told_to_stop.set()

    signal.signal(signal.SIGTERM, stop)
    print(f"process {os.getpid()} of {sys.argv[1:]}", flush=True)
    if "leaves-child" in behaviour:  # which holds our output open
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    if "dies-at-once" in behaviour:
        print("no reason to live", flush=True)
        return 3
    if "step" in behaviour:
        print('{"stage": "think", "seconds": 0.01}')
        print('{"admin": {"username": "admin", "password": "never-in-a-log"}}')
        print("something plain")
        print("a word of warning", file=sys.stderr)
        return 7 if "fails" in behaviour else 0
    if "never-ready" not in behaviour:
        notify("READY=1")
    if "shouts" in behaviour:
        print("x" * 300_000, flush=True)
        print("and a last word", flush=True)
    while not told_to_stop.wait(ALIVE_SECONDS):
        notify("WATCHDOG=1")
    return 0


if __name__ == "__main__":
    sys.exit(main(set(sys.argv[1:])))
