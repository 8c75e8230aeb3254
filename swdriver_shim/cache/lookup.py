"""The longest prefix of a prompt that every cache group can serve.

Changes nothing. Expiry is enforced here, however late the sweeper is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, cast

from swdriver_shim import loops
from swdriver_shim.cache.prefix_map import Column, PrefixMap, State
from swdriver_shim.cache.reasons import DRAM, SIBLING, TIER2, Reason, Tally
from swdriver_shim.cache.request_log import HasKeys, PromptKeys, RequestRecord
from swdriver_shim.cache.slots import Use
from swdriver_shim.cache.stock import Stock
from swdriver_shim.keys import COLUMN_TOKENS, Prompt
from swdriver_shim.layout import Group
from swdriver_shim.policy import NEVER, Policy, Tiers

_ALWAYS: Final = -NEVER
_READY: Final = State.READY
_NOTHING: Final[Mapping[PrefixMap, list[Column | None]]] = {}


@dataclass(slots=True, eq=False)
class Match(Use):
    """The prefix of a prompt that can be refilled: `columns` of each group, in order.

    All groups agree on `tokens`, counted from the start. A group with a window has only the columns that
    cover it, a state group only the last one. `slots` keep the columns' bytes until `release`, even if
    the columns are removed meanwhile.
    """

    prompt: Prompt
    asked: int  # tokens of the prompt at that time; it may be longer since
    keys: list[bytes]  # of its columns at that time
    tokens: int
    columns: tuple[list[Column], ...]
    slots: tuple[Sequence[int], ...]
    refilled: int = 0  # tokens that have been refilled already
    at_first: int = 0  # tokens that were in memory at the first match, and had not just been borrowed
    borrowed: int = 0  # tokens behind those that had been
    missed: dict[Reason, int] = field(default_factory=dict)  # tokens
    pending: int = 0  # further tokens that are being recalled from tier 2
    unused: dict[Reason, int] = field(default_factory=dict)  # of those missed: hits that were not used
    reasons: Sequence[Reason] = ()  # of each missed column that was no hit
    is_counted: bool = False
    replaced_by: Match | None = None
    record: RequestRecord | None = None  # in the request log, once the load has ended

    @property
    def prompt_keys(self) -> PromptKeys:
        """The prompt as it was at that time."""
        return PromptKeys(self.prompt.maker, self.keys)

    def to_record(self, at: float) -> RequestRecord:
        return RequestRecord(
            self.prompt.request,
            self.prompt.maker,
            at,
            self.asked,
            self.at_first,
            self.borrowed,
            max(self.tokens, self.refilled),
            tuple(self.unused.items()),
            dict(self.missed),
            self.reasons,
            b"".join(self.keys),
        )

    @property
    def pinned(self) -> list[Column]:
        """The last column of a full group, and every one of the others: that keeps all of the match."""
        return [
            column for hit in self.columns for column in (hit[-1:] if hit and hit[0].map.linked else hit)
        ]

    def count(self, tally: Tally, by: int = 1) -> None:
        """Add the tokens to the tally; subtract them with -1."""
        self.is_counted = by > 0
        tally.hits[DRAM] += by * self.at_first
        if more := max(self.tokens, self.refilled) - self.at_first:
            borrowed = min(self.borrowed, more)
            tally.hits[SIBLING] += by * borrowed
            tally.hits[TIER2] += by * (more - borrowed)
        for reason, tokens in self.missed.items():
            tally.missed[reason] += by * tokens


@dataclass(slots=True)
class Path:
    """The columns of a prompt in one group. `reach`: how many in a row, up to each, can be served."""

    map: PrefixMap
    found: list[Column | None]
    end: int  # behind so many none is there
    fresh: int  # how many from the start can be served
    reach: list[int] = field(default_factory=list)  # of a window; of states each counts for itself


class Lookup:
    """The columns of a prompt in all groups, at one time. `misplaced`: those of its keys that are not
    where it has them, and are not found."""

    __slots__ = ("_groups", "_is_open", "_most", "_now", "_over", "keys", "misplaced", "paths")

    def __init__(
        self,
        stock: Stock,
        prompt: HasKeys,
        now: float,
        known: Mapping[PrefixMap, list[Column | None]] = _NOTHING,
    ) -> None:
        """`known`: what was found for the first of these keys earlier. These lists are changed, and are
        what is found now."""
        maps = stock.maps_of(prompt.maker)
        self._groups: tuple[Group, ...] = stock.layout.groups
        policy = maps[0].account.policy
        self._most = policy.columns_max
        is_cut = self._most is not None and self._groups[0].alone  # objects have no beginning
        self._is_open = stock.is_reachable and policy.tiers is not Tiers.NONE and not is_cut
        self._now = now
        self._over = over(policy, now)
        self.keys = prompt.keys
        whole = self.keys if self._most is None else self.keys[: self._most]
        behind: list[Column | None] = [None] * (len(self.keys) - len(whole))  # what the policy stores
        self.paths = []
        self.misplaced: list[Column] = []
        for one in maps:
            before = known.get(one)
            fresh = min(self._fresh(before), len(whole)) if before else 0  # these are ready as well
            found, count = one.find_prefix(whole, before, fresh)
            found += behind
            end = len(found) if any(found[count:]) else count
            if count < end and not self._groups[0].alone:
                self.misplaced += one.take_misplaced(found, count)
            path = Path(one, found, end, fresh)
            self.paths.append(path)
            if one.linked:
                if fresh < count:  # behind them is none that is where the prompt has it
                    path.fresh += self._fresh(found, fresh)
                continue
            if self._groups[one.group].is_state:
                path.reach = [0 if one is None else self._fresh([one]) for one in path.found]
                continue
            while (done := len(path.reach)) < len(path.found):
                path.reach += range(1, self._fresh(path.found, done) + 1)
                path.reach += [0] * (len(path.reach) < len(path.found))  # which ended the run

    def _fresh(self, columns: Sequence[Column | None], start: int = 0) -> int:
        """How many of these, from the place `start` on, can be served."""
        if not (self._is_open and columns):
            return 0
        born, seen = self._over
        return loops.current.fresh(columns, start, _READY, born, seen, self._now)

    def agree(self, prompt: Prompt) -> tuple[tuple[list[Column], ...], int]:
        """The longest prefix that all groups can serve: its columns, and how many tokens."""
        unit = prompt.maker.unit_columns
        full = [path.fresh for path in self.paths if path.map.linked]
        has_others, whole = len(full) < len(self.paths), min(full, default=len(prompt.keys))
        whole -= whole % unit
        tails = self._tails(prompt, whole)
        while has_others and whole and not tails and not self._covers(whole, whole * COLUMN_TOKENS):
            whole = self._next_end(prompt, whole - unit)
            tails = self._tails(prompt, whole)
        tokens = whole * COLUMN_TOKENS + (tails[0].tokens if tails else 0)
        columns = []
        for index, (path, group) in enumerate(zip(self.paths, self._groups, strict=True)):
            found = path.found[group.first_needed(tokens) : whole]
            # Of a full group all are there, and nobody has to look at each.
            columns.append(cast("list[Column]", found) if path.map.linked else _present(found))
            columns[-1] += tails[index : index + 1]
        return tuple(columns), tokens

    def _next_end(self, prompt: Prompt, whole: int) -> int:
        """The largest number of columns up to this one at which every state group has a state, or where
        a tail begins."""
        states = [path.reach for path in self._of_states]
        tails = self.paths[0].map
        while whole > 0 and not all(reach[whole - 1] for reach in states):
            if tails.tail_lengths(prompt.keys[whole - 1]):
                break
            whole -= prompt.maker.unit_columns
        return whole

    def _covers(self, whole: int, tokens: int) -> bool:
        """Whether all windows and states have the whole columns that they need before so many tokens."""
        for path, group in zip(self.paths, self._groups, strict=True):
            needed = 0 if path.map.linked else whole - group.first_needed(tokens)
            if needed > 0 and path.reach[whole - 1] < needed:
                return False
        return True

    def _tails(self, prompt: Prompt, whole: int) -> list[Column]:
        """The longest tail behind the whole columns that all groups have: one column of each."""
        paths = self.paths
        if self._most is not None and whole >= self._most:
            return []
        if not paths[0].map.tail_lengths(key_before(prompt, whole)):
            return []  # mostly
        for tail in tails_of(paths[0].map, prompt, whole, prompt.tokens - whole * COLUMN_TOKENS):
            tails = _present(path.map.columns.get(tail.key) for path in paths)
            if len(tails) == self._fresh(tails) == len(paths) and self._covers(
                whole, whole * COLUMN_TOKENS + tail.tokens
            ):
                return tails
        return []

    def pending(self, whole: int) -> int:
        """How many tokens behind so many columns are being recalled from tier 2."""
        if whole >= max([path.end for path in self.paths]):
            return 0  # nearly always
        full = [path.found[whole:] for path in self.paths if path.map.linked]
        states = [path.found[whole:] for path in self._of_states]
        rows: list[tuple[Column | None, ...]] = []
        run = list(takewhile(_is_coming, zip(*full)))  # noqa: B905
        reach = len(run)
        if states:
            rows = list(zip(*states, strict=True))[: reach if full else None]
            reach = max((end for end, row in enumerate(rows, 1) if _is_coming(row)), default=0)
        is_pending = any(
            one and one.state is State.RECALLING for row in (*run[:reach], *rows[:reach]) for one in row
        )
        return reach * COLUMN_TOKENS if is_pending else 0

    @property
    def _of_states(self) -> list[Path]:
        return [path for path, group in zip(self.paths, self._groups, strict=True) if group.is_state]


def _is_coming(row: Iterable[Column | None]) -> bool:
    """Whether all of these columns are in memory, or on their way there from tier 2."""
    return all(one and one.state in (State.READY, State.RECALLING) for one in row)


def over(policy: Policy, now: float) -> tuple[float, float]:
    """Two times. Columns stored at the first or earlier, or last used at the second or earlier, have
    expired."""
    first, last = policy.ttl_first_use_seconds, policy.ttl_last_use_seconds
    return _ALWAYS if first is None else now - first, _ALWAYS if last is None else now - last


def key_before(prompt: Prompt, depth: int) -> bytes:
    """The key of the column before this depth; empty for none."""
    return prompt.keys[depth - 1] if depth else b""


def tails_of(prefix_map: PrefixMap, prompt: Prompt, depth: int, most: int) -> Iterator[Column]:
    """Tails of this prompt behind so many columns, of at most so many tokens, the longest first."""
    for tokens in prefix_map.tail_lengths(key_before(prompt, depth)):
        if tokens <= most and (tail := prefix_map.columns.get(prompt.tail(depth, tokens))):
            yield tail


def columns_of(prefix_map: PrefixMap, prompt: Prompt, depths: range) -> list[Column]:
    """The columns of this prompt at these depths, tails included, from its start on."""
    found: list[Column] = []
    keys = prompt.keys[depths.start : depths.stop]
    for depth, key in enumerate(keys, depths.start):
        found += tails_of(prefix_map, prompt, depth, prompt.tokens - depth * COLUMN_TOKENS)
        if column := prefix_map.columns.get(key):
            found.append(column)
    end = len(prompt.keys)
    if end in depths:
        found += tails_of(prefix_map, prompt, end, prompt.tokens - end * COLUMN_TOKENS)
    return found


def _present(columns: Iterable[Column | None]) -> list[Column]:
    return [column for column in columns if column is not None]
