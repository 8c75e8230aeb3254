"""The picker's settings, its health, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from grpc import aio

from inference_brain.brain import Brain
from inference_brain.desired import Desired, ReplicaSpec, ServedModel
from inference_brain.picker import Answer, Asked
from inference_brain.picker import addresses as picker_addresses
from inference_brain.picker.addresses import Addresses, allows
from inference_brain.picker.health import (
    EXT_PROC,
    NOT_SERVING,
    SERVICE,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
)
from inference_brain.picker.server import picking
from inference_brain.picker.settings import PickerSettings, Tls
from inference_brain.settings import parse
from kvss_agent.process.options import WrongSettings
from tests.inference_brain import brains
from tests.inference_brain.routers import RecordedRouter
from tests.kvss_agent.authority import Authority


@pytest.fixture
def router() -> RecordedRouter:
    return RecordedRouter(lambda _: Answer(500, b""))


@pytest.fixture
async def channel(router: RecordedRouter) -> AsyncIterator[aio.Channel]:
    async with (
        picking(router, PickerSettings(("127.0.0.1", 0))) as picker,
        aio.insecure_channel(f"127.0.0.1:{picker.port}") as made,
    ):
        yield made


async def status(channel: aio.Channel, service: str) -> int:
    check = channel.unary_unary(
        f"/{SERVICE}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
    )
    answer = await check(HealthCheckRequest(service=service))
    return int(answer.status)


async def test_it_is_alive_before_it_is_ready(channel: aio.Channel, router: RecordedRouter) -> None:
    router.is_ready = False
    assert await status(channel, "liveness") == SERVING
    for service in ("", "readiness", EXT_PROC):
        assert await status(channel, service) == NOT_SERVING
    router.is_ready = True
    for service in ("", "readiness", EXT_PROC):
        assert await status(channel, service) == SERVING
    with pytest.raises(aio.AioRpcError) as refused:
        await status(channel, "something else")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_who_watches_is_told_of_changes(channel: aio.Channel, router: RecordedRouter) -> None:
    router.is_ready = False
    watch = channel.unary_stream(
        f"/{SERVICE}/Watch", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
    )
    told = aiter(watch(HealthCheckRequest(service="readiness")))
    assert (await anext(told)).status == NOT_SERVING
    router.is_ready = True
    assert (await anext(told)).status == SERVING


async def test_a_place_that_is_taken(router: RecordedRouter) -> None:
    async with picking(router, PickerSettings(("127.0.0.1", 0))) as picker:
        with pytest.raises(OSError, match="cannot listen"):
            async with picking(router, PickerSettings(("127.0.0.1", picker.port))):
                pass


def settings(tmp_path: Path, *arguments: str) -> PickerSettings | None:
    return parse(["--name", "b", "--state-dir", str(tmp_path), *arguments], {}).picker


def test_settings(tmp_path: Path) -> None:
    certificate, key, authority = map(str, Authority.make(tmp_path / "ca").issue("picker"))
    assert settings(tmp_path) is None
    found = settings(tmp_path, "--picker", "127.0.0.1:9002")
    assert found is not None
    assert found.listen == ("127.0.0.1", 9002)
    assert found.tls is None
    tls = ("--picker-certificate", certificate, "--picker-key", key, "--picker-client-ca", authority)
    found = settings(tmp_path, "--picker", "0.0.0.0:9002", "--body-max", "1MiB", *tls)
    assert found is not None
    assert found.tls == Tls(Path(certificate), Path(key), Path(authority))
    assert found.bounds.body_bytes_max == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--picker", "0.0.0.0:9002"], "can be reached by others"),
        (["--picker", "9002"], "HOST:PORT"),
        (["--picker", "127.0.0.1:9002", "--picker-certificate", "CERTIFICATE"], "belong together"),
        (["--picker", "127.0.0.1:9002", "--picker-client-ca", "CERTIFICATE"], "needs --picker-cert"),
        (["--picker-certificate", "CERTIFICATE", "--picker-key", "KEY"], "needs --picker"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, arguments: list[str], why: str) -> None:
    certificate, key, _ = Authority.make(tmp_path / "ca").issue("picker")
    files = {"CERTIFICATE": str(certificate), "KEY": str(key)}
    with pytest.raises(WrongSettings, match=why):
        settings(tmp_path, *(files.get(one, one) for one in arguments))


async def test_endpoints_of_replicas() -> None:
    expected = {
        "http://10.0.0.1:8000/v1": {"10.0.0.1:8000"},
        "https://10.0.0.1": {"10.0.0.1:443"},
        "http://[::1]:80": {"[::1]:80"},
        "http://localhost:7": {"127.0.0.1:7", "[::1]:7"},
    }
    none = [
        *("http://nobody.invalid:7", "http://10.0.0.1:80000", "http://host:port", "http://[::1"),
        *("http://a\0b:1", ""),
    ]
    found = await Addresses().endpoints([*expected, *none])
    assert all(found[url] in allowed for url, allowed in expected.items())
    assert [found[url] for url in none] == [None] * len(none)


async def test_names_that_no_server_answers_for_hold_up_nobody_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    answered = asyncio.Event()

    async def getaddrinfo(name: str, *_: object, **__: object) -> NoReturn:
        asked.append(name)
        await answered.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Try again")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(picker_addresses, "WAIT_SECONDS", 0.05)
    addresses = Addresses(lambda: 100.0)
    names = [f"http://pod-{number}.engines:8000" for number in range(4)]
    for _ in range(2):  # the second request waits for the same answers
        found = await addresses.endpoints([*names, "http://10.0.0.1:8000"])
        assert found["http://10.0.0.1:8000"] == "10.0.0.1:8000"
        assert [found[one] for one in names] == [None] * 4
        assert len(asked) == 4
    answered.set()
    await addresses.endpoints(names)
    await addresses.endpoints(names)
    assert len(asked) == 4, "that nobody knows them is remembered"


async def test_nobody_waits_long_for_a_name_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has fallen silent may take as long for each answer: what it said before is used."""
    now, is_silent = 100.0, False

    async def getaddrinfo(*_: object, **__: object) -> list[tuple[Any, ...]]:
        if is_silent:
            await asyncio.Event().wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(picker_addresses, "WAIT_SECONDS", 3600.0)
    addresses, url = Addresses(lambda: now), "http://pod-1.engines:8000"
    async with asyncio.timeout(60):
        assert await addresses.endpoints([url]) == {url: "10.0.0.1:8000"}
        now, is_silent = now + picker_addresses.SECONDS, True
        assert await addresses.endpoints([url]) == {url: "10.0.0.1:8000"}
        monkeypatch.setattr(picker_addresses, "WAIT_SECONDS", 0.01)
        unknown = "http://pod-2.engines:8000"
        assert await addresses.endpoints([unknown]) == {unknown: None}
        monkeypatch.setattr(picker_addresses, "WAIT_SECONDS", 3600.0)
        assert await addresses.endpoints([unknown]) == {unknown: None}


