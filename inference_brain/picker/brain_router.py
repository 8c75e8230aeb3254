"""Requests of gateways on their way through the brain: the same as any other's, up to who carries them.

A gateway's request goes through the same application as one that comes over HTTP: keys, validation,
limits, queues, the access log. Where the application would carry the request to a replica, `Carrier`
hands its place to the gateway instead, and waits for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

from inference_brain.api.errors import ApiError, of_replica, unavailable
from inference_brain.api.events import DONE, EventStream, Renaming, Usage, usage_of
from inference_brain.api.exchange import ClientLeft, Exchange, Header
from inference_brain.asking import NoReplica
from inference_brain.journey import Journey, is_failure
from inference_brain.outbound import path_of
from inference_brain.picker.addresses import Addresses, allows
from inference_brain.picker.routing import Answer, Asked, Place
from inference_brain.router import Router
from inference_brain.upstream.fleet import Replica
from kvss_agent.http.client.failures import Lost, Unreachable, UpstreamFailed

ENDPOINTS_MAX: Final = 3  # the chosen one, and those to try if it cannot be reached
KEPT_BYTES_MAX: Final = 16 << 20  # of an answer that is not a stream, for its usage
CUT_OFF: Final = "cut_off"  # in the middle of its answer, and it is not known by whom
_PASSAGE: Final = "tidegate.passage"
_HOP_BY_HOP: Final = frozenset({"content-length", "transfer-encoding", "connection"})

Application = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]
WhyGone = Callable[[Replica], Awaitable[UpstreamFailed | None]]


class _Passage:
    """One request between the gateway and the application."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.placed: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._has_been_read = False
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = b""

    def scope(self) -> MutableMapping[str, Any]:
        path, _, query = self.asked.path.partition("?")
        headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in self.asked.headers.items()
        ]
        return {
            "type": "http",
            "method": self.asked.method,
            "path": path,
            "query_string": query.encode("latin-1"),
            "headers": headers,
            _PASSAGE: self,
        }

    async def receive(self) -> MutableMapping[str, Any]:
        if self._has_been_read:
            await asyncio.Event().wait()  # whoever leaves cancels us
        self._has_been_read = True
        return {"type": "http.request", "body": self.asked.body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
        else:
            self._body += message.get("body", b"")

    def answer(self) -> Answer:
        """What the application has answered itself."""
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in self._headers}
        kept = {name: value for name, value in headers.items() if name not in _HOP_BY_HOP}
        return Answer(self._status, self._body, kept)


class BrainRouter:
    """The router of a brain's picker."""

    def __init__(
        self,
        application: Application,
        is_ready: Callable[[], bool],
        whose: Callable[[str], str],
    ) -> None:
        """`whose`: the org of a header `authorization` whose key is valid; empty if it is not."""
        self._application = application
        self._is_ready = is_ready
        self._whose = whose

    @property
    def is_ready(self) -> bool:
        return self._is_ready()

    def whose(self, headers: Mapping[str, str]) -> str:
        return self._whose(headers.get("authorization", ""))

    async def route(self, asked: Asked) -> Place | Answer:
        passage = _Passage(asked)
        carrying = asyncio.ensure_future(
            self._application(passage.scope(), passage.receive, passage.send)
        )
        waiting: set[asyncio.Future[Any]] = {carrying, passage.placed}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)
            raise
        if passage.placed.done():
            return passage.placed.result()
        await carrying
        return passage.answer()


class Carrier:
    """Serves requests by telling a gateway where to send them: in place of `api.generate.Generator`."""

    def __init__(self, router: Router, streams: Callable[[int], None], why_gone: WhyGone) -> None:
        self._router = router
        self._streams = streams
        self._why_gone = why_gone
        self._addresses = Addresses()

    async def serve(self, exchange: Exchange, journey: Journey, headers: Sequence[Header]) -> None:
        """Returns when the answer has ended. Raises ApiError if the request has no replica."""
        passage: _Passage = exchange.scope[_PASSAGE]
        result = "error"
        try:
            place = await self._place(passage.asked, journey, headers)
            passage.placed.set_result(place)
            result = await place.over
            if result == CUT_OFF:
                result = await self._by_whom(journey)
            exchange.status = place.status
        except asyncio.CancelledError:
            result = "client_left"
            raise
        except NoReplica as error:
            result = "failed"
            raise unavailable(str(error), "no_replica") from None
        finally:
            journey.end(result)
        if result == "client_left":
            raise ClientLeft

    async def _by_whom(self, journey: Journey) -> str:
        """Who has cut an answer off: gateways say the same of a client and of a replica. So the replica
        is asked whether it is still there."""
        replica = journey.replica
        if replica is None or (failure := await self._why_gone(replica)) is None:
            return "client_left"
        journey.failed(failure)
        return "broken"

    async def _place(self, asked: Asked, journey: Journey, headers: Sequence[Header]) -> JourneyPlace:
        """Raises NoReplica."""
        model = journey.asking.model.name
        found_at: dict[str, str | None] = {}
        # Again for those that have come, or moved, while names were looked up.
        while urls := {one.spec.url for one in self._router.fleet.of(model)} - found_at.keys():
            found_at |= await self._addresses.endpoints(urls)
        endpoints = {one.name: found_at[one.spec.url] for one in self._router.fleet.of(model)}
        journey.avoid(
            name for name, at in endpoints.items() if at is None or not allows(asked.among, at)
        )
        replica = journey.attempt()
        estimates = journey.routed.choice.estimates if journey.routed else ()
        others = sorted(estimates, key=lambda one: one.seconds)
        names = [replica.name, *(one.name for one in others if one.name != replica.name)]
        found = [self._router.fleet.replica(model, name) for name in names]
        chosen = {
            str(endpoints[one.name]): one.name
            for one in found
            if one is not None and _is_asked_alike(one, replica)
        }
        told = {name.decode(): value.decode() for name, value in headers}
        first = dict(list(chosen.items())[:ENDPOINTS_MAX])
        return JourneyPlace(journey, replica, first, told, self._streams)


