"""The holders of one shard, asked at once, each by threads of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeVar

from kvss_agent.client import Column
from kvss_agent.redundancy.erasure_code import ErasureCode
from kvss_agent.redundancy.holder import Holder
from kvss_agent.redundancy.parts.promptness import Promptness
from kvss_agent.tier2.address import Address
from kvss_agent.tier2.backend import Failed, Fault

log = logging.getLogger(__name__)

CALLS_AT_ONCE: Final = 4  # to one holder
CLOSED: Final = "redundancy was closed"

T = TypeVar("T")
# By place of the holder.
Answers = dict[int, T | Failed]


class Holders:
    """In the order of their fragments: a holder's index here is its place."""

    def __init__(self, code: ErasureCode, holders: Sequence[Holder], part: str) -> None:
        """`part`: of columns, for the log."""
        if len(holders) != code.fragments:
            raise ValueError(f"{code.fragments} fragments need as many holders, not {len(holders)}")
        self.faults = 0  # requests that a holder failed
        self.promptness = [Promptness() for _ in holders]
        self._code, self._holders, self._part = code, holders, part
        self._threads = [ThreadPoolExecutor(CALLS_AT_ONCE, "fragments") for _ in holders]
        self._lock = threading.Lock()
        self._touching: set[int] = set()  # places

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._holders)

    def __getitem__(self, place: int) -> Holder:
        return self._holders[place]

    @property
    def usable(self) -> set[int]:
        """The places of those that can be asked now."""
        return {place for place, one in enumerate(self._holders) if not one.is_away}

    @property
    def in_order(self) -> list[int]:
        """Places, in the order in which to read from them: first data, and last those that were late."""
        return sorted(range(len(self._holders)), key=lambda place: self.promptness[place].rank)

    @property
    def late(self) -> list[str]:
        """Those that are asked last, since they were late."""
        return [one.address for one, its in zip(self, self.promptness, strict=True) if its.is_late]

    def ask(self, place: int, call: Callable[[Holder], T]) -> T | Failed:
        """Ask one holder, in this thread."""
        try:
            return call(self._holders[place])
        except Failed as failed:
            self.count(failed)
            return failed

    def begin(self, place: int, call: Callable[[Holder], T]) -> Future[T | Failed]:
        """Ask one holder, in a thread of its own. Raises Failed."""
        try:
            return self._threads[place].submit(self.ask, place, call)
        except RuntimeError as error:
            raise Failed(Fault.UNREACHABLE, CLOSED) from error

    def each(self, call: Callable[[Holder, int], T], places: Sequence[int] | None = None) -> Answers[T]:
        """Ask these holders at once, or all."""

        def at(place: int) -> Callable[[Holder], T]:
            return lambda holder: call(holder, place)

        asked = range(len(self._holders)) if places is None else places
        running: dict[int, Future[T | Failed]] = {}
        try:
            for place in asked:
                running[place] = self.begin(place, at(place))
        finally:
            wait(running.values())  # they read and write the caller's memory
        return {place: answer_of(future) for place, future in running.items()}

    def having(self, addresses: Sequence[Address]) -> tuple[list[set[int]], dict[int, Failed]]:
        """Of each file the places of those that have a fragment of it; and by place who can't tell."""
        columns = columns_of(addresses)
        answers = self.each(lambda holder, _: holder.exists(columns))
        failures = {place: one for place, one in answers.items() if isinstance(one, Failed)}
        told = {place: one for place, one in answers.items() if not isinstance(one, Failed)}
        there = [{place for place, one in told.items() if one[at]} for at in range(len(columns))]
        return there, failures

    def delete(self, addresses: Sequence[Address], places: Sequence[int] | None = None) -> Answers[None]:
        """Have these holders remove what they have of these files, or all."""
        columns = columns_of(addresses)
        return self.each(lambda holder, _: holder.delete(columns), places)

    def reach(self) -> None:
        """Connect, and have each answer something: nobody asks for columns of an idle shard. Where
        another agent has superseded this one, only a request that needs the holder connects again: an
        idle agent is the former home."""
        places = [place for place in sorted(self.usable) if not self._holders[place].is_superseded]
        self.each(lambda holder, _: holder.reach(), places)

    def touch(
        self, addresses: Sequence[Address], lacks: Callable[[Address, Collection[int]], None]
    ) -> None:
        """Holders displace what nobody has asked for: parity is asked for, too, when a column is read.
        Nobody waits for it, and while one is under way there is no other. `lacks` is told what a holder
        has displaced none the less."""
        for place in range(self._code.data, self._code.fragments):
            with self._lock:
                if not addresses or place in self._touching or self._holders[place].is_away:
                    continue
                self._touching.add(place)
            with contextlib.suppress(RuntimeError):  # it is closed
                self._threads[place].submit(self._touch_at, place, addresses, lacks)

    def count(self, failed: Failed) -> None:
        with self._lock:
            self.faults += 1
        log.debug("Fragments of %s: %s", self._part, failed)

    def close(self) -> None:
        for holder in self._holders:
            holder.close()
        for pool in self._threads:
            # What is queued fails at once, since its holder is closed. Cancelled it would never be done
            # for those who wait for several.
            pool.shutdown(wait=False)

    # Inside

    def _touch_at(
        self,
        place: int,
        addresses: Sequence[Address],
        lacks: Callable[[Address, Collection[int]], None],
    ) -> None:
        try:
            there = self._holders[place].exists(columns_of(addresses))
            for address, is_there in zip(addresses, there, strict=True):
                if not is_there:
                    lacks(address, {place})
        except Failed as failed:
            self.count(failed)
        finally:
            with self._lock:
                self._touching.discard(place)


def answer_of(future: Future[T | Failed]) -> T | Failed:
    """Of one that is done."""
    return future.result()


def columns_of(addresses: Sequence[Address]) -> list[Column]:
    """What holders call the fragments of these files."""
    return [Column(address.key, address.tag, 0) for address in addresses]


def need(answers: Mapping[int, object], least: int) -> None:
    """Raises Failed if fewer have answered."""
    failures = [one for one in answers.values() if isinstance(one, Failed)]
    if len(answers) - len(failures) < least:
        raise failures[0]
