"""What requests and answers of an org may take at once: bytes, verbs and the reading of long bodies.

An org that has too much under way waits, and is then refused; other orgs continue.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvss_agent.http.api import RETRY_SECONDS, Refused, announced_bytes, connection_of, large_body_of
from kvss_agent.limits.shares import FairShare, NoShare, Shares
from swdriver_shim.daemon.binary import OCTETS
from swdriver_shim.daemon.shim import VERBS_OF_ONE_ORG, VERBS_WAITING, Shim
from swdriver_shim.desired import OrgSpec

BODY_BYTES_LEAST: Final = 64 << 10  # what any request counts as
PIECE_BYTES: Final = 64 << 10  # of an answer that are sent before others have their turn
TURN_SECONDS: Final = 30.0  # to wait until an org has room for one more


class OrgAdmission:
    """The shares of orgs in one daemon."""

    def __init__(self, shim: Shim) -> None:
        self._transfers = shim.transfers
        self._verbs = shim.verbs
        self._readers = FairShare(Shares(total=1, per_owner=1, reserved=1, waiting=VERBS_WAITING))

    @property
    def org_bytes_max(self) -> int:
        """Bytes of requests and answers that one org may have at once."""
        return self._transfers.shares.per_owner

    def turn(self, org: OrgSpec) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait for one of the verbs that are carried out at once. Raises Refused."""
        sentence = f"An org may have {VERBS_OF_ONE_ORG} requests carried out at once."
        return _hold(self._verbs.held_async(org.name, seconds=TURN_SECONDS), sentence)

    def reader(self, org: OrgSpec) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait until no other long body of this org is being read. Raises Refused."""
        sentence = "Long bodies of an org are read one after the other: send fewer at once."
        return _hold(self._readers.held_async(org.name, seconds=TURN_SECONDS), sentence)

    @contextlib.asynccontextmanager
    async def body(self, org: OrgSpec, request: Request, most: int) -> AsyncIterator[memoryview]:
        """Receive a body. Its announced size counts as the org's from before it is read until the end of
        the `async with`. Raises Refused."""
        most = min(most, self.org_bytes_max)
        announced = announced_bytes(request)
        amount = most if announced is None else announced
        if amount > most:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A body may have at most {most} bytes.")
        held = self._transfers.held_async(org.name, max(amount, BODY_BYTES_LEAST), seconds=TURN_SECONDS)
        async with _hold(held, self._too_much), large_body_of(request, most) as raw:
            yield raw

    def answer(self, org: OrgSpec, amount: int, make: Callable[[], bytes]) -> Response:
        """Make an answer of up to so many bytes. They count as the org's from now until the answer has
        been sent. Raises Refused."""
        stack = contextlib.ExitStack()
        with _refusing(self._too_much):
            amount = min(amount, self.org_bytes_max)
            stack.enter_context(self._transfers.held(org.name, amount, seconds=TURN_SECONDS))
        try:
            return _HeldResponse(make(), stack)
        except BaseException:
            stack.close()
            raise

    @property
    def _too_much(self) -> str:
        return (
            f"Requests and answers of an org may have {self.org_bytes_max} bytes at once: finish some "
            "first."
        )


class _HeldResponse(Response):
    """Bytes that count as an org's until they have been sent."""

    def __init__(self, content: bytes, held: contextlib.ExitStack) -> None:
        super().__init__(content, media_type=OCTETS)
        self._held = held

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Send in pieces: encrypting all of it at once would hold up everybody else."""
        connection = connection_of(scope)
        body = memoryview(self.body)
        with self._held:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            for at in range(0, max(len(body), 1), PIECE_BYTES):
                rest = at + PIECE_BYTES < len(body)
                piece = body[at : at + PIECE_BYTES]
                if connection:
                    await connection.may_send(len(piece))
                await send({"type": "http.response.body", "body": piece, "more_body": rest})


@contextlib.asynccontextmanager
async def _hold(
    share: contextlib.AbstractAsyncContextManager[Any], sentence: str
) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        with _refusing(sentence):
            await stack.enter_async_context(share)
        yield


@contextlib.contextmanager
def _refusing(sentence: str) -> Iterator[None]:
    try:
        yield
    except NoShare:
        raise Refused(HTTPStatus.TOO_MANY_REQUESTS, sentence, RETRY_SECONDS) from None
