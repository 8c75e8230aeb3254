"""`python -m kvss_agent`: one agent, until SIGTERM. See `--help`."""

from __future__ import annotations

import sys

from telemetry.script import kvss_agent

if __name__ == "__main__":
    sys.exit(kvss_agent())
