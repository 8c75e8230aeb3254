"""Telling many processes at once what to be, and asking what they are. No database."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, Final, TypeVar

import httpx

AT_ONCE_MAX: Final = 128
TIMEOUT: Final = httpx.Timeout(5.0, connect=2.0)
UNREACHED: Final = (httpx.HTTPError, httpx.InvalidURL)
NO_SENSE: Final = "Its answer makes no sense: is it one of ours, and of this version?"
_PROBLEM_MAX: Final = 500

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The control API of an agent or a driver."""

    url: str
    token: str


@dataclass(frozen=True, slots=True)
class Call:
    endpoint: Endpoint
    method: str
    path: str
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """Ask; or with a document, tell, and ask unless the answer says it all."""

    key: int
    endpoint: Endpoint
    document: bytes | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """`generation` is what it was told last, `observed_generation` what it is. `problem` is what is not
    as it should be: it can't be reached, has refused the document, or has not done all of it."""

    key: int
    reached: bool  # and its answer understood
    refused: bool = False
    generation: int = 0
    observed_generation: int = 0
    problem: str = ""


def send(orders: Iterable[Order]) -> list[Answer]:
    """All of them, a bounded number at a time. Whoever does not answer costs nobody else anything."""
    return asyncio.run(_send(list(orders)))


async def _send(orders: list[Order]) -> list[Answer]:
    async with _client(TIMEOUT) as client:
        return await _each(_deliver(client, order) for order in orders)


def ask_all(calls: Iterable[Call], timeout: httpx.Timeout = TIMEOUT) -> list[httpx.Response | str]:
    """Their answers, in order; or in a sentence why there is none."""

    async def ask_each() -> list[httpx.Response | str]:
        async with _client(timeout) as client:
            return await _each(_answered(client, call) for call in calls)

    return asyncio.run(ask_each())


async def _answered(client: httpx.AsyncClient, call: Call) -> httpx.Response | str:
    try:
        return await _ask(client, call)
    except UNREACHED as error:
        return _why_unreached(error)


def _client(timeout: httpx.Timeout) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=AT_ONCE_MAX, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=timeout, limits=limits, verify=_trusted())


async def _each(tasks: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    places = asyncio.Semaphore(AT_ONCE_MAX)  # or those who wait for a connection would be out of time

    async def one(task: Coroutine[Any, Any, T]) -> T:
        async with places:
            return await task

    return await asyncio.gather(*map(one, tasks))


async def _ask(client: httpx.AsyncClient, asked: Call) -> httpx.Response:
    """Raises one of UNREACHED."""
    headers = {"Authorization": f"Bearer {asked.endpoint.token}", "Content-Type": "application/json"}
    address = f"{asked.endpoint.url.rstrip('/')}{asked.path}"
    return await client.request(asked.method, address, content=asked.body, headers=headers)


def _why_unreached(error: httpx.HTTPError | httpx.InvalidURL) -> str:
    if isinstance(error, httpx.InvalidURL):
        return f"Its address is none: {error}."
    return f"It does not answer: {str(error) or type(error).__name__}."[:_PROBLEM_MAX]


async def _deliver(client: httpx.AsyncClient, order: Order) -> Answer:
    refused = ""
    try:
        if order.document is not None:
            told = await _ask(client, Call(order.endpoint, "PUT", "/v1/desired", order.document))
            if told.status_code != HTTPStatus.ACCEPTED:
                refused = refusal(told)
            elif "observed_generation" in (follows := told.json()):  # it does so before it answers
                return _answer(order.key, follows)
        found = await _ask(client, Call(order.endpoint, "GET", "/v1/observed"))
        if found.status_code != HTTPStatus.OK:
            return Answer(order.key, reached=False, problem=refused or refusal(found))
        return _answer(order.key, found.json(), refused)
    except UNREACHED as error:
        return Answer(order.key, reached=False, problem=_why_unreached(error))
    except (ValueError, KeyError, TypeError):
        return Answer(order.key, reached=False, problem=NO_SENSE)


def _answer(key: int, observed: Mapping[str, Any], refused: str = "") -> Answer:
    return Answer(
        key,
        reached=True,
        refused=bool(refused),
        generation=int(observed["generation"]),
        observed_generation=int(observed["observed_generation"]),
        problem=refused or _shortfall(observed),
    )


def refusal(answer: httpx.Response) -> str:
    """What it said against it."""
    try:
        detail = str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        detail = ""
    return f"It answered {answer.status_code}. {detail}".strip()[:_PROBLEM_MAX]


def _shortfall(observed: Mapping[str, Any]) -> str:
    """What is not as it should be yet, shard by shard."""
    reasons = [
        f"{shard.get('shard') or shard.get('name')}: {shard['reason']}"
        for shard in observed.get("shards", ())
        if shard.get("reason")
    ]
    return "; ".join(reasons)[:_PROBLEM_MAX]


@cache
def _trusted() -> ssl.SSLContext:
    """Reading the system's certificates takes longer than telling a hundred drivers."""
    return ssl.create_default_context()
