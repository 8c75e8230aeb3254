#!/usr/bin/env python
"""Django's command line, for the embedded stack and for production alike.

Where `make up` has left `.tidegate/env`, its values fill whatever the environment does not say,
so that `manage.py shell` beside a running stack just works.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    from console.environment import load_embedded_defaults

    load_embedded_defaults(os.environ)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
