"""A brain behind a real Envoy: what its requests get is what they get from the brain itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from inference_brain.brain import Brain
from inference_brain.decisions import RequestRecord
from inference_brain.desired import DriverSpec, Limits, ReplicaSpec, ServedModel
from inference_brain.picker.server import picking
from inference_brain.picker.settings import PickerSettings
from inference_brain.upstream import health
from inference_brain.upstream.health import FAILURES_MAX, State
from swdriver_shim.adapters.claims import Claim, ClaimVerifier
from swdriver_shim.desired import GroupSpec, ModelSpec
from tests.inference_brain import brains, gateway
from tests.inference_brain.gateway import Replica

pytestmark = pytest.mark.slow
HEADERS = {"authorization": f"Bearer {brains.KEY}"}
LAYOUT = ModelSpec(name="llama", groups=(GroupSpec("full", (64,)),))
BODY = {"model": "m", "prompt": "Hello", "max_tokens": 8}
PATH = "/v1/completions"


@dataclass
class World:
    brain: Brain
    client: httpx.AsyncClient
    replicas: list[Replica]

    async def record(self, answer: httpx.Response) -> RequestRecord:
        """What the brain remembers of it, when it is over."""
        async with asyncio.timeout(60):
            while True:
                found = self.brain.find(answer.headers["x-request-id"])
                if found and found.outcome:
                    return found
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(brain: Brain, replicas: list[Replica]) -> AsyncIterator[None]:
    async with brain.running():
        brain.set_desired(brains.told([f"http://{one.endpoint}" for one in replicas]))
        yield


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    brain = Brain("b", None, "test", token="t" * 20)
    async with (
        gateway.replicas(["one", "two"]) as found,
        running(brain, found),
        picking(brain.for_gateways, PickerSettings(("127.0.0.1", 0))) as picker,
        gateway.envoy(tmp_path, picker.port, found) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers=HEADERS) as client,
    ):
        yield World(brain, client, found)


async def test_a_request_goes_where_the_brain_decides(world: World) -> None:
    answer = await world.client.post(PATH, json=BODY)
    assert answer.status_code == 200
    record = await world.record(answer)
    assert record.chosen in ("r0", "r1")
    assert answer.json()["replica"] == world.replicas[int(record.chosen[1])].name
    assert record.outcome is not None
    assert record.outcome.result == "ok"
    assert record.outcome.completion_tokens == 3
    assert record.outcome.first_token_seconds is not None


async def test_what_clients_may_not_set_is_removed_and_claims_are_added(world: World) -> None:
    driven = DriverSpec("job7", LAYOUT, b"k" * 32)
    urls = [f"http://localhost:{one.port}" for one in world.replicas]
    specs = tuple(
        ReplicaSpec(f"r{at}", url, driver=driven, api_key="of-the-engine", served_as="llama")
        for at, url in enumerate(urls)
    )
    model = ServedModel("m", 100_000, specs)
    world.brain.set_desired(brains.told(urls, generation=2, models=(model,)))
    sent = {**BODY, "cache_salt": "mine", "kv_transfer_params": {"tidegate": "forged"}}
    answer = await world.client.post(PATH, json=sent, headers={"cookie": "a=b"})
    assert answer.status_code == 200
    assert answer.json()["model"] == "m"
    head, raw = next(one.requests[0] for one in world.replicas if one.requests)
    got = json.loads(raw)
    assert got["model"] == "llama"
    assert got.get("cache_salt") != "mine"
    assert head["authorization"] == "Bearer of-the-engine"
    assert head["x-request-id"] == answer.headers["x-request-id"]
    assert "cookie" not in head
    claims = ClaimVerifier(b"k" * 32, "job7")
    assert claims.verify(got["kv_transfer_params"]["tidegate"]) == Claim("acme")


async def test_a_replica_that_answers_with_errors_is_ejected(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "EJECTED_SECONDS", 60.0)  # else it may be over before it is seen
    for one in world.replicas:
        one.status = 500
    for at in range(2 * FAILURES_MAX):
        answer = await world.client.post(PATH, json={**BODY, "prompt": f"Hello {at}"})
        assert answer.status_code == 500
        await world.record(answer)
    now = time.monotonic()
    assert State.EJECTED in {one.state(now) for one in world.brain.fleet}


async def test_a_stream_is_followed_to_its_end(world: World) -> None:
    for one in world.replicas:
        one.go_on.set()
    answer = await world.client.post(PATH, json={**BODY, "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "usage" not in answer.text, "it was not asked for"
    record = await world.record(answer)
    assert record.outcome is not None
    assert (record.outcome.result, record.outcome.completion_tokens) == ("ok", 3)
    assert world.brain.counts.streams == 0


@pytest.mark.parametrize(("after", "result"), [(0, "failed"), (1, "broken")])
async def test_a_stream_that_the_engine_ends_with_an_error_is_no_answer(
    world: World, after: int, result: str
) -> None:
    for one in world.replicas:
        one.error_after = after
        one.go_on.set()
    answer = await world.client.post(PATH, json={**BODY, "stream": True})
    assert answer.text.count('"piece"') == after
    assert "It broke." in answer.text
    assert "[DONE]" not in answer.text
    record = await world.record(answer)
    assert record.outcome is not None
    assert record.outcome.result == result
    assert (record.outcome.first_token_seconds is None) == (after == 0)


async def test_refusals_are_those_of_the_api(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inference_brain.access")
    post = world.client.post
    assert (await post(PATH, json=BODY, headers={"authorization": "Bearer no"})).status_code == 401
    assert (await post(PATH, json={**BODY, "model": "other"})).status_code == 404
    wrong = await post(PATH, json={**BODY, "temperature": "hot"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "temperature"
    assert (await post(PATH, content=b"{")).status_code == 400
    assert (await post("/v1/nothing", json=BODY)).status_code == 404
    assert not any(body for one in world.replicas for _, body in one.requests)
    models = await world.client.get("/v1/models")
    assert [one["id"] for one in models.json()["data"]] == ["m"]
    lines = [line for line in caplog.records if line.name == "inference_brain.access"]
    assert [line.message.split()[2] for line in lines] == [
        "401", "404", "400", "400", "404", "200",
    ]  # fmt: skip


async def test_limits_hold_and_say_when_to_come_again(world: World) -> None:
    urls = [f"http://{one.endpoint}" for one in world.replicas]
    few = brains.org(limits=Limits(requests_per_minute=1))
    world.brain.set_desired(brains.told(urls, generation=2, orgs=(few,)))
    answers = [await world.client.post(PATH, json=BODY) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert int(answers[1].headers["retry-after"]) > 0


async def test_a_client_that_leaves_gives_its_place_back(world: World) -> None:
    async with world.client.stream("POST", PATH, json={**BODY, "stream": True}) as answer:
        await anext(answer.aiter_bytes())
        assert sum(one.in_progress for one in world.brain.fleet) == 1
    record = await world.record(answer)
    assert record.outcome is not None
    assert record.outcome.result == "client_left"
    assert sum(one.in_progress for one in world.brain.fleet) == 0
    assert world.brain.counts.streams == 0


async def test_a_replica_that_ends_in_the_middle_is_told_apart_from_clients_that_leave(
    world: World,
) -> None:
    reading = []  # an iterator that nobody has any more closes its answer

    async def streamed(stack: contextlib.AsyncExitStack) -> httpx.Response:
        answer = await stack.enter_async_context(
            world.client.stream("POST", PATH, json={**BODY, "stream": True})
        )
        reading.append(answer.aiter_bytes())
        await anext(reading[-1])
        return answer

    async with contextlib.AsyncExitStack() as clients:
        leaving, staying = [], []
        async with contextlib.AsyncExitStack() as impatient:
            for _ in range(3):
                leaving.append(await streamed(impatient))
                staying.append(await streamed(clients))
        left = [await world.record(answer) for answer in leaving]
        found = world.brain.find(staying[0].headers["x-request-id"])
        assert found
        replica = world.replicas[int(found.chosen[1])]
        replica.ends = True
        replica.go_on.set()
        cut_off = [
            await world.record(answer)
            for answer in staying
            if (one := world.brain.find(answer.headers["x-request-id"])) and one.chosen == found.chosen
        ]
    for answer in staying:  # those at other replicas have left with their clients
        await world.record(answer)
    assert {record.outcome.result for record in left if record.outcome} == {"client_left"}
    assert {record.outcome.result for record in cut_off if record.outcome} == {"broken"}
    gone = world.brain.fleet.replica("m", found.chosen)
    assert gone
    assert gone.health.unreachable
    assert sum(one.in_progress for one in world.brain.fleet) == 0
    assert world.brain.counts.streams == 0


async def test_a_replica_that_cannot_be_reached_is_learned_of(world: World) -> None:
    with gateway.held_port() as gone:
        urls = [f"http://127.0.0.1:{gone}", f"http://{world.replicas[1].endpoint}"]
        world.brain.set_desired(brains.told(urls, generation=2))
        answers = [await world.client.post(PATH, json=BODY) for _ in range(6)]
    assert {answer.status_code for answer in answers} == {200}
    records = [await world.record(answer) for answer in answers]
    assert {record.outcome.replica for record in records if record.outcome} == {"r1"}
    assert [record.chosen for record in records[2:]] == ["r1"] * 4


async def test_no_replica_at_all(world: World) -> None:
    soon = brains.org(limits=Limits(wait_seconds=0.5))
    world.brain.set_desired(brains.told([], generation=2, orgs=(soon,)))
    answer = await world.client.post(PATH, json=BODY)
    assert answer.status_code in (429, 503)
    assert answer.headers["retry-after"]


async def test_only_replicas_that_the_gateway_allows(tmp_path: Path, world: World) -> None:
    async with picking(world.brain.for_gateways, PickerSettings(("127.0.0.1", 0))) as picker:
        for allowed, statuses in (
            ([world.replicas[1].endpoint], {200}),
            (["127.0.0.1"], {200}),
            (["10.0.0.1:80"], {503}),
            ([], {503}),
        ):
            hint = [gateway.subset(allowed)]
            async with (
                gateway.envoy(tmp_path, picker.port, world.replicas, before=hint) as url,
                httpx.AsyncClient(base_url=url, timeout=60, headers=HEADERS) as client,
            ):
                answers = [await client.post(PATH, json=BODY) for _ in range(3)]
            assert {answer.status_code for answer in answers} == statuses
            if allowed == [world.replicas[1].endpoint]:
                assert {answer.json()["replica"] for answer in answers} == {"two"}
