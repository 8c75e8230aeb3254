from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.apps import AppConfig


class HomesConfig(AppConfig):
    name = "tests.console.control.homes"
    label = "homes"

    def ready(self) -> None:
        """It is the last one, and the only one that is asked."""
        from console.control import documents

        documents._parts["driver"] = [_home]


def _home(name: str) -> Mapping[str, Any]:
    from console.control.documents import NotYet

    homes: dict[str, Any] = json.loads(Path(os.environ["TESTS_HOMES"]).read_text())
    if name not in homes:
        raise NotYet("It has no home.")
    found: Mapping[str, Any] = homes[name]
    return found
