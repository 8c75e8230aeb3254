"""Tell whoever started this process that it is ready, alive or stopping: the sd_notify protocol.

systemd, container managers and `make up` all listen to the same few datagrams, so a process says
`READY=1` in one way wherever it runs. Without NOTIFY_SOCKET nobody asked, and nothing is sent.
"""

from __future__ import annotations

import os
import socket


def notify(*assignments: str) -> bool:
    """Send assignments such as `READY=1`, `WATCHDOG=1`, `STOPPING=1` or `STATUS=…` in one datagram.

    Returns whether somebody listens. A listener that went away is not an error of ours.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # systemd's spelling of Linux's abstract socket names
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as listener:
        try:
            listener.sendto("\n".join(assignments).encode(), address)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True
