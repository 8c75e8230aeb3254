"""The longest prefix of a prompt that every cache group can give back.

Changes nothing. This is where expiry is enforced, however late sweepers run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from swdriver_shim.cache.prefix_map import Account, Column, PrefixMap, State
from swdriver_shim.cache.reasons import DRAM, TIER2, Reason, Tally
from swdriver_shim.cache.remembered import Remembered
from swdriver_shim.cache.slots import Use
from swdriver_shim.cache.stock import Stock
from swdriver_shim.cache.trails import Known, Trail
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.layout import Group
from swdriver_shim.policy import NEVER, Policy, Tiers

_ALWAYS: Final = -NEVER


@dataclass(slots=True, eq=False)
class Match(Use):
    """What of a prompt can be refilled: `columns` of each group, in order.

    All groups agree on `tokens`, counted from the start. A group with a window has only those columns
    that cover it. `slots` are theirs until `release`, though they be removed meanwhile.
    """

    prompt: Prompt
    asked: int  # tokens of the prompt, which may go on since
    keys: Sequence[bytes]  # of the columns that it had then
    tokens: int
    columns: tuple[list[Column], ...]
    slots: tuple[list[int], ...]
    had: int = 0  # so many tokens have been refilled already
    at_first: int = 0  # so many were in memory when they were asked for
    missed: Counter[Reason] = field(default_factory=Counter)
    coming: int = 0  # so many more are on their way from tier 2
    settled: Counter[Reason] = field(default_factory=Counter)  # of those missed: hits that were left
    reasons: Sequence[Reason] = ()  # of each of its columns that is missed and was no hit
    is_counted: bool = False
    replaced_by: Match | None = None
    noted: Remembered | None = None  # once it is over

    @property
    def trail(self) -> Trail:
        """The prompt as it was then."""
        return Known(self.prompt.maker, self.keys)

    def remembered(self, at: float) -> Remembered:
        """What became of it, for whoever asks later."""
        return Remembered(
            self.prompt.request,
            self.prompt.maker,
            at,
            self.asked,
            self.at_first,
            max(self.tokens, self.had),
            tuple(self.settled.items()),
            dict(self.missed),
            self.reasons,
            b"".join(self.keys),
        )

    @property
    def held(self) -> list[Column]:
        """What holds all of it: the last column of a full group, every one of a window."""
        return [
            column
            for hit in self.columns
            for column in (hit[-1:] if hit and hit[0].home.linked else hit)
        ]

    def count(self, tally: Tally, by: int = 1) -> None:
        """Enter its tokens; take them out again with -1."""
        self.is_counted = by > 0
        tally.hits[DRAM] += by * self.at_first
        if more := max(self.tokens, self.had) - self.at_first:
            tally.hits[TIER2] += by * more
        for reason, tokens in self.missed.items():
            tally.missed[reason] += by * tokens


@dataclass(slots=True)
class Path:
    """What one group has of a prompt. `reach`: how many columns in a row, up to each, can be used."""

    map: PrefixMap
    found: list[Column | None]
    fresh: int = 0  # so many from the start can be used
    reach: list[int] = field(default_factory=list)  # of a window


class Look:
    """All groups' columns of a prompt, at one moment."""

    __slots__ = ("_account", "_groups", "_is_open", "_now", "paths")

    def __init__(self, stock: Stock, trail: Trail, now: float) -> None:
        maps = stock.maps_of(trail.maker)
        self._account: Account = maps[0].account
        self._groups: tuple[Group, ...] = stock.layout.groups
        self._is_open = stock.reachable and self._account.policy.tiers is not Tiers.NONE
        self._now = now
        self.paths = [Path(one, one.find(trail.keys)) for one in maps]
        for path in self.paths:
            if path.map.linked:
                path.fresh = self._fresh(path.found)
                continue
            rest = iter(path.found)
            while len(path.reach) < len(path.found):
                path.reach += range(1, self._fresh(rest) + 1)
                path.reach += [0] * (len(path.reach) < len(path.found))  # which ended the run

    def _fresh(self, columns: Iterable[Column | None]) -> int:
        """How many of these, from the first on, may be served at this moment."""
        if not self._is_open:
            return 0
        now, ready = self._now, State.READY
        born, seen = over(self._account.policy, now)
        fresh = 0
        for column in columns:
            if (
                column is None
                or column.state is not ready
                or column.stored_at <= born
                or column.used_at <= seen
                or (column.ttl is not None and column.expires_at <= now)
            ):
                break
            fresh += 1
        return fresh

    def agree(self, prompt: Prompt) -> tuple[tuple[list[Column], ...], int]:
        """The longest prefix that all groups have: its columns, and how many tokens."""
        unit = prompt.maker.unit_columns
        whole = min((path.fresh for path in self.paths if path.map.linked), default=len(prompt.keys))
        whole -= whole % unit
        tails = self._tails(prompt, whole)
        while whole and not tails and not self._covers(whole, whole * COLUMN_TOKENS):
            whole -= unit
            tails = self._tails(prompt, whole)
        tokens = whole * COLUMN_TOKENS + (tails[0].tokens if tails else 0)
        columns = []
        for index, (path, group) in enumerate(zip(self.paths, self._groups, strict=True)):
            columns.append(_present(path.found[group.first_needed(tokens) : whole]))
            columns[-1] += tails[index : index + 1]
        return tuple(columns), tokens

    def _covers(self, whole: int, tokens: int) -> bool:
        """Do all windows have what comes before so many tokens, as far as it lies in whole columns?"""
        return all(
            path.map.linked or path.reach[whole - 1] >= whole - group.first_needed(tokens)
            for path, group in zip(self.paths, self._groups, strict=True)
            if group.first_needed(tokens) < whole
        )

    def _tails(self, prompt: Prompt, whole: int) -> list[Column]:
        """The longest tail right behind the whole columns that all groups have: one column of each."""
        paths = self.paths
        for tail in tails_of(paths[0].map, prompt, whole, prompt.tokens - whole * COLUMN_TOKENS):
            tails = _present(path.map.columns.get(tail.key) for path in paths)
            if len(tails) == self._fresh(tails) == len(paths) and self._covers(
                whole, whole * COLUMN_TOKENS + tail.tokens
            ):
                return tails
        return []

    def coming(self, whole: int) -> int:
        """How many tokens right behind so many columns will be here soon, since tier 2 is at it."""
        full = [path.found[whole:] for path in self.paths if path.map.linked]
        there = (State.READY, State.COMING)
        run = list(
            takewhile(lambda row: all(one and one.state in there for one in row), zip(*full))  # noqa: B905
        )
        is_coming = any(one and one.state is State.COMING for row in run for one in row)
        return len(run) * COLUMN_TOKENS if is_coming else 0


