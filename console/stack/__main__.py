"""`python -m console.stack`: start, stop and inspect the whole stack, or run a part of it."""

from __future__ import annotations

import sys

from telemetry.script import tidegate

if __name__ == "__main__":
    sys.exit(tidegate())
