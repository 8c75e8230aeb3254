"""Becomes a program that does not outlive the process that starts it: `leash.py THAT-PID COMMAND…`.

The kernel sends SIGTERM to a process whose parent is gone, if it has asked for that. It has to be asked
by the process itself, after the fork. So this asks, and then is the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("The process that started it is gone.")  # before it could be asked
    try:
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command is the caller's
    except OSError as error:
        sys.exit(f"{sys.argv[2]} can't be started: {error.strerror}.")


if __name__ == "__main__":
    main()
