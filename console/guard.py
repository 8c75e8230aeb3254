"""What happens to a request before Django sees it: it is bounded by who sends it.

Django's ASGI handler stores a body whole, on disk if it is large, before anything asks who has sent it.
So the body is received here: a little of anybody's, since that is what the log-in form takes; more only
for a credential that is good. Requests of people and processes that are known have places of their own;
all others share a few, in which addresses take turns. Django says which credentials were good, and whose
(`request_context.note_known`), and they are remembered for a while, as hashes. Shares are of people and
processes: who has many sessions and tokens has no more than who has one.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connection

from console.accounts.hashing import SHARE as HASHING
from console.api import problems
from console.live import access
from console.metrics import requests as figures
from console.shell.request_context import KNOWN, address_behind
from kvss_agent.http.server import HttpBounds, HttpPolicy
from kvss_agent.limits.admission import Places
from kvss_agent.limits.origins import origin_of
from kvss_agent.limits.shares import FairShare, NoShare, Shares
from telemetry.metrics import Sink
from telemetry.units import size

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

STRANGERS_BODY_BYTES_MAX: Final = 64 << 10  # a log-in, a joining, a heartbeat
KNOWN_BODY_BYTES_MAX: Final = 2 * settings.DATA_UPLOAD_MAX_MEMORY_SIZE  # Django says so of half of that
# Archives, of who is known: over the API, and in the form of the page.
UPLOADS: Final = dict.fromkeys(("/api/v1/tokenizers", "/tokenizers/"), settings.TOKENIZER_BYTES_MAX)
WAIT_SECONDS: Final = 5.0  # for a place
RETRY_SECONDS: Final = 5
KNOWN_MAX: Final = 8192  # credentials that are remembered
KNOWN_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request does not come to a view."""

    status: HTTPStatus
    kind: str  # of problem, in the API
    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class _Known:
    """Whose a credential is, and until when that is believed."""

    owner: str
    until: float


class Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.sentence)
        self.refusal = refusal


TOO_LARGE: Final = Refusal(
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "TooLarge",
    "too_large",
    f"A request has at most {size(settings.DATA_UPLOAD_MAX_MEMORY_SIZE)}.",
)
UPLOAD_TOO_LARGE: Final = replace(
    TOO_LARGE, sentence=f"An upload has at most {size(settings.TOKENIZER_BYTES_MAX)}."
)
WHO_IS_IT: Final = Refusal(
    HTTPStatus.UNAUTHORIZED,
    "Unauthenticated",
    "unauthenticated",
    f"Log in or send a token: without, a request has at most {size(STRANGERS_BODY_BYTES_MAX)}.",
)
BUSY: Final = Refusal(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "Unavailable",
    "busy",
    "Too much is asked at the moment. Try again in a few seconds.",
)


class Guard:
    """Stands before Django. Lives on one event loop."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self.strangers = FairShare(Shares(total=32, per_owner=16))
        self.known = FairShare(Shares(total=128, per_owner=32, reserved=1, waiting=1024))
        self.bodies = FairShare(Shares(total=64 << 20, per_owner=16 << 20))
        self.refused: Counter[str] = Counter()
        self._credentials: OrderedDict[bytes, _Known] = OrderedDict()  # good ones

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        credential = _credential(scope)
        try:
            await self._pass(scope, receive, send, credential)
        except Refused as refused:
            self.refused[refused.refusal.reason] += 1
            await _say(refused.refusal, scope, send)
        if scope.get(KNOWN) and credential is not None:
            self._remember(credential, scope[KNOWN])

    async def _pass(self, scope: Scope, receive: Receive, send: Send, credential: bytes | None) -> None:
        length, most = _length(scope), _most(scope)
        too_large = UPLOAD_TOO_LARGE if scope["path"] in UPLOADS else TOO_LARGE
        if length is not None and length > most:
            raise Refused(too_large)
        is_large = length is None or length > STRANGERS_BODY_BYTES_MAX
        owner = self._owner_of(credential)
        if is_large and owner is None and credential is not None:
            owner = await sync_to_async(_owner_of, thread_sensitive=False)(scope)
        if owner is None:
            body = await _received(receive, length, STRANGERS_BODY_BYTES_MAX, WHO_IS_IT)
            share, origin = self.strangers, origin_of(_address(scope))
            await self._answer(share, origin, scope, receive, send, body)
            return
        async with _held(self.bodies, owner, most if length is None else length):
            body = await _received(receive, length, most, too_large)
            await self._answer(self.known, owner, scope, receive, send, body)

    async def _answer(
        self,
        share: FairShare,
        owner: str,
        scope: Scope,
        receive: Receive,
        send: Send,
        body: bytes | None,
    ) -> None:
        if body is None:
            return  # its sender has left
        async with _held(share, owner, 1):
            await self._application(scope, _after(body, receive), send)

    def _owner_of(self, credential: bytes | None) -> str | None:
        """None for a stranger."""
        known = self._credentials.get(credential) if credential is not None else None
        return known.owner if known and known.until > time.monotonic() else None

    def _remember(self, credential: bytes, owner: str) -> None:
        self._credentials[credential] = _Known(owner, time.monotonic() + KNOWN_SECONDS)
        self._credentials.move_to_end(credential)
        while len(self._credentials) > KNOWN_MAX:
            self._credentials.popitem(last=False)

    def collect(self, into: Sink) -> None:
        """From the emitter's thread."""
        admission = POLICY.admission
        into.put(
            figures.CONNECTIONS,
            [({"peer": "known"}, admission.proven), ({"peer": "stranger"}, admission.strangers)],
        )
        into.put(figures.ENDED, [({"bound": name}, n) for name, n in POLICY.refused.copy().items()])
        shares = (("known", self.known), ("stranger", self.strangers))
        into.put(
            figures.UNDER_WAY,
            [
                ({"peer": peer, "state": state}, count)
                for peer, share in shares
                for state, count in (("answered", share.used), ("waiting", share.waiting))
            ],
        )
        into.put(figures.TURNED_AWAY, [({"reason": why}, n) for why, n in self.refused.copy().items()])
        into.put(
            figures.HASHES,
            [({"state": "running"}, HASHING.used), ({"state": "waiting"}, HASHING.waiting)],
        )
        into.put(figures.HASHES_REFUSED, [({}, HASHING.refused)])


