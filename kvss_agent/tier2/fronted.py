"""A directory of the agent's own disk in front of a store that others share, or that is far away.

The store behind is the one that counts: what the index of tier 2 knows, its caps and its expiry are
about it. In front lie *copies* of what was written or read last, which are read from there, and what is
*waiting* to be copied behind; each kind has a directory. So a front that is lost costs what was waiting,
and time.

Three ways to write: `through` is done when both have the file; `back` when the front has it, and copies
it behind in the background; `displaced` copies behind what has to make room. What finds no room in
front, or a front that fails, is written behind at once.

What is written behind keeps to a budget. What is copied there in the background rests for it. A spill
that finds no room in front does not, and is refused while others wait for the links. Those that are
written through rest before they come here.

Orgs share the front as they share the store: none has more in front than it may have in the store, and
the one that fills most of that makes room. What waits with `back` cannot make room, so an org may not
have more of it than nobody's waiting columns leave: always some of the front is left for others.

Whoever changes files of a column, here or behind, holds its claim (`claims`). A purge closes its scope
to claims, and drops what was on its way to the front: nothing comes back after it.

The parts of it are in `front/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from kvss_agent.limits.background import Background
from kvss_agent.mover import PYTHON, Mover
from kvss_agent.tier2.address import Address, Part, Scope, address_of
from kvss_agent.tier2.backend import (
    Backend,
    Failed,
    Fault,
    Found,
    Incoming,
    Outgoing,
    Progress,
    Removed,
    Seen,
    ignore_progress,
    look_at,
)
from kvss_agent.tier2.front.contents import Contents
from kvss_agent.tier2.front.departures import Departures
from kvss_agent.tier2.front.disk import FrontDisk
from kvss_agent.tier2.front.flushes import Flushes
from kvss_agent.tier2.front.originals import Originals
from kvss_agent.tier2.front.promotions import Promotions
from kvss_agent.tier2.front.transfers import read_whole
from kvss_agent.tier2.front.workers import Workers
from kvss_agent.tier2.index import Caps
from kvss_agent.tier2.settings import Writes


class Fronted:
    """See `Backend`: one of two levels."""

    def __init__(
        self,
        front: Path,
        behind: Backend,
        cap_bytes: int,
        writes: Writes,
        *,
        shared: bool = True,
        durable: bool = False,
        mover: Mover = PYTHON,
        clock: Callable[[], float] = time.time,
        background: Background | None = None,
    ) -> None:
        """`background`: what the bytes that are written behind keep to."""
        self.kind, self.looks_together = behind.kind, behind.looks_together
        self._behind = behind
        self._writes = writes
        self._is_shared = shared  # others remove files behind
        self._clock = clock
        self._contents = Contents(cap_bytes, can_displace_waiting=writes is Writes.DISPLACED)
        self._disk = FrontDisk(
            front,
            behind,
            self._contents,
            durable=durable,
            mover=mover,
            clock=clock,
            background=background or Background(),
        )
        self._claims = self._disk.claims
        self._lock = self._disk.lock
        self._workers = Workers("tier2-front")
        self._flushes = Flushes(self._disk)
        self._departures = Departures(self._disk, self._flushes)
        self._promotions = Promotions(self._disk, self._departures, self._workers)
        self._originals = Originals(self._disk, behind, self._workers)

    def use_mover(self, mover: Mover) -> None:
        """See `Posix`."""
        self._disk.use_mover(mover)

    def open(self) -> None:
        """What waits is copied behind once it has been listed what lies there. Nothing else in front has
        to be there."""
        self._behind.open()
        self._disk.open()
        with self._lock:
            self._departures.find_left()
        self._disk.trim()

    def set_caps(self, caps: Caps) -> None:
        with self._lock:
            self._contents.set_caps(caps)

    def properties(self) -> Mapping[str, bool | int]:
        contents, counts = self._contents, self._disk.counts
        with self._lock:
            since = next((lone.since for lone in contents.lone.values()), self._clock())
            return {
                **self._behind.properties(),
                "front_columns": contents.index.columns,
                "front_bytes": contents.index.held,
                "front_cap_bytes": contents.index.caps.total,
                "front_waiting": len(contents.lone),
                "front_waiting_bytes": contents.waiting_bytes,
                "front_waiting_seconds": max(0, int(self._clock() - since)),
                "front_copies_at_once": self._writes is not Writes.DISPLACED,
                "front_direct_io": bool(self._disk.copies.properties()["direct_io"]),
                "read_front": counts["read in front"],
                "read_behind": counts["read behind"],
                "copied_behind": counts["copied behind"],
                "promoted": counts["promoted"],
                "given_up": counts["given up"],
            }

    def own_faults(self) -> Mapping[str, int]:
        return self._disk.faults.counts()

    def close(self) -> None:
        self._flushes.close()
        self._workers.close()
        for one in (self._disk.waiting, self._disk.copies, self._behind):
            one.close()

    # Writing

    def write(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        addresses = [address_of(file.name) for file in files]
        with self._claims.of(addresses):
            try:
                self._disk.forget(addresses)  # a copy of what was here before
            except Failed as failed:
                self._disk.faults.note(failed)
            if self._writes is Writes.THROUGH:
                answers = self._behind.write(files)
                both = zip(files, answers, strict=True)
                self._disk.put([file for file, answer in both if answer is True], waits=False)
                return answers
            found = self._disk.put(files, waits=True)
            left = [place for place in range(len(files)) if place not in found]
            if left:
                behind = self._write_behind([files[place] for place in left])
                found |= zip(left, behind, strict=True)
        if self._writes is Writes.BACK and not self._flushes.is_failing:
            self._flushes.begin(addresses)
        return [found[place] for place in range(len(files))]

    def _write_behind(self, files: Sequence[Outgoing]) -> list[bool | Failed]:
        """At once, as far as the links have room."""
        may = [self._disk.has_budget(sum(map(len, file.parts))) for file in files]
        now = [file for file, its in zip(files, may, strict=True) if its]
        written = iter(self._behind.write(now) if now else [])
        late = Failed(Fault.OVER_BUDGET, "the front is full, and the links to the store are in use")
        return [next(written) if its else late for its in may]

    # Reading

    def is_in_front(self, address: Address) -> bool:
        """Whether it is read without the store behind, as far as one knows now. Waits for nobody."""
        return self._contents.index.knows(address) or address in self._contents.lone

    def read(self, files: Sequence[Incoming]) -> list[int | Failed | None]:
        answers: list[int | Failed | None] = [None] * len(files)
        there, waiting = list[int](), list[int]()  # places
        with self._lock:
            for place, (name, _) in enumerate(files):
                address = address_of(name)
                if self.is_in_front(address):
                    self._contents.index.touch(address)
                    there.append(place)
                    if address in self._contents.lone:
                        waiting.append(place)
        self._read_in(self._disk.waiting, files, waiting, answers)
        # What waited may have been handed over since.
        copies = [place for place in there if answers[place] is None]
        self._read_in(self._disk.copies, files, copies, answers)
        left = [place for place, answer in enumerate(answers) if not isinstance(answer, int)]
        with self._lock:
            self._disk.counts["read in front"] += len(files) - len(left)
        if left:
            self._read_behind(files, left, answers)
        return answers

    def _read_in(
        self,
        root: Backend,
        files: Sequence[Incoming],
        places: Sequence[int],
        answers: list[int | Failed | None],
    ) -> None:
        if not places:
            return
        for place, answer in zip(places, root.read([files[p] for p in places]), strict=True):
            answers[place] = answer
            if isinstance(answer, Failed):
                self._disk.faults.note(answer)

    def _read_behind(
        self, files: Sequence[Incoming], places: Sequence[int], answers: list[int | Failed | None]
    ) -> None:
        for place, answer in zip(places, self._behind.read([files[p] for p in places]), strict=True):
            if answer is None and isinstance(answers[place], Failed):
                continue  # it is in front alone, where it cannot be read now
            answers[place] = answer
            if isinstance(answer, int):
                with self._lock:
                    self._disk.counts["read behind"] += 1
                name, parts = files[place]  # whose bytes are as they were read until this returns
                self._promotions.begin(address_of(name), parts, answer)

    # Copying behind

    def tidy(self) -> None:
        """Copy behind what is left waiting; hold the cap; look whether originals are still there."""
        self._disk.trim()
        try:
            self._disk.mend()
        except Failed as failed:
            self._disk.faults.note(failed)
        self._departures.flush_orphaned()
        if self._writes is not Writes.DISPLACED:
            self._flushes.begin_idle()
        if self._is_shared:
            self._originals.begin()
        self._behind.tidy()

    # Shards that leave

    def attend(self, parts: Collection[Part]) -> None:
        """The agent has these shards. What waits of others is copied behind by `tidy`, and their copies
        go."""
        self._departures.attend(parts)

    @property
    def orphans(self) -> int:
        """How many columns are here of shards that the agent does not have."""
        return self._departures.orphans

    def flush(self, part: Part) -> int:
        """The shard leaves this agent: copy behind what waits of it, in the background, and then remove
        its copies, which nobody would look for here. How many columns are still to be done, of those
        that waited when this was first called: call it again until none is.

        If none could be copied for GIVE_UP_SECONDS all are dropped. Else a column could come back,
        however late, that has been deleted where the shard is by then.
        """
        return self._departures.flush(part)

    # Removing

    def look(self, names: Sequence[str]) -> list[Seen | Failed | None]:
        waiting = [name for name in names if address_of(name) in self._contents.lone]
        found = dict(zip(waiting, self._disk.waiting.look(waiting), strict=True))
        left = [name for name in names if not found.get(name)]
        found.update(zip(left, self._behind.look(left), strict=True))
        return [found[name] for name in names]

    def delete(self, names: Sequence[str]) -> None:
        addresses = [address_of(name) for name in names]
        with self._claims.of(addresses):
            self._behind.delete(names)  # first: if that fails, what is only in front is not lost
            self._disk.forget(addresses)

    def damaged(self, names: Sequence[str]) -> list[bool]:
        """What was read in front says nothing of a file behind, unless that is the same."""
        with self._claims.of([address_of(name) for name in names]):
            return [self._is_left(name) for name in names]

    def _is_left(self, name: str) -> bool:
        address = address_of(name)
        if not self._contents.index.knows(address):
            self._disk.forget([address])
            return self._behind.damaged([name])[0]
        root = self._disk.waiting if address in self._contents.lone else self._disk.copies
        try:
            there, ours = look_at(self._behind, name), look_at(root, name)
            # One that others have put there may be of any size: only if it is like ours it is read.
            is_alike = there is not None and ours is not None and there.bytes == ours.bytes
            is_same = is_alike and read_whole(root, name) == read_whole(self._behind, name)
        except Failed as failed:
            self._disk.faults.note(failed)  # nobody can tell: the one behind stays
            self._disk.forget([address])
            return True
        self._disk.forget([address])
        if there is None:
            return False
        return not is_same or self._behind.damaged([name])[0]

    def purge(self, scope: Scope) -> Removed:
        with self._claims.closed_to(scope):
            with self._lock:
                for address in filter(scope.covers, [*self._contents.promotions]):
                    self._contents.drop_promotion(address)
            lone = self._disk.waiting.purge(scope)
            self._disk.copies.purge(scope)
            with self._lock:
                for address in filter(scope.covers, [*self._contents.addresses()]):
                    self._contents.lose(address)
            behind = self._behind.purge(scope)
        return Removed(lone.columns + behind.columns, lone.bytes + behind.bytes)

    # Listing

    def files(self, progress: Progress = ignore_progress) -> Iterator[Found]:
        with self._lock:
            before = {*self._contents.addresses()}
        for found in self._behind.files(progress):
            before.discard(found.address)
            yield found
        for address in before:  # not there, or not yet when that folder was listed
            if (there := look_at(self, address.name)) or (there := self._forgotten(address)):
                yield Found(address, *there)

    def _forgotten(self, address: Address) -> Seen | None:
        """Others have removed it behind. What can be seen of it if it has come again meanwhile."""
        if self._claims.take([address]):
            try:
                if there := look_at(self, address.name):
                    return there
                self._disk.forget([address])
            finally:
                self._claims.release([address])
        return None
