"""Why columns are missed: for counters, and column by column for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from swdriver_shim.cache.lookup import Match, Path
from swdriver_shim.cache.prefix_map import Column, State
from swdriver_shim.cache.reasons import NoSpill, Reason
from swdriver_shim.cache.request_log import HasKeys
from swdriver_shim.cache.stock import Stock
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from swdriver_shim.layout import Group
from swdriver_shim.policy import NEVER

_IN_TRANSIT: Final = {State.WRITING: Reason.WRITING, State.RECALLING: Reason.TIER2_LATE}


class KeyedColumn(NamedTuple):
    """A column of a prompt: its key, and how many tokens it has."""

    key: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class ColumnState:
    """One column of a prompt, for people."""

    depth: int
    tokens: int
    state: str  # "ready", or the reason of the miss
    age_seconds: float | None = None
    idle_seconds: float | None = None
    expires_in_seconds: float | None = None
    uses: int | None = None
    priority: int | None = None
    slot: int | None = None
    tier2: bool = False  # it exists there, and would be recalled
    no_spill: NoSpill | None = None  # why it is not copied there, if it is ready


def reason(stock: Stock, column: Column | None, key: bytes, now: float) -> Reason | None:
    """Why the column can't be served; None if it can."""
    if column is None or column.state is State.EMPTY:
        return stock.ghosts.reason_of(key)
    if column.state is State.RECALLING and column in stock.borrowing:
        return Reason.NOT_BORROWED
    if column.state in _IN_TRANSIT:
        return _IN_TRANSIT[column.state]
    if why := column.not_stored_for:
        return why
    if column.expires_at <= now:
        return Reason.EXPIRED
    return None if stock.is_reachable else Reason.AGENT_LOST


def set_missed(stock: Stock, match: Match, paths: Sequence[Path], now: float) -> None:
    """Set the reason of each missed token of the match. Columns behind a gap have the gap's reason."""
    tokens = max(match.tokens, match.refilled) + sum(match.unused.values())
    reasons = match.reasons = _reasons(stock, match.keys, paths, tokens // COLUMN_TOKENS, now)
    missed = match.missed = dict(match.unused)
    others = reasons
    while others:  # mostly once: they have one reason
        why, count = others[0], others.count(others[0])
        missed[why] = missed.get(why, 0) + count * COLUMN_TOKENS
        others = [one for one in others if one is not why] if count < len(others) else []
    # The tail, less the part of a column that is hit.
    why = reasons[-1] if reasons else Reason.NEVER_STORED
    missed[why] = missed.get(why, 0) + match.asked - tokens - len(reasons) * COLUMN_TOKENS


def _reasons(
    stock: Stock, keys: list[bytes], paths: Sequence[Path], first: int, now: float
) -> list[Reason]:
    """The reason of each column from this one on."""
    groups = stock.layout.groups
    if paths[0].end <= first < len(keys) and not groups[0].is_state:
        return stock.ghosts.reasons(keys[first:])  # the most frequent case
    gap, reasons = Reason.NEVER_STORED, list[Reason]()
    is_behind_gap = False  # of columns of which each is needed, or of those of a window
    for depth in range(first, len(keys)):
        found: dict[bool, Reason] = {}  # of states, and of others
        for path, group in zip(paths, groups, strict=True):
            if why := _reason_in(stock, group, path.found[depth], keys[depth], now):
                found.setdefault(group.is_state, why)
        is_behind_gap = is_behind_gap or False in found
        if (of_kv := found.get(False)) or not is_behind_gap:
            gap = of_kv or found.get(True, gap)
        reasons.append(gap)
    return reasons


def _reason_in(
    stock: Stock, group: Group, column: Column | None, key: bytes, now: float
) -> Reason | None:
    """Why the column can't be served. Where there is KV as well, its columns say whether the prompt was
    ever stored, and states are not stored for every column."""
    why = reason(stock, column, key, now)
    if why is Reason.NEVER_STORED and group.is_state and stock.layout.has_kv:
        return Reason.NO_STATE
    return why


def explain(
    stock: Stock, maker: Keys, columns: Sequence[KeyedColumn], first: int, now: float
) -> dict[str, list[ColumnState]]:
    """The state of these columns of a prompt, from the depth `first` on, by group."""
    return {
        group.name: [
            _state(stock, group, one.columns.get(key), key, depth, tokens, now)
            for depth, (key, tokens) in enumerate(columns, first)
        ]
        for group, one in zip(stock.layout.groups, stock.maps_of(maker), strict=True)
    }


def _state(
    stock: Stock,
    group: Group,
    column: Column | None,
    key: bytes,
    depth: int,
    tokens: int,
    now: float,
) -> ColumnState:
    state = _reason_in(stock, group, column, key, now) or "ready"
    if column is None or column.state is not State.READY:
        return ColumnState(depth, tokens, state)
    return ColumnState(
        depth,
        tokens,
        state,
        now - column.stored_at,
        now - column.used_at,
        None if column.expires_at == NEVER else column.expires_at - now,
        column.uses,
        column.priority,
        column.slot,
        no_spill=stock.why_no_spill(column),
    )


def whole_columns(prompt: HasKeys) -> list[KeyedColumn]:
    """The whole columns of a prompt, whose tokens need not be known."""
    return [KeyedColumn(key, COLUMN_TOKENS) for key in prompt.keys]


def all_columns(prompt: Prompt) -> list[KeyedColumn]:
    """All columns of a prompt, the tail included."""
    whole, rest = divmod(prompt.tokens, COLUMN_TOKENS)
    columns = whole_columns(prompt)
    if rest and prompt.maker.unit_columns == 1:
        columns.append(KeyedColumn(prompt.tail(whole, rest), rest))
    return columns
