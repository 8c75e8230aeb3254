"""The command `tidegatectl` of an installed Tidegate."""

from __future__ import annotations

from telemetry.script import run


def main() -> int:
    return run("console.ctl.__main__", extra="ctl")
