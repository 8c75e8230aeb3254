"""`python -m cluster_server.pod KIND --folder F … -- COMMAND`: see `runner`."""

from __future__ import annotations

import sys

from telemetry.script import run

if __name__ == "__main__":
    sys.exit(run("cluster_server.pod.command", "cluster"))
