"""The policy that is best for an org's own traffic, found by trying several on a sample of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import sqrt
from typing import Annotated, Any, Final, Generic

from msgspec import Meta, Struct

from swdriver_shim import loops
from swdriver_shim.cache.displacement.arc import Arc
from swdriver_shim.cache.displacement.base import C, Displaceable, DisplacementPolicy
from swdriver_shim.cache.displacement.changeover import Changeover
from swdriver_shim.cache.displacement.cost import EXPECTED, OFTEN, Cost, keys_and_kinds, kind_of
from swdriver_shim.cache.displacement.lru import Lru
from swdriver_shim.cache.displacement.returns import SHARE_AT_FIRST, Returns
from swdriver_shim.cache.displacement.s3fifo import S3Fifo

SAMPLE_COLUMNS: Final = 256  # of those held, or up to twice as many
SHARE_MAX: Final = 4  # at most one column in so many is in the sample
OBSERVED: Final = 16  # uses of columns of the sample that are compared at once
ROOM_MIN: Final = 8  # columns of a miniature: hits of a smaller one tell nothing
WINDOW: Final = 8.0  # comparisons reach back so many uses for each column that a miniature holds
GAIN_MIN: Final = 0.01  # of the hits: for less the policy is not changed,
NOISE: Final = 2.0  # nor for less than so many standard errors,
NOISE_BACK: Final = 1.0  # or so many back to the first one, which is most likely the best

COMPETING: Final[dict[str, Callable[[Returns], DisplacementPolicy[Any]]]] = {
    Cost.name: lambda returns: Cost(returns=returns),  # used until another is known to be better
    Arc.name: lambda _: Arc(),
    Lru.name: lambda _: Lru(),
    S3Fifo.name: lambda _: S3Fifo(),
}


class Standing(Struct, frozen=True):
    """How a policy does on the sample: the share of uses that were hits, recent ones counting more."""

    policy: Annotated[str, Meta(max_length=100)]
    hit_rate: Annotated[float, Meta(ge=0, le=1)]


class Choice(Struct, frozen=True, kw_only=True):
    """The policy in use, and how those that compete do; none as long as they were not compared."""

    in_use: Annotated[str, Meta(max_length=100)]
    seconds: float | None  # for so long; None: from the start
    standings: Annotated[tuple[Standing, ...], Meta(max_length=16)]


class _Column:
    """A column of the sample, as one miniature has it."""

    __slots__ = (
        "bytes", "key", "mark", "needs", "parent", "ref_count", "stored_at", "tail", "terms", "turn",
        "used_at", "uses",
    )  # fmt: skip

    def __init__(self, of: Displaceable, parent: _Column | None, now: float) -> None:
        self.key, self.needs, self.tail, self.bytes = of.key, of.needs, of.tail, of.bytes
        self.turn = self.terms = of.turn
        self.parent = parent
        self.ref_count = 0
        self.used_at = self.stored_at = now
        self.uses = 0
        self.mark: Any = None


class Miniature(Generic[C]):
    """A cache of sampled columns, in which a policy makes room as it would among all of them."""

    __slots__ = ("columns", "gain", "hits", "name", "policy", "recent", "squares")

    def __init__(self, name: str, policy: DisplacementPolicy[Any]) -> None:
        self.name = name
        self.policy = policy
        self.columns: dict[bytes, _Column] = {}
        self.recent = 0  # hits since the last comparison
        self.hits = 0.0  # fading
        self.gain = 0.0  # hits more than the policy in use had, fading,
        self.squares = 0.0  # and their squares

    def fill(self, columns: Iterable[tuple[C, bytes]], now: float) -> None:
        """Begin with these columns, each with the key of the one before it. That may come later: while
        columns change their policy, newcomers are there before what they are behind."""
        filled: list[tuple[_Column, bytes]] = []
        for one, above in columns:
            if one.key in self.columns:
                continue  # one of them was purged, and is about to be removed
            column = self.columns[one.key] = _Column(one, None, one.stored_at)
            column.used_at, column.uses = one.used_at, one.uses
            filled.append((column, above))
        for column, above in filled:
            column.parent = self.columns.get(above)
            if column.parent:
                column.parent.ref_count += 1
        for column in self.columns.values():
            self.policy.stored(column, now)

    def ask(self, path: Sequence[C], above: bytes, now: float, room: float) -> None:
        """A prompt uses these columns of the sample, in order, behind the one with the key `above`."""
        columns, policy = self.columns, self.policy
        found: list[_Column] = []
        missing: list[C] = []
        for one in path:
            column = columns.get(one.key)
            if column is None:
                missing.append(one)
            elif not missing or not one.needs:  # behind a gap it is of no use, unless it stands alone
                found.append(column)
        if found:
            self.recent += len(found)
            policy.used(found, now)
            tip: _Column | None = found[-1]
            for column in found:
                column.used_at = now
                column.uses += 1
                if not column.ref_count and column is not tip:
                    policy.leaf(column)  # of a window: nothing is behind it
        else:
            tip = columns.get(above)
            if above and tip is None:
                return  # without the column before it, it can't be stored
        if tip:
            tip.ref_count += 1  # a pin
        for one in missing:
            if one.key in columns:
                continue  # it is in this path twice
            if len(columns) >= room and not self._make_room(room, now):
                break
            column = columns[one.key] = _Column(one, tip if one.needs else None, now)
            if tip and not one.needs:
                self._release(tip)
            column.ref_count = 1
            policy.stored(column, now)
            tip = column
        if tip:
            self._release(tip)

    def _make_room(self, room: float, now: float) -> bool:
        while len(self.columns) >= room:
            victim = self.policy.victim(now)
            if victim is None:
                return False
            del self.columns[victim.key]
            self.policy.displaced([victim], now)
            if victim.parent:
                self._release(victim.parent)
        return True

    def _release(self, column: _Column) -> None:
        column.ref_count -= 1
        if not column.ref_count and column.key in self.columns:
            self.policy.leaf(column)


class Competition(DisplacementPolicy[C]):
    """Uses the policy that has most hits on a sample of the traffic.

    Each policy has a miniature: a cache of the columns whose keys are in the sample, with as much room
    as their share of the real one. There are none as long as nothing had to be displaced. The policy in
    use is changed for one that was better by more than noise, by a `Changeover`.

    Noise: in each comparison the difference of hits is one observation. The sum of their squares is the
    variance of the sum of as many differences that are zero on average.
    """

    name = "default"
    __slots__ = (
        "_active", "_mask", "_mask_min", "_miniatures", "_passes", "_returns", "_sample", "_seen",
        "_used", "in_use", "since",
    )  # fmt: skip

    def __init__(self, share: int = SHARE_MAX, share_learned: int = SHARE_AT_FIRST) -> None:
        """`share`: one column in so many is in the sample at most; `share_learned`: in that of `Cost`.
        Powers of two."""
        super().__init__()
        self._returns = Returns(EXPECTED, share_learned, OFTEN)
        self._mask = self._mask_min = share - 1  # bits of a key that no column of the sample has
        self._passes = 0  # those in the second byte that no column of either sample has
        self._sample: dict[C, bytes] = {}  # those present, with the key of the one before
        self._miniatures: list[Miniature[C]] = []
        self.in_use = Cost.name
        self.since: float | None = None  # None: from the start
        # The policy in use, or the change to it
        self._active: DisplacementPolicy[C] = COMPETING[self.in_use](self._returns)
        self._seen = 0  # uses of columns of the sample since the last comparison
        self._used = 0.0  # all, fading
        self._set_passes()

    # What the driver tells

    def stored(self, column: C, now: float) -> None:
        self._count += 1
        self._active.stored(column, now)
        if not column.key[1] & self._passes:
            self._sampled_stored(column, now)

    def stored_all(self, columns: Sequence[C], now: float) -> None:
        active, passes, begin = self._active, self._passes, 0
        if isinstance(active, Changeover):
            active.expect(columns)
        for column in loops.current.sampled(columns, passes):
            end = columns.index(column, begin) + 1
            self._hold(columns[begin:end], now)  # the sample sees as many as if each were stored alone
            begin = end
            self._sampled_stored(column, now, columns[begin:])
            if self._active is not active or self._passes != passes:
                self.stored_all(columns[begin:], now)
                return
        self._hold(columns[begin:], now)

    def _hold(self, columns: Sequence[C], now: float) -> None:
        self._count += len(columns)
        self._active.stored_all(columns, now)

    def _sampled_stored(self, column: C, now: float, later: Collection[C] = ()) -> None:
        """`later`: columns that are there, and are about to be stored."""
        was_used = column.used_at >= now  # else it comes back, to be used after that
        if was_used and self._returns.follows(column.key):
            self._returns.stored(column.key, kind_of(column, column.uses), now)
            self._set_passes()  # it may follow fewer
        if not _bits(column.key) & self._mask:
            self._sample[column] = self._above(column)
            if len(self._sample) > 2 * SAMPLE_COLUMNS:
                self._resample(2 * self._mask + 1, now)
            elif 2 * len(self._sample) < SAMPLE_COLUMNS and self._mask > self._mask_min:
                self._resample(self._mask >> 1, now, later)
            if was_used:
                self._ask([column], now)

    def used(self, path: Sequence[C], now: float) -> None:
        self._active.used(path, now)
        if followed := loops.current.sampled(path, self._returns.mask):
            self._returns.used(*keys_and_kinds(followed), now)
            self._set_passes()  # it may follow fewer
        if self._miniatures and (asked := loops.current.sampled(path, self._mask)):
            self._ask(asked, now)

    def leaf(self, column: C) -> None:
        self._active.leaf(column)

    def victim(self, now: float) -> C | None:
        self._returns.refresh(now)
        if not self._miniatures:
            self._begin(now)
        return self._active.victim(now)

    def victims(self, now: float, most: int) -> list[C]:
        self._returns.refresh(now)
        if not self._miniatures:
            self._begin(now)
        return self._active.victims(now, most)

    def displaced(self, run: Sequence[C], now: float) -> None:
        self._count -= len(run)
        self._returns.displaced_run(run, now)
        self._active.displaced(run, now)
        for column in loops.current.sampled(run, self._mask):
            self._sample.pop(column, None)

    def removed(self, column: C) -> None:
        self._count -= 1
        self._active.removed(column)
        if not column.key[1] & self._passes:
            self._sample.pop(column, None)

    @property
    def standings(self) -> tuple[Standing, ...]:
        """Of the policies that compete; none as long as they were not compared on enough columns."""
        if not self._used or self._room < ROOM_MIN:
            return ()
        return tuple([Standing(one.name, min(1.0, one.hits / self._used)) for one in self._miniatures])

    def choice(self, now: float) -> Choice:
        since = self.since
        seconds = None if since is None else max(0.0, now - since)
        return Choice(in_use=self.in_use, seconds=seconds, standings=self.standings)

    # The competition

    def _ask(self, path: Sequence[C], now: float) -> None:
        if not self._miniatures:
            return
        room, above = max(1.0, self._room), self._sample.get(path[0], b"")
        for one in self._miniatures:
            one.ask(path, above, now, room)
        self._seen += len(path)
        if self._seen >= OBSERVED:
            self._compare(room, now)

    def _above(self, column: Displaceable) -> bytes:
        """The key of the next column before it that is in the sample; empty for none."""
        mask, before = self._mask, column.parent
        while before is not None:
            key = before.key
            if not (key[0] << 8 | key[1]) & mask:
                return key
            before = before.parent
        return b""

    @property
    def _room(self) -> float:
        return self._count / (self._mask + 1)

    def _begin(self, now: float) -> None:
        for name, make in COMPETING.items():
            one = Miniature[C](name, make(self._returns))
            one.fill(self._sample.items(), now)
            self._miniatures.append(one)

    def _resample(self, mask: int, now: float, later: Collection[C] = ()) -> None:
        """Follow a smaller share of the columns, or a larger one. The miniatures begin anew, with those
        that are present, without those that are stored `later`."""
        wider = mask < self._mask
        self._mask = mask
        self._set_passes()
        if wider:
            not_yet = set(later)
            picked = list(chain.from_iterable(self.columns(mask)))
            picked.sort(key=lambda one: one.needs)  # parents first
            self._sample = {one: self._above(one) for one in picked if one not in not_yet}
        else:
            before = {one.key: above for one, above in self._sample.items()}
            self._sample = {
                one: _first(above, before, mask)
                for one, above in self._sample.items()
                if not _bits(one.key) & mask
            }
        for one in self._miniatures:
            one.columns = {}
            one.policy = COMPETING[one.name](self._returns)
            one.fill(self._sample.items(), now)

    def _compare(self, room: float, now: float) -> None:
        keep = 1 - self._seen / (WINDOW * room + self._seen)
        active = next(one for one in self._miniatures if one.name == self.in_use)
        self._used = keep * self._used + self._seen
        self._seen = 0
        had, best = active.recent, active
        for one in self._miniatures:
            gain = one.recent - had
            one.hits = keep * one.hits + one.recent
            one.recent = 0
            one.gain = keep * one.gain + gain
            one.squares = keep * one.squares + gain * gain
            errors = NOISE_BACK if one.name == Cost.name else NOISE
            if one.gain > best.gain and one.gain > errors * sqrt(one.squares):
                best = one
        gained = best.gain > GAIN_MIN * active.hits
        if best is not active and gained and not isinstance(self._active, Changeover):
            self._use(best, now)

    def _use(self, best: Miniature[C], now: float) -> None:
        old, self._active = self._active, COMPETING[best.name](self._returns)
        if len(old):
            self._active = Changeover(old, self._active, self._listed, self._has_changed)
        self.in_use, self.since = best.name, now
        for one in self._miniatures:
            one.gain = one.squares = 0.0

    def _listed(self, bits: int) -> Iterator[Iterator[C]]:
        return self.columns(bits)  # which may be set to another one before the change ends

    def _has_changed(self, policy: DisplacementPolicy[C]) -> None:
        self._active = policy

    def _set_passes(self) -> None:
        self._passes = self._mask & self._returns.mask & 0xFF


def _first(key: bytes, before: Mapping[bytes, bytes], mask: int) -> bytes:
    """The first key of those before it, with itself, that is in a smaller sample; empty for none."""
    while key and _bits(key) & mask:
        key = before.get(key, b"")
    return key


def _bits(key: bytes) -> int:
    return key[0] << 8 | key[1]
