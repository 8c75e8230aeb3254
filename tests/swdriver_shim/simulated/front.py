"""A directory of an agent's own disk in front of its tier 2. It outlives the agent, and may be lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvss_agent.tier2.address import Scope
from kvss_agent.tier2.backend import Failed, Fault, Removed
from kvss_agent.tier2.front.disk import COPIES, WAITING
from kvss_agent.tier2.fronted import Fronted
from kvss_agent.tier2.settings import Writes
from tests.one_thread import Turns
from tests.swdriver_shim.judge import Judge
from tests.swdriver_shim.simulated.disk import Disk

CAPS = (1 << 30, 20 * 4096, 6 * 4096)


class FrontDisk(Disk):
    """One of its two directories."""

    def __init__(self, turns: Turns, judge: Judge, what: str) -> None:
        super().__init__(turns, judge)
        self._what = what

    def _read(self, name: str, parts: Sequence[memoryview]) -> int | None:
        found = super()._read(name, parts)
        self.seen["read in front"] += found is not None
        return found

    def hand_over(self, name: str, to: FrontDisk) -> None:
        self._may_fail()
        if (found := self.contents.pop(name, None)) is None:
            raise Failed(Fault.VANISHED, "it is not there")
        to.contents[name] = found
        self.seen["what waited in front was copied behind"] += 1

    def purge(self, scope: Scope) -> Removed:
        removed = super().purge(scope)
        self.seen[f"{self._what} in front: purged"] += removed.columns
        return removed


@dataclass
class Front:
    turns: Turns
    judge: Judge
    cap: int
    writes: Writes
    disks: dict[str, FrontDisk] = field(init=False)

    def __post_init__(self) -> None:
        self.disks = {what: FrontDisk(self.turns, self.judge, what) for what in (COPIES, WAITING)}

    @property
    def held(self) -> int:
        return sum(len(file.raw) for disk in self.disks.values() for file in disk.contents.values())

    def before(self, behind: Disk) -> Fronted:
        """As an agent makes it when it starts. Its files are as old as the judge says."""
        return Fronted(
            self,  # type: ignore[arg-type]
            behind,
            self.cap,
            self.writes,
            clock=lambda: float(self.judge.moment),
        )

    def __truediv__(self, what: str) -> FrontDisk:
        """Instead of a path below it."""
        return self.disks[what]

    def lose(self) -> bool:
        """Whether something was lost that is nowhere else."""
        is_lost = bool(self.disks[WAITING].contents)
        for disk in self.disks.values():
            disk.lose()
        return is_lost


def posix(disk: FrontDisk, **_: Any) -> FrontDisk:
    """Instead of `Posix`."""
    return disk
