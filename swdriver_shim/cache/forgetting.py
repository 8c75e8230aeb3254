"""What has to go from tier 2: what expired, was deleted or purged there, once nobody is copying it.

No files, as in all of `cache`: whoever runs it removes what is said here, and tells when it is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from swdriver_shim.cache.prefix_map import Account, PrefixMap
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.removal import Removal
from swdriver_shim.cache.rounds import Rounds
from swdriver_shim.cache.slots import Slots

FORGETS_MAX: Final = 1 << 20  # beyond, what has expired is left to the agents
DELETED_MAX: Final = 1 << 15  # columns that are known to be; of the others, all of their org's


class Forget(NamedTuple):
    """Remove this column from tier 2, on all shards of its group."""

    group: int
    key: bytes
    tag: bytes
    removal: Removal | None


@dataclass(slots=True, eq=False)
class Purge:
    """Remove all that carries these tags from tier 2."""

    account: Account
    tags: Collection[bytes]
    removal: Removal
    moment: int


class Forgetting:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._forgets: Rounds[tuple[int, Forget]] = Rounds()  # by tag; once this moment is over
        self._forgetting: Counter[tuple[int, bytes]] = Counter()  # group and key of those
        self._purges: Rounds[Purge] = Rounds()
        self._closed: Counter[str] = Counter()  # orgs of which something is being purged
        self._purged: dict[Account, set[bytes]] = {}  # tags, since the start
        self._deleted: dict[Forget, Account] = {}  # likewise; the oldest first
        # What waits for its turn anyway need not be asked for again.
        self._waiting: set[Forget] = set()
        self._waiting_purges: Counter[tuple[Account, frozenset[bytes]]] = Counter()

    # Columns

    def is_forgetting(self, group: int, key: bytes) -> bool:
        return (group, key) in self._forgetting

    def forget(
        self,
        home: PrefixMap,
        keys: Iterable[bytes],
        removal: Removal | None = None,
        *,
        has_expired: bool = False,
    ) -> None:
        """What tier 2 has under these keys has to go, once nobody is copying it any more."""
        maker = home.account.makers.get(home.namespace)
        if maker is None or (removal is None and len(self._forgets) > FORGETS_MAX):
            return
        for key in keys:
            self._forget(Forget(home.group, key, maker.tag, removal))
            if removal:
                removal.waiting += 1
            if not has_expired:  # which a file says itself, wherever it lies
                self._deleted[Forget(home.group, key, maker.tag, None)] = home.account
        while len(self._deleted) > DELETED_MAX:
            deleted, account = next(iter(self._deleted.items()))
            del self._deleted[deleted]
            self._purged.setdefault(account, set()).add(deleted.tag)

    def _forget(self, forget: Forget) -> None:
        self._put(forget, self._slots.moment)
        self._forgetting[forget.group, forget.key] += 1

    def _put(self, forget: Forget, moment: int) -> None:
        self._forgets.put(forget.tag, (moment, forget), forget.group)
        if forget.removal is None:
            self._waiting.add(forget)

    def take(self, most: int) -> list[Forget]:
        """Those of one group together, of each org in turn. `forgotten` has to follow, or
        `not_forgotten`."""
        due = self._forgets.take(most, lambda one: self._slots.is_over(one[0]))
        taken = [forget for _, forget in due]
        self._waiting.difference_update(taken)
        return taken

    def forgotten(self, forgets: Iterable[Forget]) -> None:
        for forget in forgets:
            name = forget.group, forget.key
            self._forgetting[name] -= 1
            if not self._forgetting[name]:
                del self._forgetting[name]
            if forget.removal:
                forget.removal.waiting -= 1

    def not_forgotten(self, forgets: Sequence[Forget]) -> None:
        """To be tried again, after the others."""
        for forget in forgets:
            self._put(forget, 0)

    # All of an org

    def is_closed(self, account: Account) -> bool:
        """Something of it is being purged: nothing is copied there or back until then."""
        return account.org in self._closed

    def purge(self, account: Account, tags: Collection[bytes], removal: Removal) -> None:
        """All that carries these tags has to go, once nobody is copying it any more."""
        removal.waiting += 1
        self._closed[account.org] += 1
        if removal.reason is Reason.PURGED:
            self._purged.setdefault(account, set()).update(tags)
        self._put_purge(Purge(account, frozenset(tags), removal, self._slots.moment))

    def _put_purge(self, purge: Purge) -> None:
        self._purges.put(purge.account.org, purge)
        self._waiting_purges[purge.account, frozenset(purge.tags)] += 1

    def take_purge(self) -> Purge | None:
        """`purged` has to follow, or `not_purged`."""
        taken = self._purges.take(1, lambda one: self._slots.is_over(one.moment))
        for purge in taken:
            self._waiting_purges[purge.account, frozenset(purge.tags)] -= 1
            self._waiting_purges = +self._waiting_purges
            return purge
        return None

    def purged(self, purge: Purge) -> None:
        purge.removal.waiting -= 1
        self._closed[purge.account.org] -= 1
        self._closed = +self._closed

    def not_purged(self, purge: Purge) -> None:
        """To be tried again."""
        self._put_purge(purge)

    def purged_tags(self, account: Account) -> set[bytes]:
        """Of all of its purges since the start."""
        return self._purged.get(account, set())

    # Files of an earlier time

    def forget_again(self) -> dict[Account, set[bytes]]:
        """A shard has another home, which may have files of an earlier time: what was deleted since is
        removed there, too. The tags of orgs that have to be purged again.

        However often shards move while tier 2 is slow, nothing waits twice.
        """
        for deleted in self._deleted:
            if deleted not in self._waiting:
                self._forget(deleted)
        return {
            account: set(tags)
            for account, tags in self._purged.items()
            if (account, frozenset(tags)) not in self._waiting_purges
        }
