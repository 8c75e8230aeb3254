"""Deletes and purges, each with a receipt once nothing is left anywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from swdriver_shim.cache.ledger import Ledger
from swdriver_shim.cache.reasons import Removal
from swdriver_shim.decider.housekeeping import Housekeeper
from swdriver_shim.decider.shard_threads import ShardThreads
from swdriver_shim.fair_lock import FairLock
from swdriver_shim.keys import Namespace, Prompt

PURGES_MAX: Final = 4096  # purges of tags whose figures are kept


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was removed from memory and from tier 2, where each shard's part of a column is a file.
    `confirmed`: after how many seconds each shard had removed the last of it. `done` when all have."""

    columns: int
    bytes: int
    tier2_files: int
    tier2_bytes: int
    done: bool
    confirmed: Mapping[str, float]


class Removals:
    """All methods may be called from any thread."""

    def __init__(
        self,
        ledger: Ledger,
        lock: FairLock,
        shards: ShardThreads,
        housekeeper: Housekeeper,
        clock: Callable[[], float],
    ) -> None:
        """`lock` is the ledger's."""
        self._ledger = ledger
        self._lock = lock
        self._shards = shards
        self._housekeeper = housekeeper
        self._clock = clock
        self._purges: dict[bytes, Removal] = {}  # by tag

    def delete(self, prompt: Prompt, *, shared: bool = False, seconds: float = 30) -> Receipt:
        """Delete a prompt as far as no other prompt continues it; with `shared` all of it. Wait until
        every slot is empty, at most so long."""
        org, tag = prompt.org, prompt.maker.tag
        return self._finish(lambda: self._ledger.delete(prompt, shared=shared), seconds, org, tag)

    def purge(
        self,
        org: str,
        namespace: Namespace | None = None,
        *,
        tag: bytes | None = None,
        seconds: float = 30,
    ) -> Receipt:
        """Remove all columns of an org, or of one namespace; from tier 2 always all. They are not found
        from here on. Wait until nothing is left, at most so long.

        `tag`: the org's, needed for tier 2 if the org may have sent no request since the start.
        """
        return self._finish(
            lambda: self._ledger.purge(org, namespace, tag, self._clock()), seconds, org, tag
        )

    def start_purge(self, org: str, tag: bytes) -> None:
        """Remove all columns that carry this tag, which is not its org's any more. `finish_purge`
        waits."""
        with self._lock:
            self._purge_tag(org, tag)
        self._housekeeper.wake()

    def forget(self, tags: Iterable[bytes]) -> None:
        """These tags are served, perhaps again: the next purge of one starts anew. The caller has the
        lock."""
        for tag in tags:
            self._purges.pop(tag, None)

    def finish_purge(self, org: str, tag: bytes, seconds: float) -> Receipt:
        """Wait until nothing is left that carries this tag, at most so long. Called again, it returns
        the same figures."""
        return self._finish(lambda: self._purge_tag(org, tag), seconds, org, tag)

    def _purge_tag(self, org: str, tag: bytes) -> Removal:
        """Begun once, since nothing is stored under such a tag."""
        found = self._purges.get(tag)
        if found is None:
            if len(self._purges) >= PURGES_MAX:
                del self._purges[next(iter(self._purges))]
            found = self._purges[tag] = self._ledger.purge_tag(org, tag)
        return found

    def _finish(
        self, begin: Callable[[], Removal], seconds: float, org: str, tag: bytes | None
    ) -> Receipt:
        began = self._clock()
        with self._lock:
            removal = begin()
            tags = self._ledger.tags(org, tag)
        until = began + seconds
        is_done = (
            self._housekeeper.wait_for(lambda: removal.done, seconds)
            and self._shards.wait_applied(until, self._clock)  # bytes below an evict stay until then
            and self._is_nowhere_else(tags, until)
        )
        with self._lock:
            confirmed = {name: at - began for name, at in removal.confirmed.items()}
            return Receipt(
                removal.columns,
                removal.bytes,
                removal.files,
                removal.file_bytes,
                is_done,
                confirmed,
            )

    def _is_nowhere_else(self, tags: Collection[bytes], until: float) -> bool:
        """Wait until no former home of a shard can have bytes with these tags; with any, if there are
        none. What the ledger knew of is removed by now. Former homes may have more: bytes that were
        there when the shard moved, and have been overwritten at the new home since."""

        def is_nowhere_else() -> bool:
            return not any(
                shard.may_be_elsewhere(tag)
                for shard in self._shards.all
                if shard.has_former_homes
                for tag in tags or (None,)
            )

        return is_nowhere_else() or self._housekeeper.wait_for(is_nowhere_else, until - self._clock())
