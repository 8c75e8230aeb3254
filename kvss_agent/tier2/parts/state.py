"""What the parts of a store of tier 2 share: backend, index, counts, and what is closed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from kvss_agent.mover import Mover
from kvss_agent.shard import seal
from kvss_agent.shard.seal import Miss
from kvss_agent.tier2.address import Address, Scope
from kvss_agent.tier2.backend import Backend, ColumnBackend, Failed, Seen, column_backend
from kvss_agent.tier2.column_file import CLEAR, Form
from kvss_agent.tier2.index import Index
from kvss_agent.tier2.parts.execution import Execution
from kvss_agent.tier2.parts.statistics import Counts, Outcome


class RestingSpill(Protocol):
    """It waits until the links have room for it. With an outcome it does not begin any more."""

    address: Address
    outcome: Outcome | Miss | None


class StoreState:
    """Belongs to one event loop."""

    def __init__(
        self,
        backend: Backend,
        index: Index,
        execution: Execution,
        mover: Mover,
        clock: Callable[[], float],
        *,
        shared: bool,
    ) -> None:
        self.backend = backend
        self.index = index
        self.execution = execution
        self.clock = clock
        self.shared = shared
        self.is_in_front: Callable[[Address], bool] = lambda _: False  # where somebody knows
        self.counts = Counts()
        self.live: Collection[bytes] | None = None  # tags of known orgs; None: all tags are served
        self.purging: list[Scope] = []
        self.resting: set[RestingSpill] = set()
        self._listings = 0  # under way
        self._purged: list[Scope] = []  # since the first of them began
        self.is_closing = False  # any thread may ask
        self.use_mover(mover)

    def use_mover(self, mover: Mover) -> None:
        """Check columns with this mover from now on."""
        self.mover, self.verify = mover, seal.verifier(mover)

    def columns_in(self, form: Form) -> ColumnBackend | None:
        """Who moves whole columns of this form, if the backend does."""
        return column_backend(self.backend) if form is CLEAR else None

    @contextlib.contextmanager
    def closed_to(self, scopes: Iterable[Scope]) -> Iterator[None]:
        """Neither serve nor accept anything of these scopes while this lasts."""
        closed = list(scopes)
        self.purging += closed
        self.refuse_resting(self.is_purging)
        try:
            yield
        finally:
            for scope in closed:
                self.purging.remove(scope)
            self.execution.changed()

    def refuse_resting(self, covers: Callable[[Address], bool]) -> None:
        """These are being removed: what rests must not bring them back when that is done."""
        for spill in self.resting:
            if covers(spill.address):
                spill.outcome = Miss.REFUSED

    @contextlib.contextmanager
    def listing(self) -> Iterator[Callable[[Address], bool]]:
        """While files are listed. Gives a function that says whether a file was removed since, though it
        was listed."""
        if not self._listings:
            self.index.gone = set()
            self._purged.clear()
        self._listings += 1
        try:
            yield self._is_gone
        finally:
            self._listings -= 1
            if not self._listings:
                self.index.gone = None

    @property
    def is_listing(self) -> bool:
        return self._listings > 0

    def _is_gone(self, address: Address) -> bool:
        is_purged = any(scope.covers(address) for scope in self._purged)
        return is_purged or (self.index.gone is not None and address in self.index.gone)

    def note_purged(self, scope: Scope) -> None:
        """All of it was removed, also what the index did not know."""
        if self._listings:
            self._purged.append(scope)

    def may_be_elsewhere(self, address: Address) -> bool:
        """Whether only the backend can tell if this column is there."""
        return (
            self.shared
            and not self.index.knows(address)
            and not self.index.is_written(address)
            and not self.index.is_leaving(address)
            and not self.is_closed(address)
        )

    def is_closed(self, address: Address) -> bool:
        """It is being purged, or its tag is nobody's any more: nothing goes in or comes out."""
        return (self.live is not None and address.tag not in self.live) or self.is_purging(address)

    def is_purging(self, address: Address) -> bool:
        return bool(self.purging) and any(scope.covers(address) for scope in self.purging)

    def look_at(self, addresses: Sequence[Address]) -> list[Seen | Failed | None]:
        """In a thread: what the backend knows of these files. Raises Failed."""
        return self.backend.look([address.name for address in addresses])

    def seen(self, addresses: Sequence[Address]) -> list[Seen | None]:
        """In a thread: what the backend knows of these files. Raises Failed if it can't tell of one."""
        found: list[Seen | None] = []
        for one in self.look_at(addresses):
            if isinstance(one, Failed):
                raise one
            found.append(one)
        return found
