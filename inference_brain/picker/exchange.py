"""One request on its way through a gateway: a state machine without I/O.

    exchange = Exchange(Bounds(), memory, whose)
    for reply in exchange.received(phase): send(reply)
    if asked := exchange.take_asked():                     # all of it has come
        for reply in exchange.placed(await router.route(asked)): send(reply)
    exchange.closed()                                      # always, at last

The gateway begins with the headers of the request, then its body, then perhaps trailers; later the same
of the answer. In full-duplex mode no reply is sent before the whole body has come, since the replica
depends on it: then headers, body, trailers, in this order, as the protocol demands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Final

from inference_brain.body_room import BodyRoom
from inference_brain.picker.phases import (
    BodyMode,
    Change,
    Head,
    HeadReply,
    Immediate,
    Phase,
    Piece,
    PieceReply,
    Reply,
    Side,
    Trailers,
    TrailersReply,
)
from inference_brain.picker.routing import Answer, Asked, Place, failure

log = logging.getLogger(__name__)

DESTINATION: Final = "x-gateway-destination-endpoint"
BODY_BYTES_MAX: Final = 32 << 20
HELD_BYTES_MAX: Final = 512 << 20  # of all bodies that have not been answered yet
PIECE_COST: Final = 100  # bytes of memory that a piece takes beside its own
PIECE_BYTES: Final = 62_000  # gateways take at most 64 KiB in one message
_GATEWAYS_OWN: Final = frozenset({"host", "content-length", "transfer-encoding", "connection", "te"})
_GATEWAYS_PREFIXES: Final = (":", "x-envoy-", "x-forwarded-")
_BUSY_SECONDS: Final = 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one request."""

    body_bytes_max: int = BODY_BYTES_MAX


class BrokenProtocol(Exception):
    """The gateway has sent what does not follow on what it had sent."""


class _State(Enum):
    BEGINNING = auto()
    READING = auto()  # the body of the request
    DECIDING = auto()
    PLACED = auto()
    ANSWERING = auto()  # the head of the answer has come
    OVER = auto()


