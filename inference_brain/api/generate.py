"""Completions and chat completions: the whole life of a request that comes over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from inference_brain.api import errors
from inference_brain.api.errors import SERVER, ApiError, unavailable
from inference_brain.api.events import DONE, EventStream, Renaming, usage_of
from inference_brain.api.exchange import ClientLeft, ClientTooSlow, Exchange, Header
from inference_brain.asking import NoReplica
from inference_brain.journey import Journey, is_failure
from inference_brain.outbound import path_of
from inference_brain.upstream.fleet import Replica
from kvss_agent.http.client.client import Answer, Client
from kvss_agent.http.client.failures import Late, Lost, TooLong, UpstreamFailed
from telemetry.decoder import ANSWER

REPLICA_HEADER: Final = b"x-tidegate-replica"  # who answered, for load tools and people
ERROR_BYTES_MAX: Final = ANSWER.bytes_max  # of an engine's error: as much as can be decoded
STATUS_MAX: Final = 599


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: `whole` for an answer that is no stream; `client` until a client takes the next piece."""

    whole: float = 3600.0
    client: float = 30.0


class Broken(Exception):
    """The replica failed after something of its answer was passed on. No other can continue it."""


class Generator:
    """Carries requests to replicas, and answers back."""

    def __init__(self, client: Client, patience: Patience, streams: Callable[[int], None]) -> None:
        """`streams`: is told of each stream that begins, with 1, and ends, with -1."""
        self._client = client
        self._patience = patience
        self._streams = streams

    async def serve(self, exchange: Exchange, journey: Journey, headers: Sequence[Header]) -> None:
        """Answer a request that has its place. Raises ApiError if nothing has been answered yet, and
        ClientLeft. The journey has its end afterwards."""
        result = "error"
        try:
            await self._try_replicas(exchange, journey, headers)
            result = "ok"
        except ApiError as error:
            result = "invalid" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "failed"
            raise
        except ClientTooSlow:
            result = "client_slow"
            raise
        except (ClientLeft, asyncio.CancelledError):
            result = "client_left"
            raise
        except Broken:
            result = "broken"
        finally:
            journey.end(result)

    async def _try_replicas(
        self, exchange: Exchange, journey: Journey, headers: Sequence[Header]
    ) -> None:
        last: ApiError | None = None
        while True:
            try:
                replica = journey.attempt()
            except NoReplica as error:
                raise last or unavailable(str(error), "no_replica") from None
            try:
                last = await self._try(exchange, journey, replica, headers)
                reason = "status"
            except UpstreamFailed as error:
                journey.failed(error)
                reason = error.reason
                last = _of_failure(error)
            if last is None:
                return
            if not journey.may_retry(reason):
                raise last

    async def _try(
        self, exchange: Exchange, journey: Journey, replica: Replica, headers: Sequence[Header]
    ) -> ApiError | None:
        """Ask one replica. None: it has answered, and the client has that; an error that another replica
        may do better than. Raises UpstreamFailed as long as nothing has been passed on; later Broken."""
        request = journey.asking.request
        seconds = None if request.is_stream else self._patience.whole
        url, body = replica.url(path_of(request)), journey.body(replica)
        headers = [*headers, (REPLICA_HEADER, replica.name.encode())]
        sent = self._client.open("POST", url, journey.headers(replica), body, seconds)
        replica.unanswered.add(sent)  # it may be given up until its answer has begun
        try:
            async with sent as answer:
                return await self._take(exchange, journey, replica, answer, headers)
        finally:
            replica.unanswered.discard(sent)

    async def _take(
        self,
        exchange: Exchange,
        journey: Journey,
        replica: Replica,
        answer: Answer,
        headers: Sequence[Header],
    ) -> ApiError | None:
        """Pass an answer on; what `_try` returns and raises."""
        request = journey.asking.request
        if answer.status != HTTPStatus.OK:
            if not HTTPStatus.BAD_REQUEST <= answer.status <= STATUS_MAX:
                raise Lost(f"The replica answered with the unexpected status {answer.status}.")
            is_full = answer.status == HTTPStatus.SERVICE_UNAVAILABLE and bool(
                answer.header("retry-after")
            )
            error = errors.of_replica(answer.status, await _error_of(answer))
            return _refused(journey, error, is_full=is_full)
        renaming = Renaming(replica.served_as, journey.asking.model.name)
        if request.is_stream:
            return await self._stream(exchange, journey, answer, renaming, headers)
        before = exchange.held
        try:
            raw = await answer.whole(take=exchange.take)
        except TooLong as error:  # no other replica would say less
            journey.first_token()
            raise errors.answer_too_large(str(error)) from None
        except ApiError:  # no memory: the replica has done its work
            journey.first_token()
            journey.end("rejected")
            raise
        except UpstreamFailed:
            exchange.give_back(before)  # another replica may answer
            raise
        journey.first_token()
        journey.usage = usage_of(raw)
        journey.end("ok")  # however long its client takes: the replica is done with it
        raw = renaming(raw)  # which is not kept beside it
        await exchange.answer(200, raw, headers)
        return None

    async def _stream(
        self,
        exchange: Exchange,
        journey: Journey,
        answer: Answer,
        renaming: Renaming,
        headers: Sequence[Header],
    ) -> ApiError | None:
        events = EventStream(renaming, wants_usage=journey.asking.request.wants_usage)
        first = await self._first_events(answer, events)  # until then another replica can answer
        if events.failure and not events.passed:
            return _refused(journey, events.failure)
        answer.begun()
        journey.first_token()
        await exchange.begin_stream(headers)
        self._streams(1)
        try:
            await self._pass_on(exchange, journey, answer, events, first)
        except UpstreamFailed as error:
            journey.failed(error)
            await exchange.send(_cut_off(error).event())
            await exchange.end_stream()
            raise Broken from error
        finally:
            self._streams(-1)
        if events.failure:
            await exchange.end_stream()
            raise Broken
        await exchange.send(DONE)
        await exchange.end_stream()
        return None

    async def _pass_on(
        self,
        exchange: Exchange,
        journey: Journey,
        answer: Answer,
        events: EventStream,
        first: bytes,
    ) -> None:
        """All events of an answer. Raises UpstreamFailed if it has no end."""
        journey.usage, journey.events_passed = events.usage, events.passed
        if first:
            await exchange.send(first)
        while (piece := await answer.piece()) is not None:
            journey.heard()
            passed = events.feed(piece)
            journey.usage, journey.events_passed = events.usage, events.passed
            if passed:
                await exchange.send(passed)
        if not events.is_done:
            raise _ended_early()

    async def _first_events(self, answer: Answer, events: EventStream) -> bytes:
        """The first events for the client; none if the answer is over without any. Raises
        UpstreamFailed."""
        try:
            async with asyncio.timeout_at(answer.first_until):  # whatever head and comments come
                while (piece := await answer.piece(is_first=True)) is not None:
                    if passed := events.feed(piece):
                        return passed
        except TimeoutError:
            seconds = self._client.timeouts.first
            raise Late(f"No token came from the replica for {seconds:g} s.") from None
        if not events.is_done:
            raise _ended_early()
        return b""


