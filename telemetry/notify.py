"""Tell whoever started this process that it is ready, alive or stopping: the sd_notify protocol.

systemd, container managers and `make up` all listen to the same few datagrams, so a process says
`READY=1` in one way wherever it runs. Kubernetes only runs commands as probes, and looks at a file:
NOTIFY_FILE is there while the process is ready, and its time is when it was last alive. Without
NOTIFY_SOCKET and NOTIFY_FILE nobody asked, and nothing is sent.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

SEND_SECONDS_MAX: Final = 1.0


def notify(*assignments: str) -> bool:
    """Send assignments such as `READY=1`, `WATCHDOG=1`, `STOPPING=1` or `STATUS=…` in one datagram.

    Returns whether somebody listens. One that went away, or that does not read any more, is not an error
    of ours.
    """
    looked_at = _write(os.environ.get("NOTIFY_FILE", ""), assignments)
    return _send(os.environ.get("NOTIFY_SOCKET", ""), assignments) or looked_at


def _write(path: str, assignments: tuple[str, ...]) -> bool:
    """A process that is alive and not ready leaves no file: it would be taken for ready."""
    if not path:
        return False
    file = Path(path)
    if "READY=1" in assignments:
        file.touch()
    elif "STOPPING=1" in assignments:
        file.unlink(missing_ok=True)
    elif "WATCHDOG=1" in assignments and file.exists():
        os.utime(file)
    return True


def _send(address: str, assignments: tuple[str, ...]) -> bool:
    if not address:
        return False
    if address.startswith("@"):  # systemd's spelling of Linux's abstract socket names
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as listener:
        listener.settimeout(SEND_SECONDS_MAX)
        try:
            listener.sendto("\n".join(assignments).encode(), address)
        except (ConnectionRefusedError, FileNotFoundError, TimeoutError):
            return False
    return True
