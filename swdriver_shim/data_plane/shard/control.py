"""What the driver asks of a shard, wherever the shard's bytes are moved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from kvss_agent.client import Lender, Miss, Purged
from swdriver_shim.data_plane.homes import Home, SlotPull
from swdriver_shim.data_plane.paths import PathSpec, PathTraffic
from swdriver_shim.data_plane.shard.columns import RecallColumn, SpillColumn
from swdriver_shim.data_plane.slow_transfers import SlowTransfer


class ShardControl(Protocol):
    """A `Shard` in this process, or a `RemoteShard` in front of one in a worker's.

    No bytes of columns pass through here. Nothing raises because an agent or a worker is lost.
    """

    name: str
    on_change: Callable[[], None]  # called, from any thread, when `slots` may have changed

    # State that is known without asking an agent or a worker

    @property
    def slots(self) -> int | None:
        """How many slots may be used; None while the agent is lost."""

    @property
    def is_open(self) -> bool: ...

    @property
    def lost_because(self) -> str: ...

    @property
    def moves(self) -> int:
        """How many times the shard has moved to another home."""

    @property
    def memory_resets(self) -> int:
        """How many times its memory was new, and so all columns were lost."""

    @property
    def former_homes(self) -> list[str]:
        """One sentence for each home that it has left and that may still hold bytes."""

    @property
    def has_former_homes(self) -> bool:
        """Whether it has left, or is leaving, a home that may still hold bytes."""

    # Connections and moves

    def open(self) -> bool:
        """Connect if not connected. Returns whether it is connected now."""

    def close(self) -> None: ...

    def move(self, home: Home, pull: SlotPull, path: PathSpec | None, /) -> bool:
        """Continue at another home. Returns False, and changes nothing, if that can't be reached.

        The shard has to exist there with a count of `count_from`. Evicts go to the new home at once;
        refills go to wherever the bytes are while `pull` fetches them.

        A home that equals the present one is that one, whose agent has another address now: the shard
        goes on there with what is left in its memory. It does not go back to the earlier address: who
        is told False asks again, as for a move.
        """

    def count_from(self) -> int:
        """The count that a new home has to start with: above every evict until the move begins."""

    def left_to_move(self) -> int:
        """How many slots are still at the old home."""

    def set_path(self, path: PathSpec | None) -> None:
        """Count bytes on this path from now on. The home stays the same."""

    def may_be_elsewhere(self, tag: bytes | None) -> bool:
        """Whether another home may still hold bytes of this tag; of any tag for None."""

    def empty_former_homes(self, *, scrub: bool) -> None:
        """Empty the homes that can be reached. May take long, and blocks nothing else."""

    def set_agents(self, removed: Collection[str], moved: Collection[str]) -> None:
        """Treat former homes at the addresses `removed` as empty: somebody vouches that the machines are
        gone. `moved`: where agents are now that had another address when a home there was left; each
        names the agent's key."""

    # Slots and tier 2

    def clear(self, slots: Sequence[int], *, scrub: bool) -> bool:
        """Empty these slots. Returns whether that is done."""

    def exists(self, columns: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Which of these columns, by key and tag, are in tier 2."""

    def spill(
        self, columns: Sequence[SpillColumn], data_key: bytes = b"", *, redundant: bool = False
    ) -> list[bool]:
        """Copy columns to tier 2, encrypted if there is a key. Returns which are there now.

        `redundant`: as fragments on several agents, where the agent was told of any.
        """

    def recall(self, columns: Sequence[RecallColumn], data_key: bytes = b"") -> list[int | Miss]:
        """Copy columns from tier 2 into unused slots. Returns their notes, or why they are missed."""

    def borrow(
        self, columns: Sequence[RecallColumn], slots: Sequence[int], lender: Lender
    ) -> list[Miss | None]:
        """Copy columns from these slots of a lender into unused slots. For each returns None, or why it
        is missed."""

    def delete(self, columns: Sequence[tuple[bytes, bytes]]) -> bool:
        """Delete columns, by key and tag, from tier 2. Returns whether that is done."""

    def purge(self, tag: bytes) -> Purged | None:
        """Delete everything with this tag from tier 2. Returns what that was; None if not done."""

    def wait_applied(self, seconds: float) -> bool:
        """Wait until the agent has applied every evict so far. Returns whether it has."""

    # Metrics

    def traffic(self) -> Sequence[PathTraffic]:
        """Bytes moved, by path."""

    def take_slowest(self) -> Sequence[SlowTransfer]:
        """The slowest transfers since the last call."""
