"""Requests to the REST API, and its answers as values or as failures."""

from __future__ import annotations

import contextlib
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec

from console.ctl.contexts import LOG_IN, Context
from console.ctl.failures import FieldError, Refused, TimedOut, Unavailable, Usage
from telemetry.decoder import DOCUMENT, Malformed, decode, excerpt
from telemetry.units import size
from telemetry.version import tidegate_version

T = TypeVar("T")
Item = dict[str, Any]
API: Final = "/api/v1"
PAGE_ROWS: Final = 200
REQUEST_SECONDS: Final = 30.0
TRIES_MAX: Final = 3  # of a request that says itself when to come again
PAUSE_SECONDS_MAX: Final = 5.0
LINE_BYTES_MAX: Final = 64 << 10  # longer ones are cut in two
PLAIN: Final = "identity"
OPERATION_LINK: Final = re.compile(rf"<{API}/operations/([0-9a-f-]{{36}})>")
# What the answer of a request with an Idempotency-Key is worth asking for again.
_AGAIN: Final = (429, 503)


class Answer(NamedTuple):
    status: int
    body: Any  # None for an empty one
    etag: str = ""


class _Field(msgspec.Struct):
    pointer: str = ""
    detail: str = ""


class _Problem(msgspec.Struct):
    reason: str
    detail: str
    title: str = ""
    request_id: str = ""
    errors: list[_Field] = []


class _Page(msgspec.Struct):
    items: list[Item]
    next_cursor: str | None = None


