"""A real directory behind a backend that fails or stops when it is told to."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from kvss_agent.tier2.address import Scope
from kvss_agent.tier2.backend import (
    Failed,
    Found,
    Incoming,
    Outgoing,
    Progress,
    Removed,
    Seen,
    ignore_progress,
)
from kvss_agent.tier2.posix import Posix, translated

HELD_SECONDS_MAX: Final = 10.0
_File = TypeVar("_File", Outgoing, Incoming)
_T = TypeVar("_T", bool, int | None)


class OneByOne(Posix):
    """For who wants to look at each file as it passes."""

    @property
    def moves_columns(self) -> bool:
        return False

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        return [_value(self.write_one, file) for file in files]

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        return [_value(self.read_one, file) for file in files]

    def write_one(self, file: Outgoing) -> bool | Failed:
        (stored,) = super().write([file])
        return stored

    def read_one(self, file: Incoming) -> int | Failed | None:
        (received,) = super().read([file])
        return received


def _value(call: Callable[[_File], _T | Failed], file: _File) -> _T | Failed:
    try:
        return call(file)
    except Failed as failed:
        return failed


class Held(OneByOne):
    """Reads and writes stop half-way until they are told to go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._reached = {"read": threading.Event(), "write": threading.Event()}
        self._go = {"read": threading.Event(), "write": threading.Event()}

    async def reached(self, what: str) -> None:
        """Until a thread has come that far."""
        assert await asyncio.to_thread(self._reached[what].wait, HELD_SECONDS_MAX)

    def go(self, what: str) -> None:
        self._go[what].set()

    def write_one(self, file: Outgoing) -> bool | Failed:
        def stop() -> bool:
            self._stop("write")
            return file.intact()

        return super().write_one(file._replace(intact=stop))

    def read_one(self, file: Incoming) -> int | Failed | None:
        received = super().read_one(file)
        self._stop("read")
        return received

    def _stop(self, what: str) -> None:
        self._reached[what].set()
        assert self._go[what].wait(HELD_SECONDS_MAX)


class Faulty(OneByOne):
    """Calls fail as the kernel would let them: all of them, those of one kind, or the nth."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._number = 0
        self._only = ""
        self._name = ""
        self._left = 0

    def fail_with(self, number: int, *, only: str = "") -> None:
        """From now on everything fails with this errno, or only calls of this name; 0: nothing does."""
        self._number, self._only = number, only

    def fail_for(self, name: str) -> None:
        """From now on reads and writes of this file fail with EIO, and nothing else does."""
        self._name = name

    def fail_nth(self, nth: int) -> bool:
        """Let the nth call from now on fail with EIO. Whether the last such wish came too late."""
        was_left, self._left = self._left, nth
        return was_left > 0

    def _maybe(self, call: str, name: str = "") -> None:
        if name and name == self._name:
            with translated():
                raise OSError(5, os.strerror(5))
        if self._left:
            self._left -= 1
            if not self._left:
                with translated():
                    raise OSError(5, os.strerror(5))
        if self._number and self._only in ("", call):
            with translated():
                raise OSError(self._number, os.strerror(self._number))

    def write_one(self, file: Outgoing) -> bool | Failed:
        self._maybe("write", file.name)
        return super().write_one(file)

    def read_one(self, file: Incoming) -> int | Failed | None:
        self._maybe("read", file[0])
        return super().read_one(file)

    def look(self, names: Sequence[str]) -> list[Seen | Failed | None]:
        self._maybe("look")
        return super().look(names)

    def delete(self, names: Sequence[str]) -> None:
        self._maybe("delete")
        super().delete(names)

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
        self._maybe("files")
        yield from super().files(progress)

    def purge(self, scope: Scope) -> Removed:
        self._maybe("purge")
        return super().purge(scope)
