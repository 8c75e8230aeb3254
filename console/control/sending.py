"""Telling many processes at once what to be, and asking what they are. No database.

Each is a target of its own: what one answers, or does not, is found out within its own budget and
becomes its own `Answer`. Who has failed before waits for one of a few places that are kept for those,
so that they never take the places of the others.

Every process of the console knows what is sent, and few send: what speaks HTTP, and certificates, are
loaded by those.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

from django.conf import settings

from console.control.observed import Observed, Told
from console.fleet.models import Brain, Driver, Node
from kvss_agent.http.answers import (
    AT_ONCE_MAX,
    SENTENCE_CHARACTERS_MAX,
    Budget,
    Fault,
    Reply,
    Unanswered,
)
from kvss_agent.process.settings import is_loopback
from telemetry.decoder import Malformed, excerpt

if TYPE_CHECKING:
    from kvss_agent.http.exchange import Exchange

log = logging.getLogger(__name__)

QUESTION: Final = Budget(5.0)
TARGET_SECONDS: Final = 6.0  # for all that a target is told and asked in a round
ROUND_SECONDS: Final = 8.0  # who has not been asked by then is asked in the next one
IN_THE_OPEN: Final = (
    "Its control API is plain HTTP, where tokens and keys can be read on the way. Update it; or, while "
    "others of its version are updated, set TIDEGATE_PLAIN_CONTROL."
)
SUSPECTS_AT_ONCE_MAX: Final = 16  # of those that have failed; the other places are not for them

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The control API of a process. `server_name`: which certificate it has to show. One that joined
    before there were keys has none."""

    url: str
    token: str = field(repr=False)
    server_name: str = ""

    @classmethod
    def of(cls, joined: Node | Driver | Brain) -> Endpoint:
        from console.authority import client  # see above

        name = client.server_name(joined.public_key) if joined.public_key else ""
        return cls(joined.control_url, str(joined.control_token), name)

    @property
    def is_in_the_open(self) -> bool:
        """Whether others on the network could read what it is told."""
        try:
            parts = urlsplit(self.url)
        except ValueError:
            return False  # it is no address, and that is said when it is asked
        return parts.scheme == "http" and not is_loopback(parts.hostname or "")


@dataclass(frozen=True, slots=True)
class Call:
    endpoint: Endpoint
    method: str
    path: str
    body: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Order:
    """Ask; or with a document, tell, and ask unless the answer says it all.

    `is_suspect`: it has failed before, so it gets one of the places for those.
    """

    key: int
    endpoint: Endpoint
    document: bytes | None = field(default=None, repr=False)
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """`generation` is what it was told last, `observed_generation` what it is. `problem` is what is not
    as it should be: it can't be reached, has refused the document, or has not done all of it. `fault`
    says in what way its answer was none, and is None where it was one. `asked`: there was time for it.
    """

    key: int
    generation: int = 0
    observed_generation: int = 0
    refused: bool = False
    problem: str = ""
    fault: Fault | None = None
    asked: bool = True

    @property
    def reached(self) -> bool:
        """And its answer understood."""
        return self.asked and self.fault is None


def ask_all(calls: Iterable[Call], budget: Budget = QUESTION) -> list[Reply | str]:
    """Their answers, in order; or in a sentence why there is none. It takes at most twice the budget."""
    from console.authority import client  # see above
    from kvss_agent.http.exchange import run

    tls = client.context()

    async def ask_each() -> list[Reply | str]:
        ends = time.monotonic() + 2 * budget.seconds
        places = asyncio.Semaphore(AT_ONCE_MAX)

        async def ask(exchanges: _Exchanges, call: Call) -> Reply | str:
            async with places:
                left = min(budget.seconds, ends - time.monotonic())
                if left <= 0:
                    return "There was no time left to ask it: too many others did not answer."
                asking = _ask(exchanges, call, Budget(left, budget.bytes_max))
                try:
                    return await _contained(call.endpoint, asking)
                except Unanswered as error:
                    return str(error)

        async with _exchanges(tls) as exchanges:
            return await asyncio.gather(*(ask(exchanges, call) for call in calls))

    return run(ask_each())


def invalid(error: Malformed) -> str:
    """What is said of a target whose answer is none."""
    return excerpt(
        f"Its answer is not valid: {error}. Is it one of ours, and of this version?",
        SENTENCE_CHARACTERS_MAX,
    )


# A round


def send(orders: Sequence[Order], seconds: float = ROUND_SECONDS) -> Iterator[Answer]:
    """An answer for each order, as they come in; the last ones when the time is up.

    They are asked in a thread, so that whoever writes answers down holds up nobody who is still asked.
    """
    from console.authority import client  # see above
    from kvss_agent.http.exchange import run

    answers: SimpleQueue[Answer | None] = SimpleQueue()
    tls = client.context()

    def ask() -> None:
        try:
            run(_ask_each(orders, time.monotonic() + seconds, answers.put, tls))
        finally:
            answers.put(None)

    thread = Thread(target=ask, name="control round")
    thread.start()
    try:
        yield from iter(answers.get, None)
    finally:
        thread.join()


