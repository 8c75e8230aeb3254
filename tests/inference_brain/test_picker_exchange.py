"""Exchanges of the endpoint picker: messages in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_brain.body_room import BodyRoom
from inference_brain.picker.exchange import (
    DESTINATION,
    HELD_BYTES_MAX,
    PIECE_BYTES,
    Bounds,
    BrokenProtocol,
    Exchange,
)
from inference_brain.picker.phases import (
    BodyMode,
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
from inference_brain.picker.routing import Answer
from tests.inference_brain.routers import RecordedPlace

HEADERS = {":method": "POST", ":path": "/v1/completions", "host": "a", "authorization": "Bearer k"}
REQUEST, RESPONSE = Side.REQUEST, Side.RESPONSE


def exchange_of(
    memory: BodyRoom | None = None, bounds: Bounds | None = None, org: str = "acme"
) -> Exchange:
    return Exchange(bounds or Bounds(), memory or BodyRoom(HELD_BYTES_MAX), lambda _: org)


def head(*, ends: bool = False, **more: object) -> Head:
    return Head(REQUEST, {**HEADERS, **more.pop("headers", {})}, ends, **more)  # type: ignore[arg-type,dict-item]


def place(body: bytes = b"changed", **more: object) -> RecordedPlace:
    return RecordedPlace(["10.0.0.1:80", "10.0.0.2:80"], body, **more)  # type: ignore[arg-type]


def run(
    exchange: Exchange,
    phases: Iterable[Phase],
    decide: Callable[[bytes], RecordedPlace | Answer] = place,
) -> list[Reply]:
    """As the server does it."""
    replies: list[Reply] = []
    for phase in phases:
        replies += exchange.received(phase)
        if asked := exchange.take_asked():
            replies += exchange.placed(decide(asked.body))
    return replies


def bodies(replies: Iterable[Reply], side: Side) -> bytes:
    pieces = [one for one in replies if isinstance(one, PieceReply) and one.side is side]
    assert all(len(one.data or b"") <= PIECE_BYTES for one in pieces)
    assert [one.ends for one in pieces[:-1]] == [False] * len(pieces[:-1])
    return b"".join(one.data or b"" for one in pieces)


@given(
    pieces=st.lists(st.binary(max_size=3000) | st.just(b"x" * PIECE_BYTES), min_size=1, max_size=5),
    made=st.binary(max_size=100) | st.integers(1, 3).map(lambda n: b"y" * (n * PIECE_BYTES + n - 2)),
    answer=st.lists(st.binary(max_size=100), min_size=1, max_size=4),
    has_trailers=st.booleans(),
)
def test_whatever_the_pieces_all_of_it_passes_in_order(
    pieces: list[bytes],
    made: bytes,
    answer: list[bytes],
    has_trailers: bool,  # noqa: FBT001
) -> None:
    memory, found = BodyRoom(HELD_BYTES_MAX), place(made)
    exchange = exchange_of(memory)
    asked: list[bytes] = []

    def decide(body: bytes) -> RecordedPlace:
        asked.append(body)
        return found

    last = len(pieces) - 1
    phases: list[Phase] = [head()]
    phases += [Piece(REQUEST, one, at == last and not has_trailers) for at, one in enumerate(pieces)]
    phases += [Trailers(REQUEST)] * has_trailers
    asking = run(exchange, phases, decide)
    assert asked == [b"".join(pieces)]
    assert memory.used == 0
    assert isinstance(asking[0], HeadReply)
    assert asking[0].endpoints == "10.0.0.1:80,10.0.0.2:80"
    assert bodies(asking, REQUEST) == made
    final = asking[-1]
    assert (
        isinstance(final, TrailersReply)
        if has_trailers
        else isinstance(final, PieceReply) and final.ends
    )

    last = len(answer) - 1
    phases = [Head(RESPONSE, {":status": "200"}, ends=False, served="10.0.0.2:80")]
    phases += [Piece(RESPONSE, one, at == last) for at, one in enumerate(answer)]
    answering = run(exchange, phases)
    assert bodies(answering, RESPONSE) == b"".join(answer)
    exchange.closed()
    exchange.closed()
    assert found.told == [("answered", 200, "10.0.0.2:80"), *answer, ("ended", True)]


def test_only_what_the_place_has_reaches_the_replica() -> None:
    found = place(headers={"authorization": "Bearer engine", "content-type": "a/b"}, path="/base/x")
    given_ = {"cookie": "c", "x-forwarded-for": "1.2.3.4", "x-envoy-a": "b", "content-type": "a/b"}
    replies = run(
        exchange_of(),
        [head(headers=given_), Piece(REQUEST, b"{}", ends=True)],
        lambda _: found,
    )
    assert isinstance(replies[0], HeadReply)
    change = replies[0].change
    assert change is not None
    assert change.put == {
        "authorization": "Bearer engine",
        DESTINATION: "10.0.0.1:80,10.0.0.2:80",
        ":path": "/base/x",
        "content-length": "7",
    }
    assert change.drop == ["cookie"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_beyond_its_bound_is_refused_at_once(announced: bool) -> None:  # noqa: FBT001
    memory = BodyRoom(HELD_BYTES_MAX)
    exchange = exchange_of(memory, Bounds(body_bytes_max=10))
    phases: list[Phase] = [head(headers={"content-length": "11"})] if announced else [head()]
    if not announced:
        phases += [Piece(REQUEST, b"123456", ends=False), Piece(REQUEST, b"78901", ends=False)]
    replies = run(exchange, phases)
    assert [type(one) for one in replies] == [Immediate]
    assert isinstance(replies[0], Immediate)
    assert replies[0].answer.status == 413
    assert b'"code":"body_too_large"' in replies[0].answer.body
    assert exchange.is_over
    assert memory.used == 0
    assert run(exchange, [Piece(REQUEST, b"more", ends=True)]) == []


def test_all_bodies_together_have_a_bound_and_no_org_has_all_of_it() -> None:
    memory = BodyRoom(1000)
    one = Piece(REQUEST, b"1234567", ends=False)
    acme = [exchange_of(memory) for _ in range(5)]
    assert not any(run(each, [head(), one]) for each in acme[:4])
    replies = run(acme[4], [head(), one])
    assert isinstance(replies[0], Immediate)
    assert replies[0].answer.status == 503
    assert b'"code":"bodies"' in replies[0].answer.body
    assert replies[0].answer.headers["retry-after"] == "1"
    globex = exchange_of(memory, org="globex")
    assert not run(globex, [head(), one])
    for each in (*acme, globex):
        each.closed()
    assert memory.used == 0


def test_a_refusal_ends_the_exchange() -> None:
    exchange = exchange_of()
    refusal = Answer(429, b"{}", {"retry-after": "2"})
    assert run(exchange, [head(ends=True)], lambda _: refusal) == [Immediate(refusal)]
    assert exchange.is_over


def test_a_request_without_a_body_has_its_answer_in_the_headers() -> None:
    replies = run(exchange_of(), [head(ends=True)])
    assert [type(one) for one in replies] == [HeadReply]
    assert isinstance(replies[0], HeadReply)
    assert replies[0].endpoints
    assert replies[0].change is not None
    assert "content-length" not in replies[0].change.put


def test_bodies_that_are_sent_whole() -> None:
    exchange = exchange_of()
    asking = head(request_mode=BodyMode.BUFFERED, response_mode=BodyMode.NONE)
    found = place()
    replies = run(exchange, [asking, Piece(REQUEST, b"{}", ends=True)], lambda _: found)
    assert replies[0] == HeadReply(REQUEST)
    assert isinstance(replies[1], PieceReply)
    assert (replies[1].data, replies[1].streamed) == (b"changed", False)
    assert replies[1].endpoints
    run(exchange, [Head(RESPONSE, {":status": "200"}, ends=False)])
    exchange.closed()
    assert found.told == [("answered", 200, None), ("ended", True)]


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.OTHER])
def test_a_gateway_that_does_not_show_bodies_is_told_what_to_change(mode: BodyMode) -> None:
    replies = run(exchange_of(), [head(request_mode=mode)])
    assert isinstance(replies[0], Immediate)
    assert b"FULL_DUPLEX_STREAMED" in replies[0].answer.body


@pytest.mark.parametrize(
    "phases",
    [
        [Piece(REQUEST, b"a", ends=False)],
        [head(), head()],
        [head(), Piece(REQUEST, b"a", ends=True), Piece(REQUEST, b"b", ends=True)],
        [Piece(RESPONSE, b"a", ends=True)],
        [Trailers(RESPONSE)],
    ],
)
def test_what_does_not_follow_is_refused(phases: list[Phase]) -> None:
    with pytest.raises(BrokenProtocol):
        run(exchange_of(), phases)


@given(
    cut=st.integers(0, 4),
    is_whole=st.booleans(),
)
def test_a_place_is_always_told_its_end_once(cut: int, is_whole: bool) -> None:  # noqa: FBT001
    found = place()
    exchange = exchange_of()
    phases: list[Phase] = [
        head(),
        Piece(REQUEST, b"{}", ends=True),
        Head(RESPONSE, {":status": "200"}, ends=False),
        Piece(RESPONSE, b"a", ends=False),
        Piece(RESPONSE, b"b", ends=is_whole),
    ]
    run(exchange, phases[: cut + 1], lambda _: found)
    exchange.closed()
    ends = [one for one in found.told if isinstance(one, tuple) and one[0] == "ended"]
    assert ends == ([("ended", cut == 4 and is_whole)] if cut >= 1 else [])
