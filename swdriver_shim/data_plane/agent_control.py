"""Requests of a driver to an agent's control API: pulling the slots of a shard that moves there.

The driver shows the agent's token if its document has one. A console issues a capability for the move
instead, for the driver that the certificate names.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvss_agent.http.answers import Budget, Fault, Reply, Unanswered
from kvss_agent.http.blocking_exchange import BlockingExchange
from kvss_agent.limits.background import REST_SECONDS_MAX
from kvss_agent.security.certificates import key_name
from telemetry.decoder import ANSWER, MESSAGE, Count, excerpt

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 10.0  # for one question and its answer
PULL_SECONDS_MAX: Final = 120.0  # for one batch of slots
LOOK_SECONDS: Final = 0.02  # between looks at how far a pull is


class PullResult(NamedTuple):
    """How many bytes were pulled, whether that is everything, and how long the agent would rest before
    the next pull."""

    done: bool
    bytes: int
    rest_seconds: float = 0.0


class _Pull(Struct, frozen=True):
    """A pull, as an agent reports it."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,64}\Z")]
    state: str
    reason: str = ""
    moved_bytes: Count = 0
    rest_seconds: Annotated[float, Meta(ge=0, le=REST_SECONDS_MAX)] = 0.0


@dataclass(frozen=True, slots=True)
class AgentControl:
    """The control API of one agent."""

    url: str
    token: str = field(default="", repr=False)
    # Returns the current capability: it is renewed during a move.
    capability: Callable[[], str] | None = field(default=None, repr=False)
    key: str = ""  # the fingerprint of the agent's, where it serves TLS
    tls: Callable[[], ssl.SSLContext | None] | None = field(default=None, repr=False)

    def exchange(self) -> BlockingExchange:
        """An exchange that has to be closed. Raises ValueError without the certificate that TLS
        needs."""
        context = self.tls() if self.tls and self.key else None
        if self.key and self.url.startswith("https:") and context is None:
            raise ValueError("this driver has no certificate yet")
        return BlockingExchange(self.url, context, key_name(self.key) if self.key else "")

    def ask(self, agent: BlockingExchange, method: str, path: str, told: object = None) -> Reply:
        """Raises Unanswered, also where the agent refuses."""
        bearer = self.capability() if self.capability else self.token
        content = None if told is None else msgspec.json.encode(told)
        reply = agent.ask(method, path, bearer, Budget(ASK_SECONDS, ANSWER.bytes_max), content)
        if not reply.is_success:
            raise Unanswered(Fault.REFUSED, reply.refusal)
        return reply

    def pull(
        self, shard: str, source: str, source_shard: str, driver: str, after: int, slots: Sequence[int]
    ) -> PullResult:
        """Have the agent fetch these slots from another one, in this driver's name. Raises nothing.

        Slots that were not fetched are detected later, by their seals.
        """
        asked = {"from": source, "shard": source_shard, "as": driver, "after": after, "slots": slots}
        moved = 0
        try:
            with contextlib.closing(self.exchange()) as agent:
                pull = self.ask(agent, "POST", f"/v1/shards/{shard}/pull", asked).read(_Pull, MESSAGE)
                until = time.monotonic() + PULL_SECONDS_MAX
                while pull.state == "running" and time.monotonic() < until:
                    time.sleep(LOOK_SECONDS)
                    pull = self.ask(agent, "GET", f"/v1/pulls/{pull.id}").read(_Pull, MESSAGE)
                    moved = pull.moved_bytes
                if pull.state != "done":
                    log.warning("A pull of %s is %s: %s", shard, pull.state, excerpt(pull.reason))
                return PullResult(pull.state == "done", moved, pull.rest_seconds)
        except (Unanswered, ValueError) as error:
            log.warning("A pull of %s by %s has failed: %s", shard, self.url, error)
            return PullResult(False, moved)