async def _ask_each(
    orders: Sequence[Order], ends: float, answered: Callable[[Answer], None], tls: ssl.SSLContext
) -> None:
    places = asyncio.Semaphore(AT_ONCE_MAX - SUSPECTS_AT_ONCE_MAX)
    for_suspects = asyncio.Semaphore(SUSPECTS_AT_ONCE_MAX)

    async def one(exchanges: _Exchanges, order: Order) -> Answer:
        async with for_suspects if order.is_suspect else places:
            if ends - time.monotonic() < TARGET_SECONDS / 3:
                return Answer(order.key, asked=False)
            return await _deliver(exchanges, order, min(ends, time.monotonic() + TARGET_SECONDS))

    async with _exchanges(tls) as exchanges:
        await asyncio.gather(*(_accounted(order, one(exchanges, order), answered) for order in orders))


async def _accounted(
    order: Order, asking: Awaitable[Answer], answered: Callable[[Answer], None]
) -> None:
    """Its answer is handed on in any case. What nobody has foreseen is that target's problem, too."""
    try:
        answer = await _contained(order.endpoint, asking)
    except Unanswered as error:
        answer = Answer(order.key, problem=str(error), fault=error.fault)
    answered(answer)


async def _contained(endpoint: Endpoint, asking: Awaitable[T]) -> T:
    """What it comes to. Raises Unanswered, and nothing else."""
    [answer] = await asyncio.gather(asking, return_exceptions=True)
    if isinstance(answer, Unanswered):
        raise answer
    if isinstance(answer, BaseException):
        log.error("Asking %s failed inside", endpoint.url, exc_info=answer)
        raise Unanswered(Fault.FAILED, "Asking it failed inside; the log tells more.")
    return answer


async def _deliver(exchanges: _Exchanges, order: Order, ends: float) -> Answer:
    refused = ""
    try:
        if order.document is not None:
            told = await _ask(
                exchanges, Call(order.endpoint, "PUT", "/v1/desired", order.document), _left(ends)
            )
            if told.status_code != HTTPStatus.ACCEPTED:
                refused = told.refusal
            elif observed := told.read(Told).observed:  # it does so before it answers
                return _answer(order.key, observed)
        found = await _ask(exchanges, Call(order.endpoint, "GET", "/v1/observed"), _left(ends))
        if found.status_code != HTTPStatus.OK:
            return Answer(order.key, problem=refused or found.refusal, fault=Fault.REFUSED)
        return _answer(order.key, found.read(Observed), refused)
    except Unanswered as error:
        return Answer(order.key, problem=str(error), fault=error.fault)
    except Malformed as error:
        return Answer(order.key, problem=invalid(error), fault=Fault.MALFORMED)


def _left(ends: float) -> Budget:
    return Budget(min(QUESTION.seconds, max(0.0, ends - time.monotonic())))


def _answer(key: int, observed: Observed, refused: str = "") -> Answer:
    return Answer(
        key,
        generation=observed.generation,
        observed_generation=observed.observed_generation,
        refused=bool(refused),
        problem=refused or excerpt(observed.shortfall, SENTENCE_CHARACTERS_MAX),
    )


@dataclass(frozen=True, slots=True)
class _Exchanges:
    """Those that have keys are known by certificates of our authority, others by the system's."""

    of_ours: Exchange
    of_others: Exchange


@contextlib.asynccontextmanager
async def _exchanges(tls: ssl.SSLContext) -> AsyncIterator[_Exchanges]:
    from kvss_agent.http.exchange import Exchange  # see above

    async with Exchange(tls) as of_ours, Exchange(_trusted()) as of_others:
        yield _Exchanges(of_ours, of_others)


async def _ask(exchanges: _Exchanges, call: Call, budget: Budget) -> Reply:
    """Raises Unanswered."""
    if call.endpoint.is_in_the_open and not settings.PLAIN_CONTROL:
        raise Unanswered(Fault.UNREACHED, IN_THE_OPEN)
    address = f"{call.endpoint.url.rstrip('/')}{call.path}"
    there = call.endpoint
    exchange = exchanges.of_ours if there.server_name else exchanges.of_others
    return await exchange.ask(
        call.method, address, there.token, budget, call.body, server_name=there.server_name
    )


@cache
def _trusted() -> ssl.SSLContext:
    """Reading the system's certificates takes longer than telling a hundred drivers."""
    return ssl.create_default_context()
