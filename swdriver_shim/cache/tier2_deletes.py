"""What has to be removed from tier 2: columns that expired or were deleted, and all files of purged
tags.

Nothing is handed out while an earlier use may still copy it there. The files are removed by the caller.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from swdriver_shim.cache.fair_queue import FairQueue
from swdriver_shim.cache.listener import Listener
from swdriver_shim.cache.prefix_map import Account, PrefixMap
from swdriver_shim.cache.reasons import Reason, Removal
from swdriver_shim.cache.slots import Slots

PENDING_MAX: Final = 1 << 20  # beyond, expired files are left to the agents
DELETED_MAX: Final = 1 << 15  # columns that are repeated one by one; beyond, all files of their org


class TierDelete(NamedTuple):
    """Remove this column from tier 2, on all shards of its group."""

    group: int
    key: bytes
    tag: bytes
    removal: Removal | None


@dataclass(slots=True, eq=False)
class TierPurge:
    """Remove all columns that carry these tags from tier 2."""

    account: Account
    tags: frozenset[bytes]
    removal: Removal
    after_use: int


class Tier2Deletes:
    def __init__(self, slots: Slots, listeners: Sequence[Listener] = ()) -> None:
        self._slots = slots
        self._listeners = listeners
        self._deletes: FairQueue[tuple[int, TierDelete]] = FairQueue()  # by tag; once this use has ended
        self._deleting: Counter[tuple[int, bytes]] = Counter()  # group and key of those
        self._purges: FairQueue[TierPurge] = FairQueue()
        self._purging: Counter[str] = Counter()  # by org
        # What a shard's next home may still have: everything that was removed since the start.
        self._purged_tags: dict[str, set[bytes]] = {}  # by org, which may have been dropped since
        self._deleted_tags: dict[str, set[bytes]] = {}  # of columns that are not known one by one
        # Their orgs, the oldest first: a `dict` would look for its first through all that are gone.
        self._deleted: OrderedDict[TierDelete, str] = OrderedDict()
        # What is queued already is not repeated.
        self._queued: set[TierDelete] = set()
        self._queued_purges: Counter[tuple[str, frozenset[bytes]]] = Counter()

    # Columns

    def is_deleting(self, group: int, key: bytes) -> bool:
        return (group, key) in self._deleting

    def delete(
        self,
        prefix_map: PrefixMap,
        keys: Iterable[bytes],
        removal: Removal | None = None,
        *,
        has_expired: bool = False,
    ) -> None:
        """Remove the columns with these keys from tier 2."""
        keys = list(keys)
        for listener in self._listeners:
            listener.deleted(prefix_map, keys)
        maker = prefix_map.account.makers.get(prefix_map.namespace)
        if maker is None or (removal is None and len(self._deletes) > PENDING_MAX):
            return
        for key in keys:
            self._delete(TierDelete(prefix_map.group, key, maker.tag, removal))
            if removal:
                removal.pending += 1
            if not has_expired:  # every file knows itself when it expires
                deleted = TierDelete(prefix_map.group, key, maker.tag, None)
                self._deleted[deleted] = prefix_map.org
        while len(self._deleted) > DELETED_MAX:
            deleted, org = self._deleted.popitem(last=False)
            self._deleted_tags.setdefault(org, set()).add(deleted.tag)

    def _delete(self, delete: TierDelete) -> None:
        self._queue(delete, self._slots.last_use)
        self._deleting[delete.group, delete.key] += 1

    def _queue(self, delete: TierDelete, after_use: int) -> None:
        self._deletes.put(delete.tag, (after_use, delete), delete.group)
        if delete.removal is None:
            self._queued.add(delete)

    def take(self, most: int) -> list[TierDelete]:
        """Columns of one group to delete, from each tag in turn."""
        due = self._deletes.take(most, lambda one: self._slots.have_ended(one[0]))
        taken = [delete for _, delete in due]
        self._queued.difference_update(taken)
        return taken

    def finish(self, deletes: Iterable[TierDelete], *, is_done: bool) -> None:
        """The columns are deleted; or, if not `is_done`, have to be tried again."""
        for delete in deletes:
            if not is_done:
                self._queue(delete, 0)
                continue
            name = delete.group, delete.key
            self._deleting[name] -= 1
            if not self._deleting[name]:
                del self._deleting[name]
            if delete.removal:
                delete.removal.pending -= 1

    # All columns of an org

    def is_purging(self, account: Account) -> bool:
        """Whether columns of the org are being purged. None is copied or recalled until then."""
        return account.org in self._purging

    def purge(self, account: Account, tags: Collection[bytes], removal: Removal) -> None:
        """Remove all columns that carry these tags from tier 2."""
        removal.pending += 1
        self._purging[account.org] += 1
        if removal.reason is Reason.PURGED:
            self._purged_tags.setdefault(account.org, set()).update(tags)
        for listener in self._listeners:
            listener.tier2_purged(tags)
        self._queue_purge(TierPurge(account, frozenset(tags), removal, self._slots.last_use))

    def _queue_purge(self, purge: TierPurge) -> None:
        self._purges.put(purge.account.org, purge)
        self._queued_purges[purge.account.org, purge.tags] += 1

    def take_purge(self) -> TierPurge | None:
        """Tags to purge, of each org in turn."""
        for purge in self._purges.take(1, lambda one: self._slots.have_ended(one.after_use)):
            self._queued_purges[purge.account.org, purge.tags] -= 1
            self._queued_purges = +self._queued_purges
            return purge
        return None

    def finish_purge(self, purge: TierPurge, *, is_done: bool) -> None:
        """All columns of the tags are removed; or, if not `is_done`, it has to be tried again."""
        if not is_done:
            self._queue_purge(purge)
            return
        purge.removal.pending -= 1
        self._purging[purge.account.org] -= 1
        self._purging = +self._purging

    def purged_tags(self, org: str) -> set[bytes]:
        """The tags of all purges of the org since the start, and of deletes that were forgotten."""
        return self._purged_tags.get(org, set()) | self._deleted_tags.get(org, set())

    def repeat(self, dated_tags: Callable[[str], Collection[bytes]]) -> dict[str, set[bytes]]:
        """Queue all deletes again, since a shard's new home may have files from an earlier stay.

        Returns the tags that the caller has to purge again. Nothing is queued twice, however often
        shards move. `dated_tags`: of an org; what is from before a purge of them has its date, and is
        not served. What was stored under them since stays.
        """
        for deleted in self._deleted:
            if deleted not in self._queued:
                self._delete(deleted)
        found = {
            org: self._to_repeat(org, dated_tags(org)) for org in self._purged_tags | self._deleted_tags
        }
        return {
            org: tags
            for org, tags in found.items()
            if tags and (org, frozenset(tags)) not in self._queued_purges
        }

    def _to_repeat(self, org: str, dated: Collection[bytes]) -> set[bytes]:
        tags = self._purged_tags.get(org, set()).difference(dated)
        return tags | self._deleted_tags.get(org, set())
