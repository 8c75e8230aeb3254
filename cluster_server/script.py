"""The command `cluster-server` of an installed Tidegate."""

from __future__ import annotations

from telemetry.script import run


def main() -> int:
    return run("cluster_server.__main__", extra="cluster")
