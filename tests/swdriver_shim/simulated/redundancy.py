"""Where simulated agents store redundant columns. Fragments are not simulated: what all agents store
together is one more disk."""

from __future__ import annotations

from collections.abc import Sequence

from kvss_agent.tier2.backend import Outgoing
from tests.swdriver_shim.simulated.disk import Disk


class FragmentsDisk(Disk):
    """It outlives the loss of any other disk."""

    def _write(self, file: Outgoing) -> bool:
        is_stored = super()._write(file)
        self.seen["redundant columns were spilled"] += is_stored
        return is_stored

    def _read(self, name: str, parts: Sequence[memoryview]) -> int | None:
        size = super()._read(name, parts)
        self.seen["redundant columns were recalled"] += size is not None
        return size
