"""The command `workload-manager` of an installed Tidegate."""

from __future__ import annotations

from telemetry.script import run


def main() -> int:
    return run("workload_manager.__main__", extra="manager")
