"""Where replicas of workloads are: read from a real Redis, as a brain's user, while requests run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import redis

from console.stack import redis as redis_server
from console.stack import redis_users
from inference_brain import endpoints as endpoints_module
from inference_brain.desired import Desired, Limits, ReplicaSpec, ServedModel
from inference_brain.endpoints import Endpoint, EndpointDocument, EndpointReader, Endpoints
from inference_brain.upstream.fleet import Fleet
from inference_brain.upstream.health import State
from kvss_agent.documents import Invalid
from telemetry.credentials import own_url, reader, rules, users
from telemetry.records import ENDPOINTS, ENDPOINTS_BEFORE, ENDPOINTS_CHANNEL, MAP_STREAM
from tests.embedded import running
from tests.inference_brain.brains import RunningBrain, model, org, post, told
from tests.inference_brain.engines import FakeEngine
from tests.live import wait_until

TOKEN = "token-of-the-control-api"
BRAIN = "brain:b"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    made = redis_server.prepare(
        tmp_path_factory.mktemp("redis") / "t", users=redis_users.TELEMETRY, durable=False, strict=True
    )
    with running(made, made.home.parent / "log"):
        yield made


@pytest.fixture
def leader(server: redis_server.RedisServer) -> Iterator[redis.Redis]:
    """As the user that the leader has; the brain's users are there too."""
    with redis.Redis.from_url(server.url) as admin:
        admin.flushall()
        for user in users(BRAIN):
            admin.execute_command("ACL", "SETUSER", user, *rules(user, TOKEN))
    with redis.Redis.from_url(server.url_of("leader"), driver_info=None) as client:
        yield client


def urls_of_brain(server: redis_server.RedisServer) -> tuple[str, str]:
    """As it counts, and as it reads endpoints."""
    own = server.url_of("own", "")
    return own_url(own, BRAIN, TOKEN), own_url(own, reader(BRAIN), TOKEN)


def put(leader: redis.Redis, *endpoints: Endpoint, name: str = "m", version: int = 1) -> None:
    raw = msgspec.json.encode(EndpointDocument(time.time(), version, endpoints))
    leader.set(ENDPOINTS + name, raw, ex=90)
    leader.publish(ENDPOINTS_CHANNEL, name)


def document(*names: str, generation: int = 1, **limits: Any) -> Desired:
    replicas = tuple(ReplicaSpec(name, endpoint="redis") for name in names)
    return told(
        (),
        generation,
        models=(ServedModel("m", 100_000, replicas),),
        orgs=(org(limits=Limits(**{"wait_seconds": 10.0, **limits})),),
    )


def ready(replica: str, url: str) -> Endpoint:
    return Endpoint(replica, url, "ready", time.time())


def test_a_replica_without_an_address_is_refused_unless_redis_has_it() -> None:
    with pytest.raises(Invalid, match="has no URL"):
        told((), models=(ServedModel("m", 100, (ReplicaSpec("r0"),)),))


def test_a_new_address_is_a_new_process_with_the_same_driver() -> None:
    """Its ejection and slow start are new; one that takes over a warm cache does not begin slowly."""
    now = 100.0
    fleet, endpoints = Fleet(lambda: now), Endpoints(lambda: now)
    desired = document("r0", "r1")
    endpoints.follow(desired)
    fleet.follow(endpoints.resolved(desired))
    assert [one.state(now) for one in fleet] == [State.NO_ENDPOINT] * 2
    assert fleet.serving("m") == 0
    endpoints.set("m", EndpointDocument(0, 1, (ready("r0", "http://a"), ready("r1", "http://b"))))
    fleet.follow(endpoints.resolved(desired))
    now += 60.0
    first = fleet.replica("m", "r0")
    assert first is not None
    for _ in range(3):
        fleet.failed(first, None, "acme", is_proven=True)
    assert first.state(now) is State.EJECTED
    endpoints.set("m", EndpointDocument(0, 2, (ready("r0", "http://c"), ready("r1", "http://b"))))
    fleet.follow(endpoints.resolved(desired))
    second = fleet.replica("m", "r0")
    assert second is not None
    assert second is not first
    assert second.state(now) is State.READY
    assert second.in_progress == 0


def test_who_is_found_with_no_others_does_not_begin_slowly() -> None:
    """As all replicas are by a brain that has started again: their caches are warm. One that comes later
    comes to others."""
    fleet, endpoints = Fleet(lambda: 100.0), Endpoints(lambda: 100.0)
    desired = document("r0", "r1", "r2")
    endpoints.follow(desired)
    fleet.follow(endpoints.resolved(desired))
    found = [ready("r0", "http://a"), ready("r1", "http://b")]
    endpoints.set("m", EndpointDocument(0, 1, tuple(found)))
    fleet.follow(endpoints.resolved(desired))
    assert [one.state(100.0) for one in fleet] == [State.READY, State.READY, State.NO_ENDPOINT]
    endpoints.set("m", EndpointDocument(0, 2, (*found, ready("r2", "http://c"))))
    fleet.follow(endpoints.resolved(desired))
    assert [one.state(100.0) for one in fleet] == [State.READY, State.READY, State.SLOW_START]


