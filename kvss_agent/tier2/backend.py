"""What tier 2 asks of whatever keeps its files: blocking calls, made from threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, cast

from kvss_agent.shard.seal import Column, Header, Miss
from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.index import Caps

Progress = Callable[[int, int | None], None]  # how many are listed, of how many if that is known


class Fault(StrEnum):
    """Why a backend did not do what it was asked to. A column that is not there is no fault."""

    NO_SPACE = "no-space"  # the disk, or a quota of its own, is full
    IO_ERROR = "io-error"  # the device gave an error
    DENIED = "denied"  # not allowed: permissions, a read-only mount, credentials
    UNREACHABLE = "unreachable"  # no answer in time, or the service answers with errors
    VANISHED = "vanished"  # another agent purged the directory under a writer
    OVER_BUDGET = "over-budget"  # it would have to wait for the links: no fault of the disk or service
    OTHER = "other"  # see the text


class Failed(Exception):
    """A backend's fault, with a sentence on it."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{fault}: {detail}")
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Found:
    """A column file in a listing."""

    address: Address
    bytes: int
    modified: float


class Seen(NamedTuple):
    """Of one file."""

    bytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class Removed:
    """What is gone."""

    columns: int
    bytes: int


class Outgoing(NamedTuple):
    """A file to be.

    `intact` is asked after the parts have been read and before anybody can see the file. If it denies,
    nothing is published. `modified`: of a copy, when its original was written; kept where that can be.
    """

    name: str
    parts: Sequence[memoryview]
    intact: Callable[[], bool]
    modified: float | None = None


Incoming = tuple[str, Sequence[memoryview]]  # the name of a file, and where its bytes go


def ignore_progress(done: int, total: int | None) -> None:
    """Progress that nobody follows."""


class Backend(Protocol):
    """Files by name. Every call may raise Failed, and is safe to make from several threads at once."""

    kind: str
    looks_together: bool  # to look at many files takes as long as at one: it asks somebody for all

    def open(self) -> None:
        """Make sure that it can be written to, and find out what it can do."""

    def properties(self) -> Mapping[str, bool | int]:
        """What `open` and `files` have found out, for whoever wonders about its speed."""

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        """Publish each of these files, all or nothing, in place of what had its name.

        False if it was not intact. Failed leaves nothing either, as far as that can be had; the others
        are published none the less.
        """

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        """Fill the parts from the start of each file. How many bytes; None if there is no such file."""

    def look(self, names: Sequence[str]) -> list[Seen | Failed | None]:
        """What can be seen of each file; None if there is no such file. Where it can't be told of one,
        it may also raise Failed and say nothing of the others."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove these files; those that are not there are none the less gone."""

    def damaged(self, names: Sequence[str]) -> list[bool]:
        """What was read of these is not what they should be: remove it from where it was read. Whether
        there is another one, which is read next."""

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
        """All column files, and away with what dead writers left. Others may write meanwhile."""

    def purge(self, scope: Scope) -> Removed:
        """Remove everything that lies in this scope, half-written and unknown files too, for good."""

    def own_faults(self) -> Mapping[str, int]:
        """By Fault, those that no answer has told: of what it does by itself."""

    def set_caps(self, caps: Caps) -> None:
        """What the store may hold from now on, which sees to it that its files are no more. For who has
        copies of its own."""

    def tidy(self) -> None:
        """Called now and then: time to do what is left undone."""

    def close(self) -> None:
        """Nothing is asked of it any more."""


class Leaving(NamedTuple):
    """A column whose file is its slot as it lies there."""

    name: str
    slot: memoryview
    evicted: Column  # what the slot holds,
    header: Header  # and its header, when it was looked at
    filed: Column  # what the header of the file says
    victim: str | None = None  # the name of a file of the same org, as large, that has to be gone first


class Arriving(NamedTuple):
    """Where the bytes of such a file go to."""

    name: str
    slot: memoryview
    filed: Column  # with any note


class ColumnBackend(Protocol):
    """A backend that moves whole columns, as they lie in their slots, and does all checks on the way."""

    @property
    def moves_columns(self) -> bool:
        """Or it does not: asked before each batch."""

    def store_columns(self, columns: Sequence[Leaving]) -> list[Miss | Failed | None]:
        """As `write`: None if it is published, or why the slot is not what it was. A victim may still be
        there if the answer is Failed; where it can, a column's file is its victim's, written over."""

    def load_columns(self, columns: Sequence[Arriving]) -> list[Header | Miss | Failed]:
        """As `read`: the header of the file, or why it is not that column's. The slot's header stays as
        it is; a miss may leave anything in the payload."""


def column_backend(backend: Backend) -> ColumnBackend | None:
    """This backend, if it moves columns."""
    return cast("ColumnBackend", backend) if getattr(backend, "moves_columns", False) else None


def look_at(backend: Backend, name: str) -> Seen | None:
    """What can be seen of one file. Raises Failed."""
    (seen,) = backend.look([name])
    if isinstance(seen, Failed):
        raise seen
    return seen
