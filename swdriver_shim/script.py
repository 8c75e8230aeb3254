"""The command `swdriver` of an installed Tidegate."""

from __future__ import annotations

from telemetry.script import run


def main() -> int:
    return run("swdriver_shim.__main__", extra="driver")