class Exchange:
    """Messages in, messages out. Not for several threads."""

    def __init__(
        self,
        bounds: Bounds,
        memory: BodyRoom,
        whose: Callable[[Mapping[str, str]], str],
    ) -> None:
        """`whose`: the org of these headers; empty for nobody, of whom no body is read: what the request
        is answered is decided at once."""
        self._bounds = bounds
        self._memory = memory
        self._whose = whose
        self._org = ""
        self._state = _State.BEGINNING
        self._head = Head(Side.REQUEST, {}, ends=False)
        self._pieces: list[bytes] = []
        self._size = self._held = 0  # bytes of them, and with what they take of memory
        self._has_trailers = False
        self._asked: Asked | None = None
        self._place: Place | None = None

    @property
    def is_over(self) -> bool:
        """No reply will follow: the client has its answer from the picker, or from the replica."""
        return self._state is _State.OVER

    @property
    def is_reading(self) -> bool:
        """Whether more of the request has to come."""
        return self._state in (_State.BEGINNING, _State.READING)

    def late(self) -> Sequence[Reply]:
        """The request has not come in time."""
        return [self._refuse(_LATE)] if self.is_reading else []

    def take_asked(self) -> Asked | None:
        """The request, once, when all of it has come: `placed` has to be called with what is decided."""
        asked, self._asked = self._asked, None
        return asked

    def received(self, phase: Phase) -> Sequence[Reply]:
        """A message of the gateway. Raises BrokenProtocol.

        All its effects come before the first reply: the gateway may close the stream with the last.
        """
        if self.is_over:
            return ()
        if isinstance(phase, Head):
            return tuple(self._on_head(phase))
        if isinstance(phase, Piece):
            return tuple(self._on_piece(phase))
        return tuple(self._on_trailers(phase))

    def placed(self, decided: Place | Answer) -> Sequence[Reply]:
        """Where the request goes, or what it is answered instead."""
        return tuple(self._on_decision(decided))

    def _on_decision(self, decided: Place | Answer) -> Iterator[Reply]:
        if self._state is not _State.DECIDING:
            raise BrokenProtocol("a decision that nobody waits for")
        if isinstance(decided, Answer):
            yield self._refuse(decided)
            return
        self._release()
        self._place, self._state = decided, _State.PLACED
        endpoints = ",".join(decided.endpoints)
        change = self._change(decided, endpoints)
        if self._head.ends:
            yield HeadReply(Side.REQUEST, change, endpoints)
        elif self._head.request_mode is BodyMode.BUFFERED:
            yield PieceReply(Side.REQUEST, decided.body, change=change, endpoints=endpoints)
        else:
            yield HeadReply(Side.REQUEST, change, endpoints)
            yield from _streamed(Side.REQUEST, decided.body, ends=not self._has_trailers)
            if self._has_trailers:
                yield TrailersReply(Side.REQUEST)

    def closed(self) -> None:
        """No message will come any more: it was the last one, or the client has left."""
        self._release()
        unseen = self._head.response_mode is BodyMode.NONE  # then it closes after the answer's head
        self._end(whole=unseen and self._state is _State.ANSWERING)

    # The request

    def _on_head(self, head: Head) -> Iterator[Reply]:
        if head.side is Side.RESPONSE:
            yield from self._on_answer(head)
            return
        self._expect(_State.BEGINNING)
        self._head, self._state = head, _State.READING
        self._org = self._whose(head.headers)
        if head.ends or not self._org:
            self._decide()
        elif _number(head.headers.get("content-length", "")) > self._bounds.body_bytes_max:
            yield self._refuse(self._too_large())
        elif head.request_mode is BodyMode.BUFFERED:
            yield HeadReply(Side.REQUEST)
        elif head.request_mode is not BodyMode.FULL_DUPLEX:
            log.error("The gateway has to send bodies in mode FULL_DUPLEX_STREAMED or BUFFERED")
            yield self._refuse(_WRONG_MODE)

    def _on_piece(self, piece: Piece) -> Iterator[Reply]:
        if piece.side is Side.RESPONSE:
            yield from self._on_answer_piece(piece)
            return
        self._expect(_State.READING)
        size = len(piece.data)
        if self._size + size > self._bounds.body_bytes_max:
            yield self._refuse(self._too_large())
        elif not self._memory.take(self._org, size + PIECE_COST):
            yield self._refuse(_BUSY)
        else:
            self._size += size
            self._held += size + PIECE_COST
            self._pieces.append(piece.data)
            if piece.ends:
                self._decide()

    def _on_trailers(self, trailers: Trailers) -> Iterator[Reply]:
        if trailers.side is Side.RESPONSE:
            self._expect(_State.ANSWERING)
            if rest := self._passed_on(b"", ends=True):
                yield from _streamed(Side.RESPONSE, rest, ends=False)
            yield TrailersReply(Side.RESPONSE)
            self._end(whole=True)
        elif self._state is _State.READING:  # they end a body whose last piece did not say so
            self._has_trailers = True
            self._decide()
        else:
            yield TrailersReply(Side.REQUEST)

    def _decide(self) -> None:
        headers = self._head.headers
        self._state = _State.DECIDING
        self._asked = Asked(
            method=headers.get(":method", ""),
            path=headers.get(":path", ""),
            headers={name: value for name, value in headers.items() if not name.startswith(":")},
            body=self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces),
            among=self._head.among,
        )
        self._pieces.clear()

    def _change(self, place: Place, endpoints: str) -> Change:
        """What makes the client's headers into those that the replica gets."""
        before, after = self._head.headers, place.headers
        put = {name: value for name, value in after.items() if before.get(name) != value}
        put[DESTINATION] = endpoints
        if place.path != before.get(":path"):
            put[":path"] = place.path
        if not self._head.ends:
            put["content-length"] = str(len(place.body))
        kept = after.keys() | put.keys()
        drop = [name for name in before if name not in kept and not _is_gateways(name)]
        return Change(put, drop)

    # The answer

    def _on_answer(self, head: Head) -> Iterator[Reply]:
        if self._place is None:  # of the gateway's own, while it waits for us
            self._state = _State.ANSWERING
            yield HeadReply(Side.RESPONSE)
            return
        self._expect(_State.PLACED)
        self._state = _State.ANSWERING
        self._place.answered(_number(head.headers.get(":status", "")), head.served)
        more: Mapping[str, str] = self._place.answer_headers
        yield HeadReply(Side.RESPONSE, Change(more) if more else None)
        if head.ends:
            self._end(whole=True)

    def _on_answer_piece(self, piece: Piece) -> Iterator[Reply]:
        self._expect(_State.ANSWERING)
        passed = self._passed_on(piece.data, ends=piece.ends)
        if self._is_duplex:
            yield from _streamed(Side.RESPONSE, passed, ends=piece.ends)
        else:
            yield PieceReply(Side.RESPONSE, None if passed == piece.data else passed)
        if piece.ends:
            self._end(whole=True)

    @property
    def _is_duplex(self) -> bool:
        return self._head.response_mode is BodyMode.FULL_DUPLEX

    def _passed_on(self, data: bytes, *, ends: bool) -> bytes:
        return self._place.received(data, ends=ends) if self._place is not None else data

    # The end

    def _expect(self, state: _State) -> None:
        if self._state is not state:
            raise BrokenProtocol(f"{self._state.name.lower()} where {state.name.lower()} was expected")

    def _too_large(self) -> Answer:
        allowed = self._bounds.body_bytes_max
        return failure(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The body of this request is larger than {allowed} bytes.",
            "invalid_request_error",
            "body_too_large",
        )

    def _refuse(self, answer: Answer) -> Immediate:
        self._release()
        self._state = _State.OVER
        return Immediate(answer)

    def _release(self) -> None:
        self._pieces.clear()
        self._memory.give_back(self._org, self._held)
        self._held = 0

    def _end(self, *, whole: bool) -> None:
        self._state = _State.OVER
        place, self._place = self._place, None
        if place is not None:
            place.ended(whole=whole)


