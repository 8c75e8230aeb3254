"""`python -m console.background worker …`, or `beat …`: Celery's command line, with our app.

For containers: by its own one Celery loads for a second before it imports anything of ours, and as their
first process has no SIGTERM until then.
"""

from __future__ import annotations

import os
import sys

from telemetry.script import begin


def main() -> int:
    from celery.__main__ import main as celery

    sys.argv[1:1] = ("--quiet", "-A", "console.celery")
    celery()  # which exits
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(begin(main))
