"""Those of the console, with homes for drivers."""

from __future__ import annotations

from console.settings import *  # noqa: F403
from console.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.console.control.homes"]
