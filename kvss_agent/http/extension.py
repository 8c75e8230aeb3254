"""Where an ASGI scope has the connection of its request. Apart from the server, which loads slowly:
processes that serve nothing need this, too."""

from __future__ import annotations

from typing import Final

EXTENSION: Final = "tidegate.connection"