def _streamed(side: Side, data: bytes, *, ends: bool) -> Iterator[Reply]:
    """In pieces that every gateway takes. Also nothing is a piece, for its end."""
    last = max(0, (len(data) - 1) // PIECE_BYTES) * PIECE_BYTES
    if last == 0:
        yield PieceReply(side, data, ends, streamed=True)
        return
    for start in range(0, last + 1, PIECE_BYTES):
        part = data[start : start + PIECE_BYTES]
        yield PieceReply(side, part, ends and start == last, streamed=True)


def _number(text: str) -> int:
    """Of a header; 0 for what is none. So many digits are enough to be too many."""
    return int(text[:20]) if text.isascii() and text.isdecimal() else 0


def _is_gateways(name: str) -> bool:
    """What a gateway sets itself, or does not let others change."""
    return name in _GATEWAYS_OWN or name.startswith(_GATEWAYS_PREFIXES)


_WRONG_MODE: Final = failure(
    HTTPStatus.INTERNAL_SERVER_ERROR,
    "The gateway does not send the bodies of requests to the endpoint picker as it needs them: its "
    "ext_proc filter needs request_body_mode FULL_DUPLEX_STREAMED.",
    "server_error",
    "gateway_misconfigured",
)
_LATE: Final = failure(
    HTTPStatus.REQUEST_TIMEOUT,
    "The body did not come in time.",
    "invalid_request_error",
    "body_too_slow",
)
_TOO_MUCH: Final = failure(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "Too many requests are being read at once. Try again soon.",
    "server_error",
    "bodies",
)
_BUSY: Final = Answer(
    _TOO_MUCH.status, _TOO_MUCH.body, {**_TOO_MUCH.headers, "retry-after": str(_BUSY_SECONDS)}
)
