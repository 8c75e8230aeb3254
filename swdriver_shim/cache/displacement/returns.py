"""How likely columns are to be used again, learned from a sample of them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import groupby
from math import log2
from typing import Final

from swdriver_shim import loops
from swdriver_shim.cache.displacement.base import Displaceable

SAMPLE_MAX: Final = 4096
SHARE_AT_FIRST: Final = 4  # one column in so many is sampled
SHARE_MAX: Final = 1 << 14
SPANS: Final = 2  # the sample should reach back so many times the age of victims,
TOGETHER_MAX: Final = 16  # and have no more columns of one prompt: they tell the same

STEPS: Final = 4  # of age in an octave,
AGES: Final = 20 * STEPS  # from a quarter of a second to three days
GUESS: Final = 0.05  # how likely a use is within a step, before anything is known;
GUESS_STEP_S: Final = 0.5  # in proportion in a step that is shorter
GUESS_PROMPTS: Final = 32.0  # how many prompts a guess weighs as much as,
SHAPE_PROMPTS: Final = 256.0  # and the common course of a kind's chances

_EVENTS_MAX: Final = 16384.0
_REFRESH_SHARE: Final = 16
_REFRESH_MIN: Final = 64
_SMOOTH: Final = 64
_CHANCE_MAX: Final = 0.9

# What nobody has seen, for all orgs together: most have few kinds, and each of many orgs has tables.
_NONE_SEEN: Final = (0.0,) * AGES
_NO_ROW: Final = array("d")

_SECONDS: Final = [(2 ** ((age + 1) / STEPS) - 2 ** (age / STEPS)) / 4 for age in range(AGES)]

_GUESSES: Final = [1 - (1 - GUESS) ** min(1.0, seconds / GUESS_STEP_S) for seconds in _SECONDS]


def age_of(seconds: float) -> int:
    """In steps. A clock that went back is no age."""
    if seconds <= 0:
        return 0
    age = int(STEPS * log2(4 * seconds + 1))
    return age if age < AGES else AGES - 1


class Returns:
    """Uses per second that keeping a column yields: `rate[kind][age]`, age counted from its last use.

    A sample of columns, selected by their keys, is followed whether they are stored or not: how long
    after one use did the next come? The rate is that of keeping a column for the best time. So it rises
    towards an age at which many are used again, and falls after it.

    Columns of one prompt are used together and are one observation, so evidence is weighed in prompts. A
    kind of which little is known takes the course that the chances of all kinds have, scaled by how much
    more or less often it came back at all; at first, by what the caller expects. Kinds that are used
    `often` don't count for that course: a beginning that all prompts share is used with each of them,
    seconds apart, which says nothing of the others. Where nothing is known,
    chances per step of age are equal: the longer ago, the lower the rate.

    A use is only counted. The rates are computed from the counts in `refresh`, which is for those who
    make room: a look-up must not wait for it.
    """

    __slots__ = (
        "_ended",
        "_events",
        "_expected",
        "_followed",
        "_lost",
        "_ordinary",
        "_span_s",
        "_together",
        "_unread",
        "mask",
        "rate",
    )

    def __init__(
        self, expected: Sequence[float], share: int = SHARE_AT_FIRST, often: Collection[int] = ()
    ) -> None:
        """`expected`: how much more or less often columns of each kind are thought to come back.
        `share`: one column in so many is followed at first; a power of two. `often`: kinds."""
        kinds = len(expected)
        self._expected = tuple(expected)
        self._ordinary = [kind not in often for kind in range(kinds)]
        self._followed: dict[bytes, tuple[float, int]] = {}  # last use and kind; longest ago first
        self.mask = share - 1
        self._ended: list[Sequence[float]] = [_NONE_SEEN] * kinds  # by a use at this age
        self._lost: list[Sequence[float]] = [_NONE_SEEN] * kinds  # not seen again up to this age
        self._events = 0.0  # of use, fading,
        self._unread = 0  # and those that came after the rates were computed
        self._together = 1.0  # of the sample in one prompt, as one of them sees it
        self._span_s = 0.0  # the age of victims; 0 before there was one
        self.rate: Sequence[Sequence[float]] = _rates_at_first(self._expected)

    def follows(self, key: bytes) -> bool:
        return not (key[0] << 8 | key[1]) & self.mask

    def used(self, keys: Sequence[bytes], kinds: Sequence[int], now: float) -> None:
        """One prompt uses or stores these columns of the sample, which differ: of these kinds from now
        on."""
        followed, use, count = self._followed, (now, -1), 0
        since, row, age = None, _NO_ROW, 0
        for key, kind in zip(keys, kinds, strict=True):
            ended = followed.pop(key, None)
            if kind != use[1]:
                use = now, kind  # one for all that are alike, as many of one prompt are
            followed[key] = use
            if ended is None:
                continue
            if ended is not since:
                since, row, age = ended, _row(self._ended, ended[1]), age_of(now - ended[0])
            row[age] += 1
            count += 1
        self._note_uses(count, now)

    def stored(self, key: bytes, kind: int, now: float) -> None:
        """One column of the sample is stored: the same as `used` for it alone."""
        ended = self._followed.pop(key, None)
        self._followed[key] = now, kind
        if ended:
            _count(self._ended, ended[1], age_of(now - ended[0]))
        self._note_uses(1 if ended else 0, now)

    def _note_uses(self, count: int, now: float) -> None:
        """So many columns of one prompt have come back, and others may be new."""
        if count:
            self._together += (count - self._together) * min(1.0, count / _SMOOTH)
            self._events += count
            self._unread += count
            if self._events > _EVENTS_MAX:
                self._fade()
        while len(self._followed) > SAMPLE_MAX:
            self._make_room(now)

    def refresh(self, now: float) -> None:
        """Compute the rates again if the evidence has grown by a share since."""
        if self._unread < _REFRESH_MIN or self._unread < self._events / _REFRESH_SHARE:
            return
        self._unread = 0
        pending: list[Sequence[float]] = [
            row if row is _NONE_SEEN else array("d", row) for row in self._lost
        ]
        for (since, kind), its in groupby(self._followed.values()):
            _count(pending, kind, age_of(now - since), len(list(its)))
        self.rate = _all_rates(self._ended, pending, self._expected, self._together, self._ordinary)

    def displaced(self, age_s: float, count: int = 1) -> None:
        """So many columns were displaced so long after their last use."""
        self._span_s = age_s + (self._span_s - age_s) * (1 - 1 / _SMOOTH) ** count

    def displaced_run(self, run: Sequence[Displaceable], now: float) -> None:
        """The same for these columns."""
        for used_at, its in groupby(loops.current.values_of(list(run), "used_at")):
            self.displaced(now - used_at, len(list(its)))

    def _make_room(self, now: float) -> None:
        """Follow a smaller share, or drop the column whose last use is longest ago."""
        key = next(iter(self._followed))
        since, kind = self._followed[key]
        reaches_back = self._span_s and now - since >= SPANS * self._span_s
        if (reaches_back and self._together <= TOGETHER_MAX) or self.mask >= SHARE_MAX - 1:
            del self._followed[key]
            _count(self._lost, kind, age_of(now - since))
        else:
            self.mask = 2 * self.mask + 1
            self._followed = {key: last for key, last in self._followed.items() if self.follows(key)}

    def _fade(self) -> None:
        """Old evidence counts half."""
        self._events /= 2
        self._ended, self._lost = _halved(self._ended), _halved(self._lost)


def _count(rows: list[Sequence[float]], kind: int, age: int, more: int = 1) -> None:
    _row(rows, kind)[age] += more


def _row(rows: list[Sequence[float]], kind: int) -> array[float]:
    """The row of this kind, to count in."""
    row = rows[kind]
    if not isinstance(row, array):
        row = rows[kind] = array("d", row)
    return row


def _halved(rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    return [row if row is _NONE_SEEN else array("d", [count / 2 for count in row]) for row in rows]


@lru_cache
def _rates_at_first(expected: tuple[float, ...]) -> Sequence[Sequence[float]]:
    """Where nothing was seen yet: the same tables for all."""
    nothing = [_NONE_SEEN] * len(expected)
    return _all_rates(nothing, nothing, expected, 1.0, ())


def _all_rates(
    ended: Sequence[Sequence[float]],
    pending: Sequence[Sequence[float]],
    expected: Sequence[float],
    together: float,
    ordinary: Sequence[bool],
) -> Sequence[Sequence[float]]:
    """By kind and age, from how many were used again at each age, and how many were not up to it.

    Kinds of which nothing was seen share a table if as much is expected of them.
    """
    kinds = range(len(expected))
    seen = [kind for kind in kinds if not (ended[kind] is pending[kind] is _NONE_SEEN)]
    at_risk: list[Sequence[float]] = [_NONE_SEEN for _ in kinds]
    for kind in seen:
        at_risk[kind] = _at_risk(ended[kind], pending[kind])
    guess, shape = GUESS_PROMPTS * together, SHAPE_PROMPTS * together
    common_to = [kind for kind in seen if ordinary[kind]]
    used, reached = (_sums([rows[kind] for kind in common_to]) for rows in (ended, at_risk))
    common = _chances(used, reached, _GUESSES, guess)

    def of(kind: int) -> Sequence[float]:
        chances = _scaled(common, ended[kind], at_risk[kind], guess, expected[kind])
        return _rates(_chances(ended[kind], at_risk[kind], chances, shape))

    alike = {expected[kind]: kind for kind in kinds if kind not in seen}
    unseen = {its: of(kind) for its, kind in alike.items()}
    return [of(kind) if kind in seen else unseen[expected[kind]] for kind in kinds]


def _sums(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(_NONE_SEEN, *rows, strict=True)]


def _at_risk(ended: Sequence[float], pending: Sequence[float]) -> list[float]:
    """By age: how many columns reached it. One whose step is not over counts for half of it."""
    counts = [0.0] * AGES
    older = 0.0
    for age in range(AGES - 1, -1, -1):
        counts[age] = older + ended[age] + pending[age] / 2
        older += ended[age] + pending[age]
    return counts


def _chances(
    ended: Sequence[float], at_risk: Sequence[float], guess: Sequence[float], weight: float
) -> list[float]:
    """By age: how likely the next use comes within this step, if none came before."""
    return [(ended[age] + weight * guess[age]) / (at_risk[age] + weight) for age in range(AGES)]


def _scaled(
    common: Sequence[float],
    ended: Sequence[float],
    at_risk: Sequence[float],
    weight: float,
    expected: float,
) -> list[float]:
    """The common chances, times what a kind had of uses to what it would have had by them."""
    ordinary = sum(count * chance for count, chance in zip(at_risk, common, strict=True))
    factor = (sum(ended) + weight * expected) / (ordinary + weight)
    return [min(_CHANCE_MAX, factor * chance) for chance in common]


def _rates(chances: Sequence[float]) -> Sequence[float]:
    """By age: uses per second of keeping, up to the age that makes most of it.

    Goes from old to young. A stretch takes in the next one as long as that yields more than it does.
    """
    rates = array("d", _NONE_SEEN)
    stretches: list[tuple[float, float, float]] = []
    for age in range(AGES - 1, -1, -1):
        uses, left = chances[age], 1 - chances[age]
        seconds = _SECONDS[age] * (1 + left) / 2
        while stretches and stretches[-1][0] * seconds > uses * stretches[-1][1]:
            more, longer, last = stretches.pop()
            uses, seconds, left = uses + left * more, seconds + left * longer, left * last
        stretches.append((uses, seconds, left))
        rates[age] = uses / seconds
    return rates
