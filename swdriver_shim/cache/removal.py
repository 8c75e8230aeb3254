"""What an org, or its policy, wants gone for good, until nothing of it is left anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from swdriver_shim.cache.reasons import Reason


@dataclass(slots=True, eq=False)
class Removal:
    """Something that is being removed for good. Done when nothing of it is left anywhere."""

    reason: Reason
    columns: int = 0
    bytes: int = 0
    files: int = 0  # in tier 2: one for each column and shard
    file_bytes: int = 0
    waiting: int = 0  # slots that are not empty yet, maps that are not taken apart, work in tier 2
    before: list[Removal] = field(default_factory=list)  # which it has to wait for
    earlier: set[tuple[int, int]] = field(default_factory=set)  # slots likewise
    confirmed: dict[str, float] = field(default_factory=dict)  # by shard: when it last emptied a slot

    @property
    def done(self) -> bool:
        return not self.waiting and not self.earlier and all(one.done for one in self.before)
