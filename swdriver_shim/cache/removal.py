"""The progress of a removal, until nothing is left anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from swdriver_shim.cache.reasons import Reason


@dataclass(slots=True, eq=False)
class Removal:
    """What a delete, a purge or a stricter policy removes."""

    reason: Reason
    columns: int = 0
    bytes: int = 0
    files: int = 0  # in tier 2: one for each column and shard
    file_bytes: int = 0
    pending: int = 0  # slots to empty, maps to take down, work in tier 2
    after: list[Removal] = field(default_factory=list)  # earlier removals that it has to wait for
    slots: set[tuple[int, int]] = field(default_factory=set)  # slots freed earlier, to be empty as well
    confirmed: dict[str, float] = field(default_factory=dict)  # by shard: when it last emptied a slot

    @property
    def done(self) -> bool:
        return not self.pending and not self.slots and all(one.done for one in self.after)
