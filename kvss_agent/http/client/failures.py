"""How a replica can fail to answer. Sentences without its address: clients are shown them."""

from __future__ import annotations


class UpstreamFailed(Exception):
    """A replica did not answer, or not to the end."""

    reason = "failed"  # as `brain_retries_total` counts it


class Unreachable(UpstreamFailed):
    """No connection: it has seen nothing of the request."""

    reason = "unreachable"


class Lost(UpstreamFailed):
    """The connection broke, or what came was no HTTP."""

    reason = "lost"


class TooLong(UpstreamFailed):
    """The answer has more bytes than are taken. It may be what was asked for."""

    reason = "too_long"


class Late(UpstreamFailed):
    """Nothing has come for too long."""

    reason = "late"
