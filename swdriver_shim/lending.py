"""How drivers of one model lend each other columns: what one asks, and what the other answers.

A driver that misses a prompt asks a sibling for its columns by their keys, which only who has the org's
secret can name. The sibling says in which slots they are, and keeps them there for a while. Agents fetch
the bytes from each other, and check by the seal that each is the column that was asked for: whatever a
sibling says wrong costs a miss.
"""

from __future__ import annotations

import hashlib
import hmac


def token_for(lender_secret: bytes, borrower: str) -> str:
    """What a borrower shows to a lender, whose secret the console knows, and the borrower does not."""
    return hmac.new(lender_secret, b"lend to " + borrower.encode(), hashlib.sha256).hexdigest()