def _is_asked_alike(one: Replica, other: Replica) -> bool:
    """Whether both understand the same request; a claim for another driver costs hits only."""
    return (
        one.served_as == other.served_as
        and one.spec.engine == other.spec.engine
        and one.spec.api_key == other.spec.api_key
        and urlsplit(one.url("")).path == urlsplit(other.url("")).path
    )


class JourneyPlace:
    """A journey whose bytes the gateway carries: a `Place`."""

    def __init__(
        self,
        journey: Journey,
        replica: Replica,
        names: Mapping[str, str],
        answer_headers: Mapping[str, str],
        streams: Callable[[int], None],
    ) -> None:
        """`names`: of the replicas by endpoint, the chosen one first."""
        request = journey.asking.request
        self.endpoints: Sequence[str] = list(names)
        self.path = urlsplit(replica.url(path_of(request))).path
        self.headers: Mapping[str, str] = journey.headers(replica)
        self.body = journey.body(replica)
        self.answer_headers = answer_headers
        self.status = 0
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._journey = journey
        self._names = names
        self._streams = streams
        self._is_streaming = False
        self._renaming = Renaming(replica.served_as, journey.asking.model.name)
        self._events = EventStream(self._renaming, wants_usage=request.wants_usage)
        self._kept: list[bytes] = []
        self._kept_bytes = 0

    def answered(self, status: int, served: str | None) -> None:
        self.status = status
        if served and served in self._names and served != self.endpoints[0]:
            self._moved_to(self._names[served])
        if status != HTTPStatus.OK and is_failure(status):
            self._journey.failed(None)
        elif status == HTTPStatus.OK and self._journey.asking.request.is_stream:
            self._is_streaming = True
            self._streams(1)

    def _moved_to(self, name: str) -> None:
        """The gateway could not reach the replica that was chosen."""
        journey = self._journey
        journey.failed(Unreachable("The gateway could not reach it."))
        journey.avoid(other for other in self._names.values() if other != name)
        try:
            journey.attempt()
        except NoReplica:
            return  # it has left the document meanwhile

    def received(self, data: bytes, *, ends: bool) -> bytes:
        if self._is_streaming:
            return self._passed_events(data, ends=ends)
        if data and self.status == HTTPStatus.OK:
            self._journey.first_token()
        must_hold = bool(self._renaming) or self.status != HTTPStatus.OK
        self._keep(data)
        if not must_hold:
            if ends:
                self._journey.usage = usage_of(self._whole())
            return data
        return self._converted() if ends else b""

    def _passed_events(self, data: bytes, *, ends: bool) -> bytes:
        events = self._events
        try:
            passed = events.feed(data)
        except Lost as error:
            return _cut_off(str(error))
        if passed and not self._refusal:
            self._journey.first_token()
        self._journey.usage, self._journey.events_passed = events.usage, events.passed
        if ends and events.is_done and not events.failure:
            return passed + DONE
        if ends and not events.is_done:
            return passed + _cut_off("The replica ended its answer too early.")
        return passed

    def _converted(self) -> bytes:
        raw = self._whole()
        if self.status != HTTPStatus.OK:
            return of_replica(self.status, raw).body()
        self._journey.usage = usage_of(raw)
        return self._renaming(raw)

    def _keep(self, data: bytes) -> None:
        self._kept_bytes += len(data)
        if self._kept_bytes <= KEPT_BYTES_MAX:
            self._kept.append(data)

    def _whole(self) -> bytes:
        return b"".join(self._kept) if self._kept_bytes <= KEPT_BYTES_MAX else b""

    def ended(self, *, whole: bool) -> None:
        if self._is_streaming:
            self._streams(-1)
        if self._refusal and is_failure(self._refusal.status):
            self._journey.failed(None)
        if not self.over.done():
            self.over.set_result(self._result(whole=whole))

    @property
    def _refusal(self) -> ApiError | None:
        """With what a stream has ended before it had a token."""
        return None if self._events.passed else self._events.failure

    def _result(self, *, whole: bool) -> str:
        """As `brain_requests_total` counts it, or CUT_OFF."""
        if not whole:
            # A gateway answers itself if no answer has begun, and that would have been its head.
            return CUT_OFF if self.status else "client_left"
        status = self._refusal.status if self._refusal else self.status
        if status != HTTPStatus.OK:
            is_clients = status < HTTPStatus.INTERNAL_SERVER_ERROR and not is_failure(status)
            return "invalid" if is_clients else "failed"
        if self._is_streaming and (self._events.failure or not self._events.is_done):
            return "broken"
        return "ok"

    @property
    def usage(self) -> Usage | None:
        return self._journey.usage


def _cut_off(message: str) -> bytes:
    """The last event of a stream that has no end."""
    error = unavailable(f"The answer is incomplete. {message}", "stream_broken", None)
    return error.event()
