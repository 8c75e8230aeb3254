"""Membership in a console's fleet: joining once, and then a heartbeat every few seconds.

Nothing waits for the console. While it is unreachable the process keeps following its last desired
document; the worst consequence is that the console marks the process as lost.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import math
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import msgspec

from kvss_agent import native
from kvss_agent.http.answers import PLAIN
from kvss_agent.process.options import redis_url
from kvss_agent.security.identity import Unusable
from kvss_agent.security.trust import Trust
from telemetry.decoder import MESSAGE, Malformed, decode, excerpt

log = logging.getLogger(__name__)

ANSWER_SECONDS_MAX: Final = 5.0
ANSWER_BYTES_MAX: Final = 64 << 10
BEAT_SECONDS: Final = 5.0  # until the console says otherwise, within these limits:
BEAT_SECONDS_MIN: Final = 0.2
BEAT_SECONDS_MAX: Final = 60.0
AGAIN_SECONDS: Final = 0.5  # after the first failure; then twice as long each time, up to
AGAIN_SECONDS_MAX: Final = 10.0
CERTIFIED_SECONDS: Final = 0.2  # after a new certificate: the console waits to hear of it
RENEWAL_SECONDS: Final = 3600.0  # between certificates, unless there are other authorities
REFUSED_SECONDS: Final = 15.0  # somebody has to do something first
NO_USE: Final = "The join token does not work (any more): make a new one on the console's page “Join”."
HOW_TO_JOIN: Final = "Start it once with a join token: --join-token, or `join` of an engine."
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def credential(token: str, name: str) -> str:
    """What the heartbeats of `node:ax-1` are known by. Both sides make it from the token of the control
    API, so it is never handed over; and it is of no use for anything but heartbeats."""
    made = hmac.digest(token.encode(), f"tidegate heartbeat 1 {name}".encode(), hashlib.sha256)
    return "tgh_" + base64.urlsafe_b64encode(made).rstrip(b"=").decode()


@dataclass(slots=True)
class MembershipStatus:
    """The state of the membership, and counts of calls to the console by result."""

    state: str = "alone"  # "joining", "joined", "away" (it does not answer), "refused"
    reason: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    telemetry_url: str = ""  # of the Redis that the console wants telemetry in
    has_telemetry: asyncio.Event = field(default_factory=asyncio.Event)

    def shown(self) -> dict[str, str]:
        return {"state": self.state, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Console:
    """The console's URL, and what the process presents to join."""

    url: str
    join_token: str = field(default="", repr=False)
    authorities: Path | None = None  # authorities of its certificate, if not the system's

    def verify(self) -> ssl.SSLContext | bool:
        """Raises OSError, also for a file that holds no certificates."""
        if self.authorities is None:
            return True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.authorities)
        return context

    @property
    def is_in_the_open(self) -> bool:
        """Whether others on the network can read the requests: plain HTTP, and not on loopback."""
        parts = urlsplit(self.url)
        return parts.scheme == "http" and parts.hostname not in LOOPBACK


@dataclass(frozen=True, slots=True)
class JoiningProcess:
    """The process that joins. `kind` is nodes or drivers; `topic` is that of its telemetry."""

    kind: str
    topic: str
    name: str
    token: str = field(repr=False)  # of its control API, for requests of the console
    facts: Mapping[str, Any]  # sent with each heartbeat
    once: Mapping[str, Any]  # sent when it joins
    trust: Trust | None = None  # our certificate and trusted authorities, from the console
    is_new: bool = False  # no console knows this process yet
    # Facts that are looked up anew for each heartbeat, in a thread.
    look_up: Callable[[], Mapping[str, Any]] = dict

    def path(self, verb: str) -> str:
        return f"/api/v1/{self.kind}/{self.name}/{verb}"


class _Answer(msgspec.Struct):
    heartbeat_seconds: float = BEAT_SECONDS
    authorities: str = ""  # the digest of what to believe; a console of an older version has none
    telemetry_url: str = ""


