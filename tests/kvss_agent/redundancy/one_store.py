"""Shards of an agent that all have the same redundant store, whatever its backend is."""

from __future__ import annotations

from collections.abc import Collection

from kvss_agent.client import Credentials
from kvss_agent.redundancy.stores import RedundantStores
from kvss_agent.tier2.store import Tier2
from kvss_agent.tier2.stores import NotOpen


class OneStore(RedundantStores):
    """Without one, it is about to be opened."""

    def __init__(self, store: Tier2 | None = None) -> None:
        super().__init__(lambda driver: Credentials(driver, None))
        self.store = store

    def of(self, _: str) -> Tier2 | None:
        return self.store

    def has(self, _: str) -> bool:
        return True

    def everything(self, _: Collection[str] | None = None) -> dict[str, Tier2]:
        if self.store is None:
            raise NotOpen("Redundant columns are not known yet.")
        return {"redundant": self.store}
