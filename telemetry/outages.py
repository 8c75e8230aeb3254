"""When a process says that Redis is away: once an outage; where that is expected, only if it lasts."""

from __future__ import annotations

import logging
from typing import Final

from redis.exceptions import AuthenticationError

EXPECTED_SECONDS: Final = 30.0


class Outage:
    """What Redis refuses to one part of a process, by the monotonic times of its failures.

    A process has joined before Redis has its user: the console makes it within seconds. Until then it
    is not a fault that Redis does not know the process, as long as it never has.
    """

    def __init__(self, log: logging.Logger, sentence: str) -> None:
        """`sentence`: what does not happen meanwhile, without its end."""
        self._log = log
        self._sentence = sentence
        self._was_there = False
        self._since: float | None = None
        self._is_told = False

    def goes_on(self, error: Exception, now: float) -> None:
        is_new, self._since = self._since is None, now if self._since is None else self._since
        # The client for event loops raises it as the cause of another.
        refused = isinstance(error, AuthenticationError) or isinstance(
            error.__cause__, AuthenticationError
        )
        is_expected = refused and not self._was_there
        if is_expected and now - self._since < EXPECTED_SECONDS:
            if is_new:
                self._log.info("%s, until the console has made the user of this process", self._sentence)
        elif not self._is_told:
            self._log.warning("%s: %s", self._sentence, error)
            self._is_told = True

    def ends(self) -> None:
        self._was_there, self._since, self._is_told = True, None, False
