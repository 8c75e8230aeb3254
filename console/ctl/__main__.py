"""`tidegatectl`: the REST API at a command line. See `--help`."""

from __future__ import annotations

import sys

from telemetry.script import tidegatectl

if __name__ == "__main__":
    sys.exit(tidegatectl())
