"""The instances of one replica, by what they are to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from console.workloads.leader.world import Instance


@dataclass(slots=True)
class Replica:
    """One replica while it is decided on. `rest`: live, not told to end, and not the heir."""

    ordinal: int
    heir: Instance | None = None
    rest: list[Instance] = field(default_factory=list)
    draining: list[Instance] = field(default_factory=list)
    owner: Instance | None = None
    is_retiring: bool = False  # its owner is about to be drained, without another one

    @property
    def live(self) -> int:
        return len(self.rest) + len(self.draining) + (self.heir is not None)

    @property
    def is_available(self) -> bool:
        return self.owner is not None and not self.is_retiring
