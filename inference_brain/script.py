"""The command `inference-brain` of an installed Tidegate."""

from __future__ import annotations

from telemetry.script import run


def main() -> int:
    return run("inference_brain.__main__", extra="brain")
