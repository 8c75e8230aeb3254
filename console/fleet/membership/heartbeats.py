"""How often processes are to be heard of. Loads no models: beat needs it, too."""

from __future__ import annotations

from typing import Final

from django.conf import settings

MISSED: Final = 4 / 3  # of the time between heartbeats: then one is missing


def heartbeat_seconds() -> float:
    """How often we want to hear of everybody: several times before one counts as lost."""
    return min(10.0, lost_after() / 4)


def missed_seconds() -> float:
    """Whoever has been silent for longer has left out a heartbeat."""
    return MISSED * heartbeat_seconds()


def lost_after() -> int:
    return int(settings.LOST_AFTER_SECONDS)
