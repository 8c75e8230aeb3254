"""What the gRPC server lets in, refuses and bounds."""

from __future__ import annotations

import stat
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster_server.access import AUDIENCE, JwtSettings
from cluster_server.checks import SPEC_BYTES_MAX
from cluster_server.client import Away, ClusterClient, Refused
from cluster_server.inventory import Inventory, on_disk
from cluster_server.processes.backend import ProcessBackend, ProcessOptions
from cluster_server.proto import cluster_pb2 as pb
from cluster_server.server import Place, ServerSettings, TlsFiles, serving
from cluster_server.settings import parse
from kvss_agent.process.options import WrongSettings
from kvss_agent.security.certificates import Role
from tests.cluster_server.certificates import ConsoleAuthority
from tests.cluster_server.requests import FAKE_MANAGER, instance, job

SECRET = "a-secret-of-the-tests-that-is-long-enough"
TOKENS = JwtSettings(SECRET, "HS256", "the console")


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[ProcessBackend]:
    made = ProcessBackend(ProcessOptions(tmp_path / "state", FAKE_MANAGER))
    await made.start()
    yield made
    await made.end_all(1.0)
    await made.stop()


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    return on_disk(tmp_path / "boxes.json", ["box-1", "box-2"])


@pytest.fixture
async def cluster(
    backend: ProcessBackend, inventory: Inventory, tmp_path: Path
) -> AsyncIterator[ClusterClient]:
    settings = ServerSettings((Place(unix=tmp_path / "c.sock"),), watchers_max=2, followers_max=1)
    async with (
        serving(backend, inventory, settings) as running,
        ClusterClient(running.targets[0]) as client,
    ):
        yield client


def token(**claims: Any) -> str:
    now = int(time.time())
    said = {"iss": "the console", "aud": AUDIENCE, "sub": "orchestrator", "iat": now, "exp": now + 60}
    return jwt.encode({**said, **claims}, SECRET, "HS256")


async def refusal(cluster: ClusterClient, *instances: pb.Instance, name: str = "chat") -> Refused:
    with pytest.raises(Refused) as refused:
        await cluster.apply(name, 1, instances)
    return refused.value


async def test_the_socket_is_this_users_alone(cluster: ClusterClient, tmp_path: Path) -> None:
    await cluster.list()
    assert stat.S_IMODE((tmp_path / "c.sock").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "one", "said"),
    [
        ("Chat", instance("a"), "“Chat” is no name of a workload"),
        ("../x", instance("a"), "is no name of a workload"),
        ("x" * 64, instance("a"), "is no name of a workload"),
        ("chat", instance("a/b"), "“a/b” is no name of an instance"),
        ("chat", instance("a", goal=pb.GOAL_UNSPECIFIED), "It has no goal"),
        ("chat", instance("a", grace=0), "Its grace period"),
        ("chat", pb.Instance(name="a", spec=b"[]", goal=pb.RUN, grace_seconds=1), "no JSON object"),
        ("chat", instance("a", text="x" * SPEC_BYTES_MAX), "no JSON object"),
        ("chat", pb.Instance(name="a", spec=b"[" * 99, goal=pb.RUN, grace_seconds=1), "no JSON object"),
    ],
)
async def test_what_is_wrong_with_a_request_is_said(
    cluster: ClusterClient, name: str, one: pb.Instance, said: str
) -> None:
    refused = await refusal(cluster, one, name=name)
    assert refused.status is grpc.StatusCode.INVALID_ARGUMENT
    assert said in str(refused)
    assert (await cluster.list())[0] == []


async def test_a_wrong_secret_is_not_quoted(cluster: ClusterClient) -> None:
    one = instance("a")
    one.secrets["join_token"] = b"tgj_no-json"
    refused = await refusal(cluster, one)
    assert str(refused) == "Instance a: Its secret join_token is no JSON value."