class Client:
    """One console. All failures are raised as `Failed`, in a sentence."""

    def __init__(self, context: Context, seconds: float = REQUEST_SECONDS) -> None:
        self.address = context.address
        self._seconds = seconds
        self._http = httpx.Client(
            base_url=context.address,
            headers={
                "Authorization": f"Bearer {context.token}",
                "User-Agent": f"tidegatectl/{tidegate_version()}",
                "Accept-Encoding": PLAIN,  # so that what is received is all that there is to keep
            },
            timeout=httpx.Timeout(seconds, connect=min(seconds, 10.0)),
            verify=context.verify(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        return self.ask("GET", path, query=query).body

    def items(self, path: str, query: Mapping[str, Any], most: int | None = None) -> Iterator[Item]:
        """All items of a list, page after page; at most so many of them."""
        cursor: str | None = None
        left = most
        while left is None or left > 0:
            limit = PAGE_ROWS if left is None else min(left, PAGE_ROWS)
            said = self.ask("GET", path, query={**query, "limit": limit, "cursor": cursor}).body
            page = self.as_kind(said, _Page)
            yield from page.items
            cursor = page.next_cursor
            if not cursor:
                return
            left = None if left is None else left - len(page.items)

    def as_kind(self, body: object, kind: type[T]) -> T:
        """An answer that has to be of this type. Raises Unavailable."""
        try:
            return msgspec.convert(body, kind)
        except msgspec.ValidationError as error:
            raise Unavailable(
                f"{self.address} answered with what is no answer of a console ({error})."
            ) from error

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        if_match: str | None = None,
    ) -> Answer:
        """The answer to a request below `/api/v1`. Raises Refused with the problem that it was given.

        A change has an Idempotency-Key, so where the console asks for patience it is asked again."""
        headers = {} if if_match is None else {"If-Match": if_match}
        if method != "GET":
            headers["Idempotency-Key"] = str(uuid4())
        if body is not None:
            headers["Content-Type"] = "application/json"
        given = {name: said(value) for name, value in (query or {}).items() if value is not None}
        content = None if body is None else msgspec.json.encode(body)
        for left in reversed(range(TRIES_MAX)):
            found = self._send(method, f"{API}{path}", params=given, headers=headers, content=content)
            pause = _pause(found)
            if pause is None or not left:
                break
            time.sleep(pause)
        return self._read(found)

    def lines(self, path: str, query: Mapping[str, Any], *, is_endless: bool = False) -> Iterator[str]:
        """Lines of text as they come. `is_endless`: the next one may take as long as it likes.

        Raises Refused before the first, and Unavailable where the answer breaks off."""
        given = {name: said(value) for name, value in query.items() if value is not None}
        seconds = httpx.Timeout(self._seconds, read=None) if is_endless else self._seconds
        path = f"{API}{path}"
        with self._failures(), self._http.stream("GET", path, params=given, timeout=seconds) as found:
            if found.status_code != 200:
                self._read(self._whole(found, time.monotonic() + self._seconds))
            left = b""
            for piece in self._pieces(found):
                *lines, left = (left + piece).split(b"\n")
                if len(left) > LINE_BYTES_MAX:
                    lines, left = [*lines, left], b""
                yield from (line.decode(errors="replace") for line in lines)
            if left:
                yield left.decode(errors="replace")

    def versions(self) -> dict[str, str]:
        """Of the console and what it is made of."""
        found = self._read(self._send("GET", "/-/versions")).body
        return self.as_kind(found, dict[str, str])

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        ends = time.monotonic() + self._seconds
        with self._failures(), self._http.stream(method, path, **more) as found:
            return self._whole(found, ends)

    def _whole(self, found: httpx.Response, ends: float) -> httpx.Response:
        """An answer that is read to its end, which has to be there in time."""
        raw = bytearray()
        for piece in self._pieces(found):
            raw += piece
            if len(raw) > DOCUMENT.bytes_max:
                raise Unavailable(f"{self.address} answered with more than {size(DOCUMENT.bytes_max)}.")
            if time.monotonic() > ends:
                raise self._late()
        return httpx.Response(found.status_code, headers=found.headers, content=bytes(raw))

    def _pieces(self, found: httpx.Response) -> Iterator[bytes]:
        if (encoding := found.headers.get("Content-Encoding", PLAIN)) != PLAIN:
            raise Unavailable(f"{self.address} answered in {excerpt(encoding, 20)!r}, as nobody asked.")
        return found.iter_raw()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Failures of the connection, in sentences."""
        try:
            yield
        except httpx.TimeoutException as error:
            raise self._late() from error
        except httpx.RequestError as error:
            raise Unavailable(self._why(error)) from error

    def _late(self) -> TimedOut:
        return TimedOut(f"{self.address} did not answer within {self._seconds:g} s.")

    def _why(self, error: httpx.RequestError) -> str:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return (
                    f"The certificate of {self.address} is not trusted: {cause.verify_message}. If the "
                    "console has an authority of its own, log in with --ca."
                )
            cause = cause.__cause__ or cause.__context__
        return f"{self.address} can't be reached: {str(error) or type(error).__name__}."

    def _read(self, found: httpx.Response) -> Answer:
        if found.status_code == 204:
            return Answer(204, None)
        if found.is_redirect:
            raise Unavailable(
                f"{self.address} redirects to {found.headers.get('Location', '')!r}. Log in there."
            )
        is_problem = found.status_code >= 400
        try:
            body = decode(found.content, _Problem if is_problem else object, DOCUMENT)
        except Malformed as error:
            raise Unavailable(
                f"{self.address} answered {found.status_code} with what is no answer of a console "
                f"({error}): {excerpt(found.text.strip(), 80)!r}"
            ) from error
        if isinstance(body, _Problem):
            detail = body.detail
            if body.errors and all(one.pointer in detail for one in body.errors):
                detail = body.title  # it is what the errors say, which follow anyway
            if found.status_code == 401:
                detail = f"The console does not accept this token. {LOG_IN}"
            errors = [FieldError(excerpt(one.pointer), excerpt(one.detail)) for one in body.errors[:20]]
            raise Refused(
                found.status_code,
                body.reason,
                excerpt(detail, 2000),
                errors,
                body.request_id,
                _operation_in_the_way(found, body.reason),
            )
        return Answer(found.status_code, body, found.headers.get("ETag", ""))


def at(template: str, *names: str) -> str:
    """A path with these names in its braces, whatever signs they have."""
    for name in names:
        if name in (".", ".."):  # which mean something else in a path
            raise Usage(f"{name!r} is no name.")
        before, _, rest = template.partition("{")
        template = before + quote(name, safe="") + rest.partition("}")[2]
    return template


def _operation_in_the_way(found: httpx.Response, reason: str) -> str:
    """The id of the operation that a refused request would have to wait for; or nothing."""
    if reason != "OperationRunning":
        return ""
    linked = OPERATION_LINK.match(found.headers.get("Link", ""))
    return linked[1] if linked else ""


def said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pause(found: httpx.Response) -> float | None:
    """How long until it is worth asking again; None if it is not."""
    after = found.headers.get("Retry-After", "")
    is_running = found.status_code == 409 and b'"StillRunning"' in found.content
    if not after.isdecimal() or not (found.status_code in _AGAIN or is_running):
        return None
    return float(after) if float(after) <= PAUSE_SECONDS_MAX else None
