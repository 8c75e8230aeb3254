"""What a driver asks of an agent's control API: to pull the slots of a shard that moves there.

It shows the agent's token where a person has written that into its document; a console gives it a
capability for the move instead, and its certificate says that it is the driver that this is for.
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

from kvss_agent.http.blocking_exchange import BlockingExchange
from kvss_agent.http.exchange import Budget, Fault, Reply, Unanswered
from kvss_agent.security.certificates import key_name
from telemetry.decoder import ANSWER, MESSAGE, Count, excerpt

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 10.0  # for one question and its answer
PULL_SECONDS_MAX: Final = 120.0  # for one batch of slots
LOOK_SECONDS: Final = 0.02  # between looks at how far a pull is


class PullResult(NamedTuple):
    """So many bytes came; `done` if that was all that there was."""

    done: bool
    bytes: int


class _Pull(Struct, frozen=True):
    """As an agent tells of one."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,64}\Z")]
    state: str
    reason: str = ""
    moved_bytes: Count = 0


@dataclass(frozen=True, slots=True)
class AgentControl:
    """The control API of one agent."""

    url: str
    token: str = field(default="", repr=False)
    # The capability that holds now: it is renewed while a move goes on.
    capability: Callable[[], str] | None = field(default=None, repr=False)
    key: str = ""  # the fingerprint of the agent's, where it serves TLS
    tls: Callable[[], ssl.SSLContext | None] | None = field(default=None, repr=False)

    def exchange(self) -> BlockingExchange:
        """To be closed. Raises ValueError where the agent can't be asked as it has to be."""
        context = self.tls() if self.tls and self.key else None
        if self.key and self.url.startswith("https:") and context is None:
            raise ValueError("there is no certificate to show yet")
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
        """Have these slots fetched from another agent, in this driver's name.

        Slots that could not be had are found out by their seals. Raises nothing.
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
                return PullResult(pull.state == "done", moved)
        except (Unanswered, ValueError) as error:
            log.warning("A pull of %s by %s has failed: %s", shard, self.url, error)
            return PullResult(False, moved)