async def test_other_refusals_have_their_status(cluster: ClusterClient) -> None:
    assert "two entries" in str(await refusal(cluster, instance("a"), instance("a")))
    for asked, status in (
        (cluster.get("chat"), grpc.StatusCode.NOT_FOUND),
        (cluster.job("compile-1"), grpc.StatusCode.NOT_FOUND),
        (cluster.job("Compile 1"), grpc.StatusCode.INVALID_ARGUMENT),
        (cluster.submit(pb.JobSpec(name="x", spec=b"{}")), grpc.StatusCode.INVALID_ARGUMENT),
        (cluster.lock("", ["box-1"]), grpc.StatusCode.INVALID_ARGUMENT),
        (cluster.lock("me", ["box-1", "box-1"]), grpc.StatusCode.INVALID_ARGUMENT),
        (cluster.lock("me", []), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(Refused) as refused:
            await asked
        assert refused.value.status is status
    await cluster.submit(job("compile-1", result={}))
    with pytest.raises(Refused) as refused:
        await cluster.submit(job("compile-1", result={"other": 1}))
    assert refused.value.reason == "ALREADY_EXISTS"
    with pytest.raises(Refused, match="There is no instance"):
        _ = [piece async for piece in cluster.logs("chat-0-a", follow=True)]


async def test_bytes_that_are_no_request_are_refused(cluster: ClusterClient, tmp_path: Path) -> None:
    async with aio.insecure_channel(f"unix:{tmp_path / 'c.sock'}") as channel:
        call = channel.unary_unary("/tidegate.cluster.v1.Workloads/Apply")
        with pytest.raises(aio.AioRpcError) as refused:
            await call(b"\xff\xff\xff")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_watches_are_counted(cluster: ClusterClient, tmp_path: Path) -> None:
    async with aclosing(cluster.watch()) as first, aclosing(cluster.watch()) as second:
        for one in (first, second):
            assert (await anext(one)).kind == pb.Event.COMPLETE
        async with aio.insecure_channel(f"unix:{tmp_path / 'c.sock'}") as channel:
            watch = channel.unary_stream(
                "/tidegate.cluster.v1.Workloads/Watch", pb.WatchRequest.SerializeToString
            )
            with pytest.raises(aio.AioRpcError) as refused:
                await anext(aiter(watch(pb.WatchRequest())))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with aclosing(cluster.watch()) as third:  # which waits until there is room again
        assert (await anext(third)).kind == pb.Event.COMPLETE


async def test_a_deadline_ends_a_watch(cluster: ClusterClient, tmp_path: Path) -> None:
    async with aio.insecure_channel(f"unix:{tmp_path / 'c.sock'}") as channel:
        watch = channel.unary_stream(
            "/tidegate.cluster.v1.Workloads/Watch",
            pb.WatchRequest.SerializeToString,
            pb.Event.FromString,
        )
        with pytest.raises(aio.AioRpcError) as ended:
            _ = [event async for event in watch(pb.WatchRequest(), timeout=0.5)]
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_it_says_what_it_serves(cluster: ClusterClient, tmp_path: Path) -> None:
    async with aio.insecure_channel(f"unix:{tmp_path / 'c.sock'}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        state = await check(health_pb2.HealthCheckRequest(service="tidegate.cluster.v1.Workloads"))
        assert state.status == health_pb2.HealthCheckResponse.SERVING
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await anext(aiter(watch))).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        told = (await anext(aiter(answers))).list_services_response.service
    assert {f"tidegate.cluster.v1.{name}" for name in ("Inventory", "Jobs", "Workloads")} <= {
        one.name for one in told
    }


async def test_a_console_is_let_in_by_its_certificate_and_others_are_not(
    backend: ProcessBackend, inventory: Inventory, tmp_path: Path
) -> None:
    authority, other = ConsoleAuthority(), ConsoleAuthority()
    own = authority.issue(Role.CLUSTER, "machine-1")
    files = TlsFiles(*authority.write(own, tmp_path))
    settings = ServerSettings((Place(host="127.0.0.1"),), files)
    async with serving(backend, inventory, settings) as running:

        def client(by: ConsoleAuthority, role: Role, **more: Any) -> ClusterClient:
            shown = by.issue(role, "console")
            return ClusterClient(
                running.targets[0],
                shown.credentials(authority.certificate),
                server_name=own.server_name,
                **more,
            )

        async with client(authority, Role.CONSOLE) as cluster:
            assert (await cluster.list())[0] == []
        async with client(authority, Role.NODE) as cluster:
            with pytest.raises(Refused, match="of node:console: a console's is required") as refused:
                await cluster.list()
            assert refused.value.status is grpc.StatusCode.PERMISSION_DENIED
        async with client(other, Role.CONSOLE, call_seconds=3.0) as cluster:
            with pytest.raises(Away):
                await cluster.list()


async def test_a_console_of_another_authority_is_let_in_by_the_host_name_that_was_agreed_on(
    backend: ProcessBackend, inventory: Inventory, tmp_path: Path
) -> None:
    """A certificate that any authority may have issued: of a node here, and not of a console."""
    authority = ConsoleAuthority()
    own = authority.issue(Role.CLUSTER, "machine-1")
    files = TlsFiles(*authority.write(own, tmp_path), console_name="front.node.tidegate.internal")
    settings = ServerSettings((Place(host="127.0.0.1"),), files)
    async with serving(backend, inventory, settings) as running:

        def client(name: str) -> ClusterClient:
            return ClusterClient(
                running.targets[0],
                authority.issue(Role.NODE, name).credentials(authority.certificate),
                server_name=own.server_name,
            )

        async with client("front") as cluster:
            assert (await cluster.list())[0] == []
        async with client("back") as cluster:
            with pytest.raises(Refused, match="of node:back: a console's is required"):
                await cluster.list()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "A bearer JWT is required"),
        (token(aud="another"), "not valid"),
        (token(exp=1), "expired"),
        (token(iss="somebody"), "not valid"),
        (jwt.encode({"sub": "x"}, "another-secret-that-is-long-enough-for-it", "HS256"), "not valid"),
        (jwt.encode({"sub": "x"}, "", "none"), "not valid"),
    ],
)
async def test_a_jwt_is_let_in_if_it_is_right(
    backend: ProcessBackend, inventory: Inventory, given: str, said: str
) -> None:
    settings = ServerSettings((Place(host="127.0.0.1"),), tokens=TOKENS)
    async with serving(backend, inventory, settings) as running:
        async with ClusterClient(running.targets[0], token=token()) as cluster:
            assert (await cluster.list())[0] == []
            async with aclosing(cluster.watch()) as events:
                assert (await anext(events)).kind == pb.Event.COMPLETE
        async with ClusterClient(running.targets[0], token=given) as cluster:
            with pytest.raises(Refused, match=said) as refused:
                await cluster.list()
            assert refused.value.status is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(Refused):
                await anext(cluster.watch())
        async with aio.insecure_channel(running.targets[0]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            with pytest.raises(aio.AioRpcError) as stranger:  # it would have a place for ever
                await anext(aiter(health.Watch(health_pb2.HealthCheckRequest(), timeout=60)))
            assert stranger.value.code() is grpc.StatusCode.UNAUTHENTICATED
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([asked])
            )
            with pytest.raises(aio.AioRpcError):
                await anext(aiter(answers))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--listen", "0.0.0.0:1"], "nobody would be let in"),
        (["--listen", "0.0.0.0:1"], "which others can reach"),
        (["--listen", "unix:"], "--listen is 'unix:'"),
        (["--listen", f"unix:/{'x' * 120}"], "at most 107 bytes"),
        (["--boxes", "a,a"], "--boxes is 'a,a'"),
        (["--boxes", "@/nonexistent"], "--boxes is"),
        (["--jobs-at-once", "0"], "a number from 1 to 1000"),
        (["--cgroups", "/nonexistent"], "auto, none or the path"),
        (["--silent-time", "1s"], "from 45s"),
    ],
)
def test_settings_that_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(WrongSettings, match=said):
        parse(given, {})


