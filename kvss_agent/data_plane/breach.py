"""Why a connection was closed: a short list, so that it can be counted and shown."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Every way in which the agent ends a connection that its peer did not end."""

    MALFORMED = "malformed"  # these bytes are no frame
    UNEXPECTED = "unexpected"  # a frame, but not one that may come now
    VERSION = "version"  # no version that both speak
    AUTHENTICATION = "authentication"  # not who it says, or not allowed to use this shard
    ABSENT = "absent"  # no such shard here
    BUSY = "busy"  # the shard has a writer, or too many readers; asking again may help
    ORDER = "order"  # evicts are missing
    LIMIT = "limit"  # more at once than was agreed
    STALLED = "stalled"  # stopped in the middle of a frame, or does not read its answers
    SUPERSEDED = "superseded"  # its driver has connected anew
    DRAINING = "draining"  # the agent stops
    GONE = "gone"  # the shard was removed, or the peer broke off


class Breach(Exception):
    """The connection has to end. Nothing outside of it has changed."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause
