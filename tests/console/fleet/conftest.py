from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from console.fleet.models import Node
from tests.console.fleet.worlds import World, make_world


@pytest.fixture
def world(db: None) -> World:
    return make_world()


@pytest.fixture
def age_heartbeats() -> Callable[[float], None]:
    """Let the last heartbeat of everybody be so long ago."""

    def age(seconds: float) -> None:
        at = timezone.now() - timedelta(seconds=seconds)
        Node.objects.filter(joined_at__isnull=False).update(last_heartbeat_at=at)

    return age
