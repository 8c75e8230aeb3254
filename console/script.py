"""The command `tidegate` of an installed Tidegate."""

from __future__ import annotations

from telemetry.script import run


def main() -> int:
    return run("console.stack.__main__", extra="console")
