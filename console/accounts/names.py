"""How users and tokens are named where something is noted of them, and the widths of those names.

Every column that stores an author takes its width from here, so no allowed name is too long to record.
"""

from __future__ import annotations

from typing import Final

USERNAME_MAX: Final = 63
TOKEN_NAME_MAX: Final = 120
ACCOUNT: Final = "account:"  # and a user's number: who takes places, and a topic for hints alone
_BY: Final = " by token "
# A user who acts by a token: `ada by token resize bot`.
ACTOR_NAME_MAX: Final = USERNAME_MAX + len(_BY) + TOKEN_NAME_MAX


def actor_name(username: str, token_name: str | None = None) -> str:
    """What the audit trail and whatever else keeps an author's name writes down."""
    return username if token_name is None else f"{username}{_BY}{token_name}"
