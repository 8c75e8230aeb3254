"""Why columns are missed, told column by column: for what is counted, and for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from swdriver_shim.cache.matching import Match, Path
from swdriver_shim.cache.prefix_map import Column, State
from swdriver_shim.cache.reasons import Reason
from swdriver_shim.cache.stock import Stock
from swdriver_shim.cache.trails import Trail
from swdriver_shim.keys import COLUMN_TOKENS, Keys, Prompt
from swdriver_shim.policy import NEVER, Tiers

_ON_THEIR_WAY: Final = {State.WRITING: Reason.WRITING, State.COMING: Reason.TIER2_LATE}


@dataclass(frozen=True, slots=True)
class ColumnState:
    """One column of a prompt, for people: what it is, and why not."""

    depth: int
    tokens: int
    state: str  # "ready", or the reason why it is missed
    age_seconds: float | None = None
    idle_seconds: float | None = None
    expires_in_seconds: float | None = None
    uses: int | None = None
    priority: int | None = None
    slot: int | None = None
    tier2: bool = False  # it is there, and would be brought back


def reason(stock: Stock, column: Column | None, key: bytes, now: float) -> Reason | None:
    """Why this column can't be served; None if it can."""
    if column is None or column.state is State.EMPTY:
        return stock.ghosts.why(key)
    if column.state in _ON_THEIR_WAY:
        return _ON_THEIR_WAY[column.state]
    if column.home.account.policy.tiers is Tiers.NONE:
        return Reason.NO_STORE
    if column.expires_at <= now:
        return Reason.EXPIRED
    return None if stock.reachable else Reason.AGENT_LOST


def tell(stock: Stock, match: Match, paths: Sequence[Path], now: float) -> None:
    """Why each token behind the hit is missed. What is there, behind a gap, has the gap's reason."""
    tokens = max(match.tokens, match.had) + match.settled.total()
    missed = match.missed = Counter(match.settled)
    match.reasons = _reasons(stock, match.keys, paths, tokens // COLUMN_TOKENS, now)
    for why, count in Counter(match.reasons).items():
        missed[why] += count * COLUMN_TOKENS
    left = match.asked - tokens - (missed.total() - match.settled.total())
    # The tail, less what is hit of a column.
    missed[match.reasons[-1] if match.reasons else Reason.NEVER_STORED] += left


def _reasons(
    stock: Stock, keys: Sequence[bytes], paths: Sequence[Path], first: int, now: float
) -> list[Reason]:
    """Why each column from this one on is missed."""
    if first < len(keys) and not any(paths[0].found[first:]):  # most often there is nothing
        return stock.ghosts.reasons(keys[first:])
    gap, reasons = Reason.NEVER_STORED, list[Reason]()
    for depth in range(first, len(keys)):
        for path in paths:
            if why := reason(stock, path.found[depth], keys[depth], now):
                gap = why
                break
        reasons.append(gap)
    return reasons


def explain(stock: Stock, prompt: Prompt, now: float) -> dict[str, list[ColumnState]]:
    """Group by group and column by column: what is there, until when, and why not."""
    return _explained(stock, prompt.maker, _keys(prompt), now)


def explain_keys(stock: Stock, trail: Trail, now: float) -> dict[str, list[ColumnState]]:
    """The same of whole columns whose tokens are not here."""
    return _explained(stock, trail.maker, [(key, COLUMN_TOKENS) for key in trail.keys], now)


def _explained(
    stock: Stock, maker: Keys, keys: Sequence[tuple[bytes, int]], now: float
) -> dict[str, list[ColumnState]]:
    return {
        group.name: [
            _state(stock, one.columns.get(key), key, depth, tokens, now)
            for depth, (key, tokens) in enumerate(keys)
        ]
        for group, one in zip(stock.layout.groups, stock.maps_of(maker), strict=True)
    }


def _state(
    stock: Stock, column: Column | None, key: bytes, depth: int, tokens: int, now: float
) -> ColumnState:
    state = reason(stock, column, key, now) or "ready"
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
    )


def _keys(prompt: Prompt) -> list[tuple[bytes, int]]:
    """Of all its columns, the tail included, with the tokens of each."""
    whole, rest = divmod(prompt.tokens, COLUMN_TOKENS)
    keys = [(key, COLUMN_TOKENS) for key in prompt.keys]
    if prompt.maker.unit_columns > 1:
        return keys
    return [*keys, (prompt.tail(whole, rest), rest)] if rest else keys
