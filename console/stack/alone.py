"""`python -m console.stack.alone MODULE …`: become a process that is not told the console's settings,
such as its database and its secret key, since it runs what others name."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

OF_THE_CONSOLE: Final = ("TIDEGATE_", "DATABASE_URL", "REDIS_URL", "DJANGO_")


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """All but the state directory, where what is compiled for this machine is kept."""
    return {
        name: value
        for name, value in environment.items()
        if name == "TIDEGATE_STATE_DIR" or not name.startswith(OF_THE_CONSOLE)
    }


def main() -> None:
    command = [sys.executable, "-m", *sys.argv[1:]]
    os.execve(sys.executable, command, without_settings(os.environ))  # noqa: S606 - it is ours


if __name__ == "__main__":
    main()
