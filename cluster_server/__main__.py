"""`python -m cluster_server`: one Cluster Server, until SIGTERM. See `--help`."""

from __future__ import annotations

import sys

from telemetry.script import cluster_server

if __name__ == "__main__":
    sys.exit(cluster_server())
