"""Files that outlive agents. They fail, vanish, and are seen half written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvss_agent.tier2.address import Scope, parse
from kvss_agent.tier2.backend import (
    Failed,
    Fault,
    Found,
    Incoming,
    Outgoing,
    Progress,
    Removed,
    Seen,
    ignore_progress,
)
from kvss_agent.tier2.index import Caps
from tests.one_thread import Turns
from tests.swdriver_shim.judge import Judge

T = TypeVar("T")


@dataclass(eq=False)
class File:
    raw: bytearray
    published: int  # at this moment of the judge's; of a copy, its original


def _answer(call: Callable[..., T], *arguments: Any) -> T | Failed:
    try:
        return call(*arguments)
    except Failed as failed:
        return failed


class Disk:
    """Files that outlive agents; what `Backend` says."""

    kind = "simulated"
    looks_together = False

    def __init__(self, turns: Turns, judge: Judge) -> None:
        self._turns = turns
        self._judge = judge
        self.contents: dict[str, File] = {}
        self.is_full = False
        self.is_away = False  # nobody reaches it
        self.faults = 0  # so many of the next calls fail
        self.slow = turns.chance.choice((0.0, 0.1, 0.5))  # how often
        self._purged: Counter[str] = Counter()

    @property
    def seen(self) -> Counter[str]:
        return self._judge.seen

    def lose(self) -> None:
        """All files are gone, and nobody is told."""
        self.contents.clear()

    def open(self) -> None:
        self._be_reached()

    def properties(self) -> Mapping[str, bool | int]:
        return {"direct_io": False}

    def own_faults(self) -> Mapping[str, int]:
        return {}

    def set_caps(self, caps: Caps) -> None:
        pass

    def tidy(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _may_fail(self) -> None:
        if self._turns.chance.random() < self.slow:
            self._turns.wait(None, self._turns.chance.choice((0.01, 0.1, 1.0)))
        self._turns.maybe_leave()
        self._be_reached()
        if self.faults:
            self.faults -= 1
            fault = self._turns.chance.choice((Fault.IO_ERROR, Fault.NO_SPACE, Fault.UNREACHABLE))
            self._judge.seen["a disk failed"] += 1
            raise Failed(fault, "as chance has it")

    def _be_reached(self) -> None:
        if self.is_away:
            self._turns.wait(None, 0.1)
            self._judge.seen["a store was away"] += 1
            raise Failed(Fault.UNREACHABLE, "no answer")

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        return [_answer(self._write, file) for file in files]

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        return [_answer(self._read, *file) for file in files]

    def _write(self, file: Outgoing) -> bool:
        name = file.name
        self._may_fail()
        if self.is_full:
            self._judge.seen["a disk was full"] += 1
            raise Failed(Fault.NO_SPACE, "no space is left on this device")
        folder = _folder(name)
        purged = self._purged[folder]
        raw = bytearray()
        for part in filter(None, file.parts):
            half = self._turns.chance.randrange(len(part))
            raw += part[:half]
            self._turns.maybe_leave()
            raw += part[half:]
        if not file.intact():
            return False
        self._turns.maybe_leave()
        if self._purged[folder] != purged:  # its directory has gone
            raise Failed(Fault.VANISHED, "purged under a writer")
        published = self._judge.moment if file.modified is None else int(file.modified)
        self.contents[name] = File(raw, published)
        self._turns.maybe_leave()
        return True

    def _read(self, name: str, parts: Sequence[memoryview]) -> int | None:
        self._may_fail()
        found = self.contents.get(name)  # an open file stays readable
        if found is None:
            return None
        done = 0
        for part in parts:
            piece = found.raw[done : done + len(part)]
            part[: len(piece)] = piece
            done += len(piece)
            self._turns.maybe_leave()
        return done

    def look(self, names: Sequence[str]) -> list[Seen | Failed | None]:
        return [_answer(self._look, name) for name in names]

    def _look(self, name: str) -> Seen | None:
        self._turns.maybe_leave()
        self._be_reached()
        found = self.contents.get(name)
        return Seen(len(found.raw), float(found.published)) if found else None

    def damaged(self, names: Sequence[str]) -> list[bool]:
        self.delete(names)
        return [False] * len(names)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._may_fail()
            self.contents.pop(name, None)

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:  # noqa: ARG002 - nobody follows
        self._be_reached()
        for name in list(self.contents):
            self._turns.maybe_leave()
            found = self.contents.get(name)
            if found and (address := parse(name)):
                yield Found(address, len(found.raw), float(found.published))

    def purge(self, scope: Scope) -> Removed:
        self._may_fail()
        columns = size = 0
        for name in list(self.contents):
            address = parse(name)
            if address and scope.covers(address) and (gone := self.contents.pop(name, None)):
                self._purged[_folder(name)] += 1
                columns, size = columns + 1, size + len(gone.raw)
                self._turns.maybe_leave()
        return Removed(columns, size)


def _folder(name: str) -> str:
    return name.rpartition("/")[0]