async def test_without_redis_what_is_known_stays_and_grows_old() -> None:
    now = 100.0
    endpoints = Endpoints(lambda: now)
    desired = document("r0")
    endpoints.follow(desired)
    endpoints.set("m", EndpointDocument(0, 1, (ready("r0", "http://a"),)))
    reader = EndpointReader(endpoints, "unix:///nowhere/redis.sock", lambda: None)
    reading = asyncio.create_task(reader.run())
    await asyncio.sleep(0.05)
    now += 40.0
    assert endpoints.ages(now) == {"m": 40.0}
    assert endpoints.resolved(desired).models[0].replicas[0].url == "http://a"
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert not reader.is_connected


async def test_whatever_goes_wrong_endpoints_are_read_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = EndpointReader(Endpoints(time.monotonic), "unix:///nowhere/redis.sock", lambda: None)
    is_read, faults = asyncio.Event(), [RuntimeError("of the client"), ValueError("of the client")]

    async def follow() -> None:
        if faults:
            raise faults.pop()
        is_read.set()

    monkeypatch.setattr(endpoints_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(reader, "_follow", follow)
    reading = asyncio.create_task(reader.run())
    await asyncio.wait_for(is_read.wait(), 30)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert caplog.text.count("Endpoints can't be read") == 2


def test_requests_go_where_the_leader_says_and_wait_while_it_says_nothing(
    server: redis_server.RedisServer, leader: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints_module, "PERIOD_SECONDS", 3600.0)  # it is told of what changes
    with FakeEngine() as old, FakeEngine() as new, RunningBrain(document("r0")) as brain:
        brain.call(lambda: brain.brain.use_redis(*urls_of_brain(server)))

        def ask() -> httpx.Response:
            body = {"model": "m", "prompt": "x", "max_tokens": 1}
            return post(f"{brain.url}/v1/completions", headers=brain.headers, json=body)

        put(leader, ready("r0", old.url))
        assert ask().status_code == 200  # it has waited in the queue
        assert len(old.asked) == 1
        put(leader, ready("r0", new.url), version=2)
        wait_until("the new instance is asked", lambda: ask().status_code == 200 and bool(new.asked))


def test_while_nobody_leads_requests_go_where_replicas_were(
    server: redis_server.RedisServer, leader: redis.Redis
) -> None:
    """A key expires some time after the last leader has written it; replicas serve all the same."""
    models = tuple(
        ServedModel(name, 100_000, (ReplicaSpec("r0", endpoint="redis"),)) for name in ("m", "other")
    )
    desired = told((), models=models, orgs=(org(limits=Limits(wait_seconds=0.5)),))
    with FakeEngine() as engine, RunningBrain(desired) as brain:
        brain.call(lambda: brain.brain.use_redis(*urls_of_brain(server)))

        def knows(name: str) -> bool:
            return bool(brain.brain.fleet.serving(name))

        put(leader, ready("r0", engine.url))
        wait_until("m is known", lambda: knows("m"))
        leader.delete(ENDPOINTS + "m")
        put(leader, ready("r0", engine.url), name="other")
        wait_until("all were read again", lambda: knows("other"))
        body = {"model": "m", "prompt": "x", "max_tokens": 1}
        answer = httpx.post(f"{brain.url}/v1/completions", headers=brain.headers, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        ages = brain.brain.endpoints.ages(time.monotonic())
        assert ages["m"] > ages["other"]  # it is said how old it is


def test_another_process_at_a_replica_has_nothing_of_what_was_sent_to_the_one_before(
    server: redis_server.RedisServer, leader: redis.Redis
) -> None:
    """Without a driver nobody hands a cache over."""
    with FakeEngine() as old, FakeEngine() as new, RunningBrain(document("r0")) as brain:
        brain.call(lambda: brain.brain.use_redis(*urls_of_brain(server)))

        def expected_hit() -> int:
            body = {"model": "m", "prompt": [*range(1024)], "max_tokens": 1}
            answer = httpx.post(
                f"{brain.url}/v1/completions", headers=brain.headers, json=body, timeout=60
            )
            assert answer.status_code == 200
            record = brain.call(lambda: brain.brain.find(answer.headers["x-request-id"]))
            assert record
            [candidate] = record.candidates
            return candidate.hit_tokens

        put(leader, ready("r0", old.url))
        assert expected_hit() == 0
        assert expected_hit() == 1024
        put(leader, ready("r0", new.url), version=2)
        wait_until(
            "the brain knows the new one",
            lambda: [one.spec.url for one in brain.brain.fleet] == [new.url],
        )
        assert expected_hit() == 0
        assert len(new.asked) == 1


def test_endpoints_that_can_not_be_read_are_said_to_be_so_once_and_those_before_stay(
    server: redis_server.RedisServer, leader: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeEngine() as engine, RunningBrain(document("r0")) as brain:
        brain.call(lambda: brain.brain.use_redis(*urls_of_brain(server)))
        put(leader, ready("r0", engine.url))
        wait_until("it is known", lambda: brain.brain.fleet.serving("m"))
        for _ in range(3):
            leader.set(ENDPOINTS + "m", b'{"version": "none"}')
            leader.publish(ENDPOINTS_CHANNEL, "m")
            wait_until("it is said", lambda: "The endpoints of m can't be read" in caplog.text)
        put(leader, ready("r0", "http://127.0.0.1:1"), version=2)
        wait_until(
            "it is read again",
            lambda: [one.spec.url for one in brain.brain.fleet] == ["http://127.0.0.1:1"],
        )
        assert caplog.text.count("The endpoints of m can't be read, and stay what they are: ") == 1


# What a brain could do to others


def script(key: str) -> tuple[str, ...]:
    return "EVAL", "return redis.call('SET', KEYS[1], ARGV[1])", "1", key, "evil"


def writes(key: str) -> list[tuple[str, ...]]:
    """What a user of a brain would do it with. Of all other commands it has none."""
    return [("SET", key, "evil"), script(key), ("HSET", key, "a", "b"), ("EXPIRE", key, "1")]


def is_refused(url: str, *command: str) -> bool:
    """Whether Redis lets its user not do this."""
    with redis.Redis.from_url(url, driver_info=None) as client:
        try:
            client.execute_command(*command)
        except redis.ResponseError as error:
            return "permission" in str(error) or "The user executing the script" in str(error)
    return False


def test_a_brain_can_not_write_where_replicas_are(
    server: redis_server.RedisServer, leader: redis.Redis
) -> None:
    put(leader, ready("r0", "http://a"))
    counting, reading = urls_of_brain(server)
    key, before = ENDPOINTS + "m", leader.get(ENDPOINTS + "m")
    for url in (counting, reading):
        for command in writes(key):
            assert is_refused(url, *command), command
        assert is_refused(url, "PUBLISH", ENDPOINTS_CHANNEL, "m")
        assert is_refused(url, "DEL", key)
    assert leader.get(key) == before
    # One user reads them, and nothing else
    assert not is_refused(reading, "MGET", key)
    for other in (MAP_STREAM + "driver:d", "tidegate:routing:x", ENDPOINTS_BEFORE + "m"):
        assert is_refused(reading, "MGET", other)
    assert is_refused(counting, "MGET", key)


def test_a_brain_that_is_taken_over_does_not_say_where_others_send_prompts(
    server: redis_server.RedisServer, leader: redis.Redis
) -> None:
    with FakeEngine() as good, FakeEngine() as evil, RunningBrain(document("r0")) as brain:
        brain.call(lambda: brain.brain.use_redis(*urls_of_brain(server)))
        raw = msgspec.json.encode(EndpointDocument(0.0, (1 << 63) - 1, (ready("r0", evil.url),)))
        with redis.Redis.from_url(urls_of_brain(server)[0], driver_info=None) as taken_over:
            taken_over.set(ENDPOINTS_BEFORE + "m", raw)  # where brains of the version before read
        put(leader, ready("r0", good.url))
        body = {"model": "m", "prompt": "x", "max_tokens": 1}
        for _ in range(3):
            answer = post(f"{brain.url}/v1/completions", headers=brain.headers, json=body)
            assert answer.status_code == 200
            leader.publish(ENDPOINTS_CHANNEL, "m")  # so that it reads again
        assert len(good.asked) == 3
        assert not evil.asked


def test_a_brain_that_was_told_of_no_redis_says_so(server: redis_server.RedisServer) -> None:
    with RunningBrain(document("r0")) as brain:
        [problem] = brain.brain.observed()["problems"]
        assert "TIDEGATE_OWN_TELEMETRY_URL" in problem
        brain.call(lambda: brain.brain.use_redis(*urls_of_brain(server)))
        assert brain.brain.observed()["problems"] == []


def test_with_no_endpoint_a_request_is_refused_with_the_reason(
    server: redis_server.RedisServer, leader: redis.Redis
) -> None:
    with RunningBrain(document("r0", "r1", wait_seconds=0.3)) as brain:
        brain.call(lambda: brain.brain.use_redis(*urls_of_brain(server)))
        answer = post(
            f"{brain.url}/v1/completions",
            headers=brain.headers,
            json={"model": "m", "prompt": "x"},
        )
        assert answer.status_code == 503
        assert "2 no endpoint" in answer.json()["error"]["message"]


def test_models_with_addresses_of_their_own_are_left_alone() -> None:
    endpoints = Endpoints()
    desired = told(["http://a"], models=(model(["http://a"]),))
    endpoints.follow(desired)
    assert endpoints.resolved(desired) is desired
