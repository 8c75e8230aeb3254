"""The slots of a group: which are free, and in which of them somebody's bytes may still lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from swdriver_shim.cache.prefix_map import PrefixMap


class Pool:
    """The slot numbers of a group. Those above the line wait until it moves up again."""

    def __init__(self, slots: int = 0) -> None:
        self.line = slots
        self.used = 0
        self._untouched = 0  # from here on nobody has ever had one
        self._free: list[int] = []
        self._above: list[int] = []
        # Whose bytes may still lie in a slot that is free, or in one that is going to be written to.
        self._left_by: dict[int, tuple[PrefixMap, ...]] = {}

    @property
    def free(self) -> int:
        return len(self._free) + max(0, self.line - self._untouched)

    def take(self) -> int | None:
        """A slot below the line, or None if there is none."""
        if self._free:
            self.used += 1
            return self._free.pop()
        if self._untouched < self.line:
            self._untouched += 1
            self.used += 1
            return self._untouched - 1
        return None

    def give_back(self, slot: int, left_by: PrefixMap | None = None) -> None:
        """Nobody uses it any more. Somebody's bytes may lie in it until it is written to again."""
        self.used -= 1
        (self._free if slot < self.line else self._above).append(slot)
        if left_by is not None:
            before = self._left_by.get(slot, ())
            self._left_by[slot] = before if left_by in before else (*before, left_by)

    @property
    def has_leftovers(self) -> bool:
        return bool(self._left_by)

    def overwritten(self, slot: int) -> None:
        """Nothing is left in it of those who had it before, on any agent."""
        self._left_by.pop(slot, None)

    def left_by(self, is_meant: Callable[[PrefixMap], bool]) -> dict[int, PrefixMap]:
        """The slots in which such bytes may still lie, free or not."""
        found = {slot: list(filter(is_meant, homes)) for slot, homes in self._left_by.items()}
        return {slot: homes[0] for slot, homes in found.items() if homes}

    def take_these(self, slots: Collection[int]) -> list[int]:
        """Those of these slots that are free; they are in use again."""
        taken = [slot for slot in (*self._free, *self._above) if slot in slots]
        self._free = [slot for slot in self._free if slot not in slots]
        self._above = [slot for slot in self._above if slot not in slots]
        self.used += len(taken)
        return taken

    @property
    def had(self) -> int:
        """All slots that anybody has ever had are below this."""
        return self._untouched

    def adopt(self, taken: Collection[int], had: int) -> None:
        """A pool that nobody has used yet goes on from another's: these are in use, of so many."""
        self.line = self._untouched = had
        self.used = len(taken)
        self._free = [slot for slot in range(had) if slot not in taken]

    def set_line(self, slots: int) -> None:
        """From now on only slots below this line are given out."""
        self.line = slots
        here = [*self._free, *self._above]
        self._free = [slot for slot in here if slot < slots]
        self._above = [slot for slot in here if slot >= slots]

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Raise RuntimeError unless these are the slots that are in use."""
        slots = [*taken, *self._free, *self._above]
        if sorted(slots) != list(range(self._untouched)):
            raise RuntimeError("each slot is in use once, or free")
        if len(slots) - len(self._free) - len(self._above) != self.used:
            raise RuntimeError("the slots in use are counted")
