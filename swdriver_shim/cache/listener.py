"""Following what the ledger can serve: for vLLM's KV events, and for cache maps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from swdriver_shim.cache.prefix_map import Account, Column, PrefixMap


class Listener:
    """Each method is called under the ledger's lock, and may be called for every column: it only makes a
    note. By the time the lock is free, columns have the state that the note is about."""

    def arrived(self, columns: Sequence[Column]) -> None:
        """These columns of one org can be served from now on."""

    def removed(self, columns: Sequence[Column]) -> None:
        """These columns of one map can't be served any more. A purge does not call it before it removes
        them."""

    def used(self, columns: Sequence[Column]) -> None:
        """These columns, in the order of a prompt, are used now, and may expire later."""

    def ttl_changed(self, columns: Sequence[Column]) -> None:
        """These columns of one map have another TTL of their own."""

    def policy_changed(self, account: Account) -> None:
        """All columns of the org may expire at another time, or not be served any more."""

    def purged(self, maps: Sequence[PrefixMap]) -> None:
        """Nothing in these maps, one for each group of a namespace, is served any more."""

    def copied(self, tag: bytes, key: bytes) -> None:
        """This column exists in tier 2."""

    def tier2_purged(self, tags: Collection[bytes]) -> None:
        """No column with these tags exists in tier 2, or will soon."""

    def deleted(self, prefix_map: PrefixMap, keys: Sequence[bytes]) -> None:
        """These columns are removed from tier 2."""
