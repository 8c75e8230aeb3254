"""Who carries out what a connection cannot do by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvss_agent.data_plane.wire import Tier, TierAnswer
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.seal import Miss

TierDone = Callable[[tuple[TierAnswer | Miss, ...], tuple[int, ...]], None]


class Carrier(Protocol):
    """Who carries out requests for tier 2, or for a sibling's memory, and calls `then` once."""

    def start(
        self, shard: HostedShard, asked: Tier, slots: tuple[int | Miss, ...], then: TierDone
    ) -> None: ...
