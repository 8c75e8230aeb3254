"""The command `kvss-agent` of an installed Tidegate."""

from __future__ import annotations

from telemetry.script import run


def main() -> int:
    return run("kvss_agent.__main__", extra="agent")