def test_each_backend_tells_a_wrong_setting_once() -> None:
    given = ["--command", "", "--jobs-at-once", "0", "--jobs-kept", "0", "--silent-time", "1s"]
    for backend in ("processes", "kubernetes"):
        with pytest.raises(WrongSettings) as refused:
            parse(["--backend", backend, *given], {})
        told = [sentence.partition(" ")[0] for sentence in str(refused.value).splitlines()]
        assert told == ["--command", "--jobs-at-once", "--jobs-kept", "--silent-time"]


def test_settings_from_flags_and_environment(tmp_path: Path) -> None:
    (tmp_path / "boxes").write_text("# in rack 7\nbox-1\nbox-2\n")
    environment = {"CLUSTER_SERVER_BOXES": f"@{tmp_path / 'boxes'}", "CLUSTER_SERVER_JOBS_KEPT": "7"}
    settings = parse(["--state", str(tmp_path), "--end-instances", "--jobs-kept", "9"], environment)
    assert settings.boxes == ("box-1", "box-2")
    assert (settings.ends_instances, settings.jobs_kept) == (True, 9)
    assert [str(place) for place in settings.server.places] == [f"unix:{tmp_path}/cluster.sock"]
    with pytest.raises(WrongSettings, match="CLUSTER_SERVER_NONSENSE is not a setting"):
        parse([], {"CLUSTER_SERVER_NONSENSE": "1"})
