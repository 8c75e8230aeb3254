"""What the picker asks of whoever decides, and what it reports back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the client has sent it. Names of headers are in lower case; one that came several
    times is joined with commas. `among`: the endpoints that the gateway allows, as `IP:port` or `IP`;
    None: all."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    among: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client is answered without any replica: a refusal, or what the brain knows itself."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class Refused(Exception):
    """The request goes nowhere; the client gets this answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Place(Protocol):
    """A request that has a replica. It is told what becomes of it, `ended` last and exactly once."""

    @property
    def endpoints(self) -> Sequence[str]:
        """`IP:port` of the replica, then of those to try if it cannot be reached."""

    @property
    def path(self) -> str:
        """With the query, as the replica is asked."""

    @property
    def headers(self) -> Mapping[str, str]:
        """All that the replica gets of the client's headers, and what is added. Names in lower case."""

    @property
    def body(self) -> bytes:
        """As the replica gets it."""

    @property
    def answer_headers(self) -> Mapping[str, str]:
        """For the client, beside what the replica sends."""

    def answered(self, status: int, served: str | None) -> None:
        """The head of the answer has come. `served`: which endpoint sent it, if the gateway says so."""

    def received(self, data: bytes, *, ends: bool) -> bytes:
        """A piece of the answer's body. Returns what the client gets now. `ends`: the last one."""

    def ended(self, *, whole: bool) -> None:
        """Nothing follows. `whole`: the answer has come to its end."""


class Router(Protocol):
    """Decides where requests go."""

    @property
    def is_ready(self) -> bool:
        """Whether it knows enough to decide."""

    def whose(self, headers: Mapping[str, str]) -> str:
        """The org of a request with these headers; empty for nobody whose body is to be read."""

    async def route(self, asked: Asked) -> Place | Answer:
        """Find a replica, perhaps after a wait in a queue. A call that is cancelled leaves nothing.
        Raises Refused."""


JSON: Final = {"content-type": "application/json"}


def failure(status: int, message: str, kind: str, code: str | None = None) -> Answer:
    """An error as OpenAI's API has them."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return Answer(status, msgspec.json.encode({"error": error}), JSON)
