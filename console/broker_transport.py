"""Celery's transport for Redis, with what it lacks when a connection breaks.

A worker takes no more than it may have unacknowledged. If the connection breaks while it acknowledges,
kombu goes on counting that message. So the worker may take nothing, and does not look at the connection
on which it would see that it is broken: it stands still until somebody restarts it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from celery.app.amqp import AMQP
from kombu import Connection
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport import redis as redis_transport
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError

from telemetry.notify import notify

REFUSED: Final = (AuthenticationError, AuthorizationError, NoPermissionError)
AGAIN_SECONDS: Final = 1.0  # between attempts to connect, and no longer each time


class QoS(redis_transport.QoS):
    """What is taken and not acknowledged."""

    def ack(self, delivery_tag: Any) -> None:
        """Whatever Redis says, this connection has it no more. What Redis was not told is done again."""
        try:
            super().ack(delivery_tag)
        except self.channel.connection_errors:  # type: ignore[attr-defined]
            virtual.QoS.ack(self, delivery_tag)
            raise


class _Counts:
    """A channel that knows how many messages wait. In Redis a queue is one list for each priority."""

    def waiting(self, queue: str, priority: int) -> int:
        with self.conn_or_acquire() as client:  # type: ignore[attr-defined]
            return int(client.llen(self._q_for_pri(queue, priority)))  # type: ignore[attr-defined]


class Channel(_Counts, redis_transport.Channel):
    QoS = QoS


class Transport(redis_transport.Transport):
    Channel = Channel


class SentinelChannel(_Counts, redis_transport.SentinelChannel):
    QoS = QoS


class SentinelTransport(redis_transport.SentinelTransport):
    Channel = SentinelChannel


class PromptConnection(Connection):
    """Tries again every second, where Celery would wait for longer and longer: a new primary is there
    within seconds. A worker is alive meanwhile, though its event loop stands still: it alone gives a
    callback. Where Redis refuses it, it is not: that does not end by itself."""

    def ensure_connection(self, *args: Any, **options: Any) -> Any:
        every = {"interval_start": AGAIN_SECONDS, "interval_step": 0.0, "interval_max": AGAIN_SECONDS}
        if callback := options.get("callback"):
            options["callback"] = partial(_is_alive, callback)
        return super().ensure_connection(*args, **{**every, **options})


def _is_alive(callback: Callable[[], None]) -> None:
    """Called while the error of the last attempt is handled."""
    if not isinstance(sys.exception(), REFUSED):
        notify("WATCHDOG=1")
    callback()


class Amqp(AMQP):
    Connection = PromptConnection


def use() -> None:
    """Let Celery find these by the schemes of its URLs."""
    TRANSPORT_ALIASES.update(
        redis=f"{__name__}:Transport",
        rediss=f"{__name__}:Transport",
        sentinel=f"{__name__}:SentinelTransport",
    )
