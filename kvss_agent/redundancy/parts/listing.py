"""Looking and listing: which files have enough fragments, and what they lack."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvss_agent.client import Column
from kvss_agent.redundancy.parts.state import State
from kvss_agent.shard.core import batches
from kvss_agent.tier2.address import Address, address_of
from kvss_agent.tier2.backend import Failed, Fault, Found, Progress, Seen, ignore_progress
from kvss_agent.tier2.column_file import PAGE

FEW: Final = 0.5  # a holder that has fewer than this share of the files has lost them


class Lister:
    def __init__(self, state: State) -> None:
        self._state, self._code, self._holders = state, state.code, state.holders
        self._listed: set[int] = set()  # places that were listed once

    def look(self, names: Sequence[str]) -> list[Seen | Failed | None]:
        """See `Backend`. How large a file is nobody knows who has not read it: as large as they get."""
        having, failures = self._holders.having([address_of(name) for name in names])
        found: list[Seen | Failed | None] = []
        for there in having:
            if len(there) >= self._code.data:
                found.append(Seen(self._bytes_max, time.time()))
            elif failures and len(there) + len(failures) >= self._code.data:
                found.append(next(iter(failures.values())))
            else:
                found.append(None)
        return found

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
        """Those of which enough fragments are there; what they lack is known from then on."""
        progress(0, None)
        self._holders.each(lambda holder, _: holder.open())
        state, every = self._state, range(self._code.fragments)
        away: set[int] = set()
        older: list[list[Column]] = [[] for _ in every]
        incarnations = [holder.incarnation for holder in self._holders]
        listed = [self._fragments_at(place, away, older[place]) for place in every]
        done, missing = 0, dict[int, list[Address]]()
        for (tag, key), group in itertools.groupby(heapq.merge(*listed), lambda one: one[0]):
            places = {place: (size, seconds) for _, place, size, seconds in group}
            if len(places) < self._code.data:
                continue
            done += 1
            progress(done, None)
            address = Address(state.namespace, tag, key, state.part)
            for place in set(every) - places.keys() - away:
                missing.setdefault(place, []).append(address)
            sizes, seconds = zip(*places.values(), strict=True)
            # With parity they are more than a file can have, and a holder may say anything. A size that
            # no file has would be taken for damage, and all fragments removed.
            size = max(PAGE, min(sum(sizes) // PAGE * PAGE, self._bytes_max))
            yield Found(address, size, min(seconds))
        # Before the others are marked, and also where it fails: a repair that goes on beside this has
        # found what is removed here in its place, and taken the file for whole.
        try:
            for place, columns in enumerate(older):
                for some in batches(columns):
                    self._holders[place].delete(some)
        finally:
            self._mark(missing, older, done)
        if len(away) > self._code.parity:
            raise Failed(Fault.UNREACHABLE, f"{len(away)} of {self._code.fragments} holders are away")
        for place in set(every) - away:
            self._listed.add(place)
            # Of another one, if it was started anew meanwhile: then it is listed once more.
            self._holders[place].note_listed(incarnations[place])

    def _mark(
        self,
        missing: Mapping[int, Sequence[Address]],
        older: Sequence[Sequence[Column]],
        done: int,
    ) -> None:
        """`missing`, by place, of so many files; `older`, by place: what is removed."""
        for place, addresses in missing.items():
            # What a holder displaces now and then is not stored there again, which would displace other
            # fragments in its place. What is removed is: its clock may be behind the console's.
            has_lost = place not in self._listed or len(addresses) > (1 - FEW) * done
            removed = {(one.tag, one.key) for one in older[place]}
            for address in addresses:
                if has_lost or (address.tag, address.key) in removed:
                    self._state.incomplete.mark(address, {place})

    @property
    def _bytes_max(self) -> int:
        return self._state.file_bytes_max // PAGE * PAGE

    def _fragments_at(
        self, place: int, away: set[int], older: list[Column]
    ) -> Iterator[tuple[tuple[bytes, bytes], int, int, int]]:
        """`older`: those that are from before the holder's time."""
        holder = self._holders[place]
        try:
            for key, tag, size, seconds in holder.listed():
                if seconds < int(holder.since):
                    older.append(Column(key, tag, 0))
                else:
                    yield (tag, key), place, size, seconds
        except Failed as failed:
            self._holders.count(failed)
            away.add(place)
