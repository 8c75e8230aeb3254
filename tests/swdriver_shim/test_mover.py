"""How a shard begins to move."""

from __future__ import annotations

import threading
from typing import Any, cast
from unittest.mock import Mock

import pytest

from kvss_agent.client import Lost
from swdriver_shim.data_plane.paths import TrafficCounter
from swdriver_shim.data_plane.shard import moves


def test_a_home_that_cannot_be_emptied_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_client: Any) -> None:
        raise Lost("gone")

    monkeypatch.setattr(moves, "empty", refuse)
    homes, client, pull = Mock(), Mock(), Mock()
    homes.former.emptying = threading.Lock()
    mover = moves.ShardMover(homes, cast("TrafficCounter", Mock()))
    assert not mover.move(lambda: client, pull, None)
    client.close.assert_called_once_with()
    homes.change_home.assert_not_called()
    pull.assert_not_called()