def over(policy: Policy, now: float) -> tuple[float, float]:
    """What was stored at the first moment or before, or used last at the second or before, is over."""
    first, last = policy.ttl_first_use_seconds, policy.ttl_last_use_seconds
    return _ALWAYS if first is None else now - first, _ALWAYS if last is None else now - last


def key_before(prompt: Prompt, depth: int) -> bytes:
    """The key of the column before this depth; empty for none."""
    return prompt.keys[depth - 1] if depth else b""


def tails_of(home: PrefixMap, prompt: Prompt, depth: int, most: int) -> Iterator[Column]:
    """Tails behind so many columns of this prompt, of at most so many tokens and all of them its own;
    the longest first."""
    for tokens in home.tail_lengths(key_before(prompt, depth)):
        if tokens <= most and (tail := home.columns.get(prompt.tail(depth, tokens))):
            yield tail


def columns_of(home: PrefixMap, prompt: Prompt) -> list[Column]:
    """All columns that hold tokens of this prompt and no others, from its start on."""
    found: list[Column] = []
    for depth, key in enumerate([*prompt.keys, b""]):
        found += tails_of(home, prompt, depth, prompt.tokens - depth * COLUMN_TOKENS)
        if column := home.columns.get(key):
            found.append(column)
    return found


def _present(columns: Iterable[Column | None]) -> list[Column]:
    return [column for column in columns if column is not None]
