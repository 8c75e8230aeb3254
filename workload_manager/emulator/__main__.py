"""`python -m workload_manager.emulator`: an engine that computes nothing. See `--help`."""

from __future__ import annotations

import sys

from telemetry.garbage import loading
from telemetry.script import begin


def main() -> int:
    with loading():
        from workload_manager.emulator import command

    return command.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(begin(main))
