"""Gateways, and clients behind them, that mean harm to the endpoint picker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_brain.brain import Brain
from inference_brain.picker import Answer
from inference_brain.picker.exchange import Bounds
from inference_brain.picker.server import Picker, picking
from inference_brain.picker.settings import PickerSettings
from tests.inference_brain import brains
from tests.inference_brain.routers import RecordedPlace, RecordedRouter

BODY_MAX = 1000
PATH, KEY = (":path", "/v1/completions"), ("authorization", f"Bearer {brains.KEY}")


def head(*headers: tuple[str, str], raw: bool = False, side: str = "request", **more: Any) -> Any:
    made = pb.HttpHeaders(**more)
    for name, value in headers:
        one = made.headers.headers.add(key=name)
        if raw:
            one.raw_value = value.encode()
        else:
            one.value = value
    return pb.ProcessingRequest(**{f"{side}_headers": made})


def piece(data: bytes, *, ends: bool = False, side: str = "request") -> Any:
    return pb.ProcessingRequest(**{f"{side}_body": pb.HttpBody(body=data, end_of_stream=ends)})


def trailers(side: str) -> Any:
    return pb.ProcessingRequest(**{f"{side}_trailers": pb.HttpTrailers()})


# Whatever comes

TEXT = st.text(max_size=20) | st.sampled_from(["9" * 5000, "²", "٣", "200", "-1", "a\n b: c"])
NAMES = st.sampled_from([":path", ":method", ":status", "content-length", "authorization", "ü"]) | TEXT
SIDES = st.sampled_from(["request", "response"])
HEADS = st.builds(
    lambda headers, raw, side, ends: head(*headers, raw=raw, side=side, end_of_stream=ends),
    st.lists(st.tuples(NAMES, TEXT), max_size=5),
    st.booleans(),
    SIDES,
    st.booleans(),
)
PIECES = st.builds(
    lambda data, side, ends: piece(data, side=side, ends=ends),
    st.binary(max_size=20) | st.just(b"x" * (BODY_MAX + 1)),
    SIDES,
    st.booleans(),
)
MESSAGES = HEADS | PIECES | st.builds(trailers, SIDES) | st.just(pb.ProcessingRequest())


class Aborted(Exception):
    pass


class Context:
    async def abort(self, code: grpc.StatusCode, _why: str) -> None:
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        raise Aborted


@settings(max_examples=400, deadline=None)
@given(st.lists(MESSAGES, max_size=8), st.booleans(), st.integers(0, 3))
def test_whatever_a_gateway_sends_nothing_breaks_and_nothing_is_left(
    messages: list[Any],
    refuses: bool,  # noqa: FBT001
    modes: int,
) -> None:
    answer = Answer(429, b"{}", {"retry-after": "1"})
    router = RecordedRouter(lambda _: answer if refuses else RecordedPlace(["10.0.0.1:80"], b"made"))
    picker = Picker(router, PickerSettings(("127.0.0.1", 0), bounds=Bounds(BODY_MAX)))
    for message in messages:
        message.protocol_config.request_body_mode = (0, 2, 4, 1)[modes]
        message.protocol_config.response_body_mode = (0, 2, 4, 1)[modes]

    async def arriving() -> AsyncIterator[Any]:
        for message in messages:
            yield pb.ProcessingRequest.FromString(message.SerializeToString())

    async def run() -> None:
        try:
            async for reply in picker.exchange(arriving(), Context()):
                reply.SerializeToString()
        except Aborted:
            pass

    asyncio.run(run())
    assert picker.streams == 0
    assert picker._memory.used == 0
    for place in router.places:
        assert [one[0] for one in place.told if isinstance(one, tuple)].count("ended") == 1


# Clients behind it


@pytest.fixture
async def brain() -> AsyncIterator[Brain]:
    made = Brain("b", None, "test", token="t" * 20)
    async with made.running():
        made.set_desired(brains.told(["http://127.0.0.1:9"]))
        yield made


async def answers(picker: Picker, *messages: Any, ends: bool = False) -> list[Any]:
    """All that the picker replies, to messages after which the stream stays open."""
    async with aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
        call = ext_proc.ExternalProcessorStub(channel).Process()
        for message in messages:
            await call.write(message)
        if ends:
            await call.done_writing()
        async with asyncio.timeout(60):
            return [one async for one in call]


@pytest.mark.parametrize("key", ["", "Bearer wrong"])
async def test_nothing_is_read_of_who_has_no_key(brain: Brain, key: str) -> None:
    """Else strangers fill the memory for bodies, and take all streams."""
    async with picking(brain.for_gateways, PickerSettings(("127.0.0.1", 0))) as picker:
        [reply] = await answers(picker, head((":method", "POST"), PATH, ("authorization", key)))
        assert reply.immediate_response.status.code == 401
        assert picker.streams == 0


async def test_a_body_has_to_come_in_time(brain: Brain) -> None:
    settings = PickerSettings(("127.0.0.1", 0), body_seconds=0.2)
    async with picking(brain.for_gateways, settings) as picker:
        sent = head((":method", "POST"), PATH, KEY), piece(b"{")
        [reply] = await answers(picker, *sent)
        assert reply.immediate_response.status.code == 408
        assert picker._memory.used == 0
        assert picker.streams == 0


async def test_headers_may_have_any_bytes(brain: Brain) -> None:
    async with picking(brain.for_gateways, PickerSettings(("127.0.0.1", 0))) as picker:
        odd = ("x-client-request-id", "日本"), ("ü", "日本")
        sent = head((":method", "POST"), PATH, KEY, *odd), piece(b"{", ends=True)
        [reply] = await answers(picker, *sent)
        assert reply.immediate_response.status.code == 400


async def test_pieces_without_bytes_take_memory_too() -> None:
    router = RecordedRouter(lambda _: Answer(500, b""))
    picker = Picker(router, PickerSettings(("127.0.0.1", 0)))
    picker._memory.most = 10_000

    async def arriving() -> AsyncIterator[Any]:
        yield head(PATH)
        for _ in range(1000):
            yield piece(b"")

    [reply] = [one async for one in picker.exchange(arriving(), Context())]
    assert reply.immediate_response.status.code == 503
