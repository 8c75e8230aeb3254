"""Django's settings in processes that need no model of the console: ingest, roll-ups and beat.

`telemetry` imports nothing of the console (`[tool.importlinter]`), and beat knows tasks by their names.
With the console's apps such a process takes more than twice as long to start, and twice the memory.
"""

from __future__ import annotations

from console.settings import *  # noqa: F403 - Django takes all settings from one module

INSTALLED_APPS = ["telemetry"]
