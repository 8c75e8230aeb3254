"""A Cluster Server of the backend `kubernetes`, as a process."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from console.environment import PROJECT

if TYPE_CHECKING:
    from tests.kubernetes.bed import Bed

READY_SECONDS: Final = 60.0
MANAGER: Final = (sys.executable, "-m", "workload_manager")
RUNNER: Final = (sys.executable, "-m", "cluster_server.pod")


@contextlib.contextmanager
def server(
    bed: Bed, namespace: str, folder: Path, *options: str, command: Sequence[str] = MANAGER
) -> Iterator[subprocess.Popen[bytes]]:
    """A Cluster Server, from when it serves until it is killed."""
    ready = folder / "notify"
    ready.unlink(missing_ok=True)
    program = [*(sys.executable, "-m", "cluster_server", "--backend", "kubernetes"), *options]
    program += ["--kubeconfig", str(bed.kubeconfig()), "--namespace", namespace]
    program += ["--command", shlex.join(command), "--runner", shlex.join(RUNNER)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(ready))
        listener.settimeout(READY_SECONDS)
        environment = {**os.environ, "NOTIFY_SOCKET": str(ready)}
        process = subprocess.Popen(program, cwd=PROJECT, env=environment)
        try:
            while b"READY=1" not in listener.recv(1000):
                pass
            listener.close()  # it says that it is alive, until nobody reads it
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
