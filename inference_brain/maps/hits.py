"""What caches can serve of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, overload

import numpy as np
import numpy.typing as npt

NEVER: Final = float("inf")
_UNKNOWN: Final = -1
Numbers = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


class Hit(NamedTuple):
    """The prefix of a prompt that a driver can serve, from its first token on. `tokens`: from memory.
    `tier2_tokens`: how many more may follow from tier 2, as far as the driver knows. `expires_at`: when
    the first column of both expires, in wall time; NEVER without an end, and for nothing."""

    tokens: int
    tier2_tokens: int = 0
    expires_at: float = NEVER


NOTHING: Final = Hit(0)


class Hits(Sequence[Hit | None]):
    """What each of several drivers can serve; None for one whose map is not known.

    A look-up among a thousand drivers finds arrays: `Hit` objects are made when they are asked for.
    `tokens` is negative where the map is not known.
    """

    __slots__ = ("expires_at", "tier2_tokens", "tokens")

    def __init__(self, tokens: Numbers, tier2_tokens: Numbers, expires_at: Times) -> None:
        self.tokens, self.tier2_tokens, self.expires_at = tokens, tier2_tokens, expires_at

    @classmethod
    def unknown(cls, count: int) -> Hits:
        """Of so many drivers without a map."""
        return cls(np.full(count, _UNKNOWN), np.zeros(count, np.int64), np.full(count, NEVER))

    @classmethod
    def of(cls, hits: Iterable[Hit]) -> Hits:
        """Of these."""
        hits = list(hits)
        return cls(
            np.array([one.tokens for one in hits], np.int64),
            np.array([one.tier2_tokens for one in hits], np.int64),
            np.array([one.expires_at for one in hits], np.float64),
        )

    def put(self, places: Numbers, hits: Hits) -> None:
        """Set those of these drivers."""
        self.tokens[places] = hits.tokens
        self.tier2_tokens[places] = hits.tier2_tokens
        self.expires_at[places] = hits.expires_at

    def set(self, places: Numbers, hit: Hit | None) -> None:
        """Set all of these drivers to the same."""
        tokens, tier2_tokens, expires_at = hit or Hit(_UNKNOWN)
        self.tokens[places] = tokens
        self.tier2_tokens[places] = tier2_tokens
        self.expires_at[places] = expires_at

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, at: int) -> Hit | None: ...
    @overload
    def __getitem__(self, at: slice) -> list[Hit | None]: ...
    def __getitem__(self, at: int | slice) -> Hit | list[Hit | None] | None:
        if isinstance(at, slice):
            return list(self)[at]
        tokens = int(self.tokens[at])
        if tokens < 0:
            return None
        return Hit(tokens, int(self.tier2_tokens[at]), float(self.expires_at[at]))

    def __iter__(self) -> Iterator[Hit | None]:
        lists = (self.tokens.tolist(), self.tier2_tokens.tolist(), self.expires_at.tolist())
        return (Hit(*one) if one[0] >= 0 else None for one in zip(*lists, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
