"""What is done beside requests: to go on with the replacement of a root."""

from __future__ import annotations

from console.authority import services
from console.periodic import periodic


@periodic
def advance() -> None:
    services.advance()