class _Certified(msgspec.Struct):
    certificate: str
    authorities: str
    digest: str


class _Problem(msgspec.Struct):
    detail: str = ""


_ANSWER: Final = msgspec.json.Decoder(_Answer)
_CERTIFIED: Final = msgspec.json.Decoder(_Certified)
_PROBLEM: Final = msgspec.json.Decoder(_Problem)


class Member:
    """Joins and sends heartbeats until `run` is cancelled."""

    def __init__(self, console: Console, identity: JoiningProcess, status: MembershipStatus) -> None:
        self.console = console
        self.identity = identity
        self.status = status
        self._credential = credential(identity.token, identity.topic)
        self._is_unknown = identity.is_new and bool(console.join_token)
        self._failures = 0
        self._why_unknown = ""  # as the console says
        self._renewed_at = -math.inf

    async def run(self) -> None:
        self.status.state = "joining"
        async with httpx.AsyncClient(
            base_url=self.console.url,
            timeout=ANSWER_SECONDS_MAX,
            follow_redirects=False,
            verify=self.console.verify(),
        ) as client:
            while True:
                # What fails in a heartbeat must not be the last one: nobody would notice its end.
                [seconds] = await asyncio.gather(self.once(client), return_exceptions=True)
                if isinstance(seconds, BaseException):
                    log.error("A heartbeat failed with an internal error", exc_info=seconds)
                    seconds = self._away("a heartbeat failed with an internal error; see the log")
                # Not all at the same moment, also after the console was away for all of them.
                await asyncio.sleep(seconds * random.uniform(0.8, 1.0))  # noqa: S311

    async def once(self, client: httpx.AsyncClient) -> float:
        """Send a heartbeat, or join. Returns after how many seconds to do so again. Raises nothing."""
        try:
            answer = await (self._join(client) if self._is_unknown else self._beat(client))
        except httpx.HTTPError as error:
            if not isinstance(error, httpx.ConnectError):
                self._is_unknown = False  # the request may have arrived
            return self._away(f"{type(error).__name__}: {error}".rstrip(": "))
        self._is_unknown = False
        if answer.is_success:
            seconds = self._joined(answer)
            is_told = await self._renew(client, answer)
            return min(seconds, CERTIFIED_SECONDS) if is_told else seconds
        if answer.is_client_error and answer.status_code != HTTPStatus.TOO_MANY_REQUESTS:
            return self._refused(answer)
        return self._away(f"it answers {answer.status_code}")

    async def _beat(self, client: httpx.AsyncClient) -> httpx.Response:
        """Send a heartbeat, or join if the console does not know us and there is a join token."""
        answer = await self._ask(client, "heartbeat", self._credential, await self._facts())
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            self._why_unknown = _detail_of(answer) or "It does not know us."
            if self.console.join_token:
                return await self._join(client)
        return answer

    async def _join(self, client: httpx.AsyncClient) -> httpx.Response:
        us = self.identity
        told = {**await self._facts(), **us.once, "control_token": us.token}
        return await self._ask(client, "join", self.console.join_token, told)

    async def _facts(self) -> Mapping[str, Any]:
        us = self.identity
        looked_up = await asyncio.to_thread(us.look_up)
        facts = {**us.facts, **looked_up, "mover": native.current().name}
        return {**facts, "trusts": us.trust.digest} if us.trust and us.trust.digest else facts

    async def _renew(self, client: httpx.AsyncClient, beat: httpx.Response) -> bool:
        """Request a certificate if one is due. Returns whether other authorities are believed now: the
        next heartbeat reports it. Failures are retried after the next heartbeat."""
        trust, digest = self.identity.trust, _decoded(beat).authorities
        if trust is None or not digest or not trust.is_due(digest):
            return False
        is_renewal = digest == trust.digest
        if is_renewal and time.monotonic() < self._renewed_at + RENEWAL_SECONDS:
            return False  # one that has just come, and is old by our clock
        request = {"certificate_request": trust.identity.certificate_request()}
        try:
            answer = await self._ask(client, "certificate", self._credential, request)
            if answer.is_success:
                told = decode(answer.content, _CERTIFIED, MESSAGE)
                trust.accept(told.certificate, told.authorities, told.digest)
                problem = ""
            else:
                problem = f"the console answers {answer.status_code}"
        except (httpx.HTTPError, Malformed, Unusable, OSError) as error:
            problem = str(error)
        if problem:
            self.status.calls["not certified"] += 1
            log.warning("Certificate request failed: %s", problem)
            return False
        self.status.calls["certified"] += 1
        self._renewed_at = time.monotonic()
        log.info("The console has issued a certificate")
        if trust.is_due(trust.digest):
            log.warning(
                "The certificate has just been issued, and is about to expire by the clock here: "
                "this clock or the console's is wrong"
            )
        return not is_renewal

    async def _ask(
        self, client: httpx.AsyncClient, verb: str, bearer: str, body: Mapping[str, Any]
    ) -> httpx.Response:
        """Bounded: an answer is short, whoever gives it."""
        headers = {"authorization": f"Bearer {bearer}", "accept-encoding": "identity"}
        path = self.identity.path(verb)
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS_MAX),
                client.stream("POST", path, json=dict(body), headers=headers) as answer,
            ):
                if answer.headers.get("content-encoding", "").strip().lower() not in PLAIN:
                    raise httpx.DecodingError("its answer is compressed", request=answer.request)
                content = b""
                async for piece in answer.aiter_bytes():
                    content += piece
                    if len(content) > ANSWER_BYTES_MAX:
                        raise httpx.DecodingError("its answer is too long", request=answer.request)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer within {ANSWER_SECONDS_MAX:g} s") from None
        return httpx.Response(answer.status_code, content=content)

    def _joined(self, answer: httpx.Response) -> float:
        self._failures = 0
        self._now("joined", "")
        told = _decoded(answer)
        if told.telemetry_url and not self.status.has_telemetry.is_set():
            self._take_telemetry(told.telemetry_url)
        return min(max(told.heartbeat_seconds, BEAT_SECONDS_MIN), BEAT_SECONDS_MAX)

    def _take_telemetry(self, url: str) -> None:
        try:
            self.status.telemetry_url = redis_url(url)
        except ValueError:
            log.warning("The console names an address for telemetry that is none: %s", excerpt(url))
            return
        self.status.has_telemetry.set()

    def _refused(self, answer: httpx.Response) -> float:
        said = _detail_of(answer)
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            todo = NO_USE if self.console.join_token else HOW_TO_JOIN
            said = f"{self._why_unknown} {todo}".strip()
        self._now("refused", said[:500] or f"it answers {answer.status_code}")
        return REFUSED_SECONDS

    def _away(self, reason: str) -> float:
        self._failures += 1
        self._now("away", reason[:500])
        return float(min(AGAIN_SECONDS * 2 ** min(self._failures - 1, 10), AGAIN_SECONDS_MAX))

    def _now(self, state: str, reason: str) -> None:
        status = self.status
        status.calls[state] += 1
        if (state, reason) != (status.state, status.reason):
            level = logging.INFO if state == "joined" else logging.WARNING
            log.log(level, "Console %s: %s%s", self.console.url, state, f": {reason}" if reason else "")
        status.state, status.reason = state, reason


def _detail_of(answer: httpx.Response) -> str:
    try:
        return excerpt(decode(answer.content, _PROBLEM, MESSAGE).detail)
    except Malformed:
        return ""


def _decoded(answer: httpx.Response) -> _Answer:
    try:
        return decode(answer.content, _ANSWER, MESSAGE)
    except Malformed:
        return _Answer()


@contextlib.asynccontextmanager
async def member(
    console: Console | None, identity: JoiningProcess, status: MembershipStatus
) -> AsyncIterator[None]:
    """Be a member of the fleet while this context lasts. Without a console it does nothing."""
    if console is None:
        yield
        return
    task = asyncio.create_task(Member(console, identity, status).run(), name="heartbeat")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
