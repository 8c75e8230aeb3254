"""What a cache can serve of a prompt."""

from __future__ import annotations

from typing import Final, NamedTuple

NEVER: Final = float("inf")


class Hit(NamedTuple):
    """The prefix of a prompt that a driver can serve, from its first token on. `tokens`: from memory.
    `tier2_tokens`: how many more may follow from tier 2, as far as the driver knows. `expires_at`: when
    the first column of both expires, in wall time; NEVER without an end, and for nothing."""

    tokens: int
    tier2_tokens: int = 0
    expires_at: float = NEVER


NOTHING: Final = Hit(0)
