"""Passwords are hashed with Argon2id, which takes 100 MiB each time: so a few at once, in turns.

Everything that hashes or checks a password passes here, since this is the hasher. Addresses take turns,
so a flood from one costs others a moment; whoever can't have a turn soon is told to come again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from django.contrib.auth.hashers import Argon2PasswordHasher

from console.shell import request_context
from console.shell.errors import NotNow
from kvss_agent.limits.origins import origin_of
from kvss_agent.limits.shares import FairShare, NoShare, Shares

AT_ONCE: Final = 2
WAITING_MAX: Final = 16
WAITING_PER_ORIGIN: Final = 4
WAIT_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 5
SHARE: Final = FairShare(
    Shares(total=AT_ONCE, per_owner=AT_ONCE, waiting=WAITING_MAX, waiting_per_owner=WAITING_PER_ORIGIN)
)


class BoundedArgon2(Argon2PasswordHasher):
    """Django's; its hashes are the same."""

    def encode(self, password: str, salt: str) -> str:
        with _turn():
            return super().encode(password, salt)

    def verify(self, password: str, encoded: str) -> bool:
        with _turn():
            return super().verify(password, encoded)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Raises NotNow."""
    context = request_context.current()
    origin = origin_of(context.address) if context and context.address else ""
    claimed = contextlib.ExitStack()
    try:
        claimed.enter_context(SHARE.held(origin, seconds=WAIT_SECONDS))
    except NoShare:
        raise NotNow("Too many people are logging in at the moment.", RETRY_SECONDS) from None
    with claimed:
        yield