async def _error_of(answer: Answer) -> bytes:
    """What an engine says of an error; nothing, where that is more than it may be. Some repeat in it
    what they were asked."""
    try:
        return await answer.whole(ERROR_BYTES_MAX)
    except TooLong:
        return b""


def _refused(journey: Journey, error: ApiError, *, is_full: bool = False) -> ApiError:
    """The replica has answered with an error: raises it as the client's, or returns it for another
    replica to do better."""
    if not is_failure(error.status):
        raise error
    journey.failed(None, is_full=is_full)
    return _passed_on(error)


def _ended_early() -> Lost:
    return Lost("The replica ended its answer too early.")


def _passed_on(error: ApiError) -> ApiError:
    """A replica's failure, as the client's error. What is wrong with the brain's own key is not its."""
    if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
        return ApiError(
            502, "The replica refused the brain's request.", kind=SERVER, code="replica_refused"
        )
    return error


def _of_failure(error: UpstreamFailed) -> ApiError:
    if isinstance(error, Late):
        return ApiError(504, str(error), kind=SERVER, code="replica_timeout")
    return ApiError(502, str(error), kind=SERVER, code="replica_failed")


def _cut_off(error: UpstreamFailed) -> ApiError:
    """The last event of a stream that has no end."""
    code = "stream_timeout" if isinstance(error, Late) else "stream_broken"
    return ApiError(502, f"The answer is incomplete. {error}", kind=SERVER, code=code)