async def test_a_replica_of_which_nobody_says_where_it_is_costs_no_request() -> None:
    """As while an instance of it starts."""
    brain = Brain("b", None, "test", token="t" * 20)
    replicas = (ReplicaSpec("r0", endpoint="redis"), ReplicaSpec("r1", "http://10.0.0.1:8000"))
    headers = {"authorization": f"Bearer {brains.KEY}"}
    asked = Asked("POST", "/v1/completions", headers, b'{"model": "m", "prompt": "Hello"}')
    async with brain.running():
        brain.set_desired(brains.told((), models=(ServedModel("m", 1000, replicas),)))
        place = await brain.for_gateways.route(asked)
        assert not isinstance(place, Answer), place.body
        assert place.endpoints == ["10.0.0.1:8000"]
        place.ended(whole=False)


async def test_replicas_that_come_or_move_while_names_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that waits for a name is sent to where they are by then."""
    asked, answered = asyncio.Event(), asyncio.Event()

    async def getaddrinfo(*_: object, **__: object) -> NoReturn:
        asked.set()
        await answered.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Try again")

    def document(generation: int, **urls: str) -> Desired:
        replicas = tuple(ReplicaSpec(name, f"http://{url}:8000") for name, url in urls.items())
        return brains.told((), generation, models=(ServedModel("m", 1000, replicas),))

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    brain = Brain("b", None, "test", token="t" * 20)
    headers = {"authorization": f"Bearer {brains.KEY}"}
    body = b'{"model": "m", "prompt": "Hello"}'
    async with brain.running():
        brain.set_desired(document(1, a="engine.invalid", b="10.0.0.1", c="10.0.0.2"))
        routing = asyncio.ensure_future(
            brain.for_gateways.route(Asked("POST", "/v1/completions", headers, body))
        )
        await asked.wait()
        brain.set_desired(document(2, a="engine.invalid", b="10.0.0.1", c="10.0.0.3", d="10.0.0.4"))
        answered.set()
        place = await routing
        assert not isinstance(place, Answer), place.body
        assert sorted(place.endpoints) == ["10.0.0.1:8000", "10.0.0.3:8000", "10.0.0.4:8000"]
        place.ended(whole=False)


async def test_the_only_replica_moves_while_its_name_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def getaddrinfo(name: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        asked.set()
        await answered.wait()
        ip = {"before.engines": "10.0.0.1", "after.engines": "10.0.0.2"}[name]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0))]

    def document(generation: int, host: str) -> Desired:
        replica = ReplicaSpec("r0", f"http://{host}:8000")
        return brains.told((), generation, models=(ServedModel("m", 1000, (replica,)),))

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(picker_addresses, "WAIT_SECONDS", 60.0)
    brain = Brain("b", None, "test", token="t" * 20)
    headers = {"authorization": f"Bearer {brains.KEY}"}
    body = b'{"model": "m", "prompt": "Hello"}'
    async with brain.running():
        brain.set_desired(document(1, "before.engines"))
        routing = asyncio.ensure_future(
            brain.for_gateways.route(Asked("POST", "/v1/completions", headers, body))
        )
        await asked.wait()
        brain.set_desired(document(2, "after.engines"))
        answered.set()
        place = await routing
        assert not isinstance(place, Answer), place.body
        assert place.endpoints == ["10.0.0.2:8000"]
        place.ended(whole=False)


@pytest.mark.parametrize(
    ("among", "is_allowed"),
    [
        (None, True),
        (frozenset({"10.0.0.1:80"}), True),
        (frozenset({"10.0.0.1"}), True),
        (frozenset({"10.0.0.1:81", "10.0.0.2"}), False),
        (frozenset(), False),
    ],
)
def test_which_endpoints_a_gateway_allows(among: frozenset[str] | None, *, is_allowed: bool) -> None:
    assert allows(among, "10.0.0.1:80") is is_allowed
