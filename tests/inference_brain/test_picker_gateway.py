"""The endpoint picker behind a real Envoy, as docs/picker.md configures it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from inference_brain.picker import Answer, Asked
from inference_brain.picker.exchange import Bounds
from inference_brain.picker.server import Picker
from inference_brain.picker.settings import PickerSettings
from tests.inference_brain import gateway
from tests.inference_brain.gateway import Replica
from tests.inference_brain.routers import RecordedPlace, RecordedRouter

pytestmark = pytest.mark.slow
BODY_BYTES_MAX = 4 << 20
BODY = {"model": "m", "prompt": "Hello"}


@dataclass
class World:
    client: httpx.AsyncClient
    router: RecordedRouter
    one: Replica
    two: Replica
    url: str
    picker: Picker

    def pick(self, *replicas: Replica, **more: object) -> None:
        """All requests go there, in this order."""

        def decide(asked: Asked) -> RecordedPlace:
            endpoints = [replica.endpoint for replica in replicas]
            headers = {"content-type": "application/json"}
            return RecordedPlace(endpoints, asked.body, headers, **more)  # type: ignore[arg-type]

        self.router.decide = decide


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    router = RecordedRouter(lambda _: Answer(500, b"undecided"))
    picker = Picker(router, PickerSettings(("127.0.0.1", 0), bounds=Bounds(BODY_BYTES_MAX)))
    port = await picker.start()
    async with (
        gateway.replicas(["one", "two"]) as (one, two),
        gateway.envoy(tmp_path, port, [one, two]) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield World(client, router, one, two, url, picker)
        await picker.stop(0)


async def test_requests_go_to_the_replica_that_was_picked(world: World) -> None:
    for replica in (world.two, world.two, world.one, world.two):
        world.pick(replica)
        answer = await world.client.post("/v1/completions", json=BODY)
        assert answer.json()["replica"] == replica.name
        await world.router.places[-1].over.wait()
        assert world.router.places[-1].told[0] == ("answered", 200, replica.endpoint)
        assert world.router.places[-1].told[-1] == ("ended", True)


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_arrives_as_the_router_made_it(world: World, *, chunked: bool) -> None:
    world.pick(world.one)
    for size in (10, 61_986, 61_987, 3 << 20):
        body = json.dumps({"prompt": "x" * size}).encode()
        content = _pieces(body) if chunked else body
        answer = await world.client.post("/v1/completions", content=content)
        assert answer.json()["echo"].encode() == body
        assert world.router.asked[-1].body == body
        head, got = world.one.requests[-1]
        assert got == body
        assert head.get("content-length", str(len(body))) == str(len(body))


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100_001):
        yield body[start : start + 100_001]


async def test_what_clients_may_not_set_is_removed_and_claims_are_added(world: World) -> None:
    sent = {**BODY, "cache_salt": "mine", "kv_transfer_params": {"tidegate": "forged"}}
    made = {**BODY, "kv_transfer_params": {"tidegate": "signed"}}

    def decide(asked: Asked) -> RecordedPlace:
        assert json.loads(asked.body) == sent
        headers = {"content-type": "application/json", "authorization": "Bearer of-the-engine"}
        return RecordedPlace(
            [world.one.endpoint],
            json.dumps(made).encode(),
            headers,
            path="/base/v1/completions",
            answer_headers={"x-request-id": "r1"},
        )

    world.router.decide = decide
    answer = await world.client.post(
        "/v1/completions",
        json=sent,
        headers={
            "authorization": "Bearer of-the-org",
            "x-gateway-destination-endpoint": world.two.endpoint,
            "x-tidegate-org": "somebody",
            "cookie": "a=b",
        },
    )
    assert answer.headers["x-request-id"] == "r1"
    head, got = world.one.requests[0]
    assert json.loads(got) == made
    assert head["authorization"] == "Bearer of-the-engine"
    assert head[":path"] == "/base/v1/completions"
    assert head["x-gateway-destination-endpoint"] == world.one.endpoint
    assert not {"x-tidegate-org", "cookie"} & head.keys()
    assert "x-gateway-destination-endpoint" not in world.router.asked[0].headers


async def test_a_stream_passes_through_piece_by_piece(world: World) -> None:
    world.pick(world.two)
    async with world.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        pieces = answer.aiter_bytes()
        assert b'"piece": 0' in await anext(pieces)
        assert ("ended", True) not in world.router.places[0].told  # the rest is still to come
        world.two.go_on.set()
        rest = b"".join([piece async for piece in pieces])
    assert rest.endswith(b"data: [DONE]\n\n")
    place = world.router.places[0]
    await place.over.wait()
    assert b"".join(one for one in place.told if isinstance(one, bytes)).endswith(rest)
    assert place.told[-1] == ("ended", True)


async def test_an_answer_may_be_changed_on_its_way(world: World) -> None:
    world.pick(world.one, rewrite=lambda data, ends: data.replace(b"one", b"model-1") + b" " * ends)
    answer = await world.client.post("/v1/completions", json=BODY)
    assert answer.json()["replica"] == "model-1"
    assert answer.content.endswith(b"} ")


async def test_a_client_that_leaves_ends_the_stream_everywhere(world: World) -> None:
    world.pick(world.two)
    async with world.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        await anext(answer.aiter_bytes())
    await asyncio.wait_for(world.two.left.wait(), 60)
    await asyncio.wait_for(world.router.places[0].over.wait(), 60)
    assert world.router.places[0].told[-1] == ("ended", False)


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue(world: World) -> None:
    world.pick(world.one)
    world.router.wait = asyncio.Event()
    asking = asyncio.create_task(world.client.post("/v1/completions", json=BODY))
    await world.router.waiting.wait()
    asking.cancel()
    await asyncio.wait_for(world.router.given_up.wait(), 60)
    assert not world.one.requests


async def test_a_decision_may_take_its_time(world: World) -> None:
    world.pick(world.one)
    world.router.wait = asyncio.Event()
    asking = asyncio.create_task(world.client.post("/v1/completions", json=BODY))
    await world.router.waiting.wait()
    await asyncio.sleep(1.5)
    world.router.wait.set()
    assert (await asking).json()["replica"] == "one"


async def test_a_refusal_is_answered_by_the_gateway(world: World) -> None:
    body = b'{"error": {"message": "No."}}'
    headers = {"content-type": "application/json", "retry-after": "7"}
    for status in (400, 401, 404, 429, 503):
        world.router.decide = lambda _, status=status: Answer(status, body, headers)  # type: ignore[misc]
        answer = await world.client.post("/v1/completions", json=BODY)
        assert answer.status_code == status
        assert answer.content == body
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["content-type"] == "application/json"
    assert not world.one.requests
    assert not world.two.requests


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_beyond_the_bound_is_refused(world: World, *, chunked: bool) -> None:
    size = BODY_BYTES_MAX + 1
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(world.url).port)
    head = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
    writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: a\r\n{head}\r\n\r\n".encode())
    if chunked:
        writer.write(b"%x\r\n" % size + b"x" * size + b"\r\n")
    answer = await reader.readuntil(b"}}")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer
    assert not world.router.asked


async def test_a_request_without_a_body_is_routed_too(world: World) -> None:
    world.pick(world.two, path="/v1/models")
    answer = await world.client.get("/v1/models")
    assert answer.json()["replica"] == "two"
    assert world.two.requests[0][1] == b""
    assert world.router.asked[0].method == "GET"
    assert world.router.asked[0].path == "/v1/models"


async def test_the_next_replica_is_tried_when_one_cannot_be_reached(world: World) -> None:
    closed = Replica("closed")
    with gateway.held_port() as closed.port:
        world.pick(closed, world.two)
        answer = await world.client.post("/v1/completions", json=BODY)
    assert answer.json()["replica"] == "two"
    await world.router.places[0].over.wait()
    assert world.router.places[0].told[0] == ("answered", 200, world.two.endpoint)
