"""Django's command line, for the embedded stack and for production alike.

Where `make up` or `tidegate up` has left `.tidegate/env`, its values fill whatever the environment does
not say, so that `manage.py shell` beside a running stack just works.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from telemetry.garbage import loading
from telemetry.script import begin

LEAN: Final = ("ingest", "rollup")  # see `console.settings_lean`


def main(arguments: list[str]) -> int:
    """Run a command of Django, and exit. The first argument is what the command line is called."""
    from console.environment import load_embedded_defaults

    load_embedded_defaults(os.environ)
    is_lean = len(arguments) > 1 and arguments[1] in LEAN
    settings = "console.settings_lean" if is_lean else "console.settings"
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", settings)
    with loading():
        import django
        from django.core.management import execute_from_command_line

        django.setup()
    execute_from_command_line(arguments)
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(begin(lambda: main(sys.argv)))