def _policy() -> HttpPolicy:
    """Behind proxies all connections have few addresses, and requests are told apart by the guard."""
    has_proxies = settings.ENVIRONMENT.trusted_proxies > 0
    places = Places(
        strangers_max=1024 if has_proxies else 256,
        strangers_per_origin=1024 if has_proxies else 64,
        proven_max=4096,
    )
    return HttpPolicy(HttpBounds(), places)


POLICY: Final = _policy()


@contextlib.asynccontextmanager
async def _held(share: FairShare, owner: str, amount: int) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(share.held_async(owner, amount, seconds=WAIT_SECONDS))
        except NoShare:
            raise Refused(BUSY) from None
        yield


def _header(scope: Scope, name: bytes) -> bytes:
    """Where it comes several times, as one list: so Django takes it, too."""
    return b",".join(value for key, value in scope["headers"] if key == name)


def _length(scope: Scope) -> int | None:
    """Of the body, as it is announced; None for as long as it goes on."""
    if _header(scope, b"transfer-encoding"):
        return None
    length = _header(scope, b"content-length")
    return int(length) if length.isdigit() else 0


def _most(scope: Scope) -> int:
    """How long its body may be, if its sender is known."""
    return UPLOADS.get(scope["path"], KNOWN_BODY_BYTES_MAX)


def _address(scope: Scope) -> str:
    client = scope.get("client")
    forwarded = _header(scope, b"x-forwarded-for").decode("latin-1")
    return address_behind(forwarded, client[0] if client else None) or ""


def _credential(scope: Scope) -> bytes | None:
    """What is shown, as a hash; None if it is nothing at all."""
    authorization = _header(scope, b"authorization")
    found = _SESSION.search(_header(scope, b"cookie"))
    session = found[1] if found else b""
    if not authorization and not session:
        return None
    return blake2b(b"%d:%s%s" % (len(authorization), authorization, session), digest_size=16).digest()


def _owner_of(scope: Scope) -> str | None:
    """Whose what is shown is; None where it opens nothing. In a thread: asks the database."""
    try:
        principal = access.principal_of(access.credential_of(scope))
        return principal.owner if principal else None
    finally:
        connection.close()


async def _received(receive: Receive, length: int | None, most: int, refusal: Refusal) -> bytes | None:
    """The body; None if its sender leaves in the middle of it."""
    if length is not None and length > most:
        raise Refused(refusal)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            raise Refused(refusal)
        if not message.get("more_body", False):
            return bytes(body)


def _after(body: bytes, receive: Receive) -> Receive:
    """First the body, then what comes after it: that its sender leaves."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def then() -> Message:
        return left.pop() if left else await receive()

    return then


async def _say(refusal: Refusal, scope: Scope, send: Send) -> None:
    headers = [(b"cache-control", b"no-store")]
    if refusal is BUSY:
        headers.append((b"retry-after", str(RETRY_SECONDS).encode()))
    if scope["path"].startswith("/api/"):
        problem = problems.problem(refusal.kind, refusal.sentence)
        body, kind = problems.encoded(problem), problems.CONTENT_TYPE
    else:
        body, kind = refusal.sentence.encode(), "text/plain; charset=utf-8"
    headers += [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})


_SESSION: Final = re.compile(rb"(?:^|[;,]\s*)" + settings.SESSION_COOKIE_NAME.encode() + rb"=([^;,]+)")
