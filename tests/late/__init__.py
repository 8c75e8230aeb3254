"""What finds tests that race: see `sitecustomize`."""

from __future__ import annotations

import os
from typing import Final

_TOLD: Final = ("PYTHONPATH", "LATE_SEND", "LATE_FILE", "LATE_WAKE")


def told() -> dict[str, str]:
    """What a process that inherits nothing has to be told to be late as well; nothing in other runs."""
    is_late = any(name in os.environ for name in _TOLD[1:])
    return {name: os.environ[name] for name in _TOLD if is_late and name in os.environ}
