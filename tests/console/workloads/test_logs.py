"""Logs of instances: read from a Cluster Server that really runs, by who may."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from django.test import Client

from cluster_server.client import ClusterClient
from cluster_server.proto import cluster_pb2 as pb
from cluster_server.proto import rpc
from console.accounts.models import User
from console.workloads import logs
from console.workloads.models import Workload
from tests.cluster_server import requests
from tests.cluster_server.servers import ServerProcess, server
from tests.conftest import People
from tests.console.ctl.shelf import Done, Person
from tests.console.workloads.workloads import a_workload, an_instance
from tests.html import compact
from tests.live import ANSWER_SECONDS_MAX, LiveConsole, live_console, wait_until

pytestmark = pytest.mark.timeout(180)
NAME = "talk-0-r1-0000"
URL = f"/api/v1/workloads/talk/logs?instance={NAME}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServerProcess]:
    """With one instance, which has written 1000 lines."""
    with tempfile.TemporaryDirectory() as folder, server(Path(folder), "--end-instances") as made:
        put(made, lines=1000)
        wait_until("it has written", lambda: b"line 999" in tail_of(made))
        yield made


def put(made: ServerProcess, *, goal: Any = pb.RUN, **spec: Any) -> None:
    async def call() -> None:
        async with ClusterClient(made.target) as client:
            before = [one.generation for one in (await client.list())[0]]
            instance = requests.instance(NAME, goal=goal, **spec)
            await client.apply("talk", max(before, default=0) + 1, [instance])

    asyncio.run(call())


def tail_of(made: ServerProcess) -> bytes:
    async def call() -> bytes:
        async with ClusterClient(made.target) as client, aclosing(client.logs(NAME)) as pieces:
            return b"".join([piece async for piece in pieces])

    return asyncio.run(call())


def of(people: People) -> Workload:
    workload = a_workload(people.acme)
    an_instance(workload)
    return workload


def test_the_last_lines_are_for_members_of_the_org(
    cluster: ServerProcess,
    people: People,
    api_of: Callable[[User], Client],
    browser_of: Callable[[User], Client],
    settings: Any,
) -> None:
    settings.CLUSTER_URL = cluster.target
    of(people)
    found = api_of(people.viewer).get(f"{URL}&tail=3")
    assert found.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert found.content == b"line 997\nline 998\nline 999\n"
    assert api_of(people.stranger).get(URL).status_code == 404
    for wrong in ("tail=0", "tail=10001", "follow=maybe"):
        assert api_of(people.viewer).get(f"{URL}&{wrong}").status_code == 422
    page = compact(browser_of(people.viewer).get(f"/workloads/talk/instances/{NAME}/"))
    assert "last 100 lines, read" in page
    assert "line 900 line 901" in page
    assert "line 899" not in page


def test_what_keeps_it_from_being_read_is_a_problem_and_stands_on_the_page(
    people: People,
    api_of: Callable[[User], Client],
    browser_of: Callable[[User], Client],
    settings: Any,
    cluster: ServerProcess,
) -> None:
    other = an_instance(of(people))
    for target, name, status, sentence in (
        ("", NAME, 503, "TIDEGATE_CLUSTER_URL is not set."),
        ("unix:/nowhere/c.sock", NAME, 503, logs.NO_SERVER),
        (cluster.target, other.name, 404, logs.NOT_STORED),
        (cluster.target, "of-another-one", 404, "The workload has no instance of that name."),
    ):
        settings.CLUSTER_URL = target
        for follow in ("", "&follow=true"):
            found = api_of(people.viewer).get(f"/api/v1/workloads/talk/logs?instance={name}{follow}")
            assert (found.status_code, found.json()["detail"]) == (status, sentence)
    settings.CLUSTER_URL = "unix:/nowhere/c.sock"
    page = browser_of(people.viewer).get(f"/workloads/talk/instances/{NAME}/")
    assert logs.NO_SERVER in compact(page)


def test_more_than_an_answer_holds_is_cut_to_whole_lines(
    cluster: ServerProcess, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.CLUSTER_URL = cluster.target
    monkeypatch.setattr(logs, "BYTES_MAX", 25)
    assert logs.tail(NAME, 100) == b"line 998\nline 999\n"


class Endless:
    """Whose logs are much longer than any that a Cluster Server keeps."""

    def Logs(self, _request: pb.LogsRequest, _context: Any) -> Iterator[pb.LogChunk]:  # noqa: N802
        for number in range(200):
            yield pb.LogChunk(data=b"x" * (1 << 18) + b" %d\n" % number)


def test_no_more_of_a_log_is_held_than_an_answer_has(tmp_path: Path, settings: Any) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    rpc.serve("Workloads", Endless(), server)
    server.add_insecure_port(f"unix:{tmp_path}/c.sock")
    server.start()
    settings.CLUSTER_URL = f"unix:{tmp_path}/c.sock"
    tracemalloc.start()
    try:
        found = logs.tail(NAME, 100, seconds=60.0)
        assert tracemalloc.get_traced_memory()[1] < 16 * logs.BYTES_MAX
    finally:
        tracemalloc.stop()
        server.stop(0).wait()
    assert len(found) <= logs.BYTES_MAX
    assert found.endswith(b"x 199\n")


async def followed(pieces: int = 100, **more: Any) -> bytes:
    found, options = b"", {"owner": "o", "may_see": lambda: True, **more}
    async with aclosing(logs.follow(NAME, 1, **options)) as coming:
        async for piece in coming:
            found += piece
            pieces -= 1
            if not pieces:
                break
    return found


def test_following_ends_when_it_is_over_and_when_it_may_not_be_seen_any_more(
    cluster: ServerProcess, settings: Any
) -> None:
    settings.CLUSTER_URL = cluster.target
    over = asyncio.run(followed(seconds=0.3))  # for a busy machine too short to read the line
    assert over.removeprefix(b"line 999\n") == (
        b"\n--- tidegate: The longest time to follow a log is over. Follow it again.\n"
    )
    refused = asyncio.run(followed(may_see=lambda: False, check_seconds=0.1))
    assert refused.endswith(b"\n--- tidegate: You may not see this log any more.\n")
    assert asyncio.run(followed(pieces=1)) == b"line 999\n"
    assert not len(logs.FOLLOWERS)


def test_so_many_follow_and_no_more(
    people: People, api_of: Callable[[User], Client], settings: Any, cluster: ServerProcess
) -> None:
    settings.CLUSTER_URL = cluster.target
    of(people)
    owner = people.principal("viewer").owner
    for _ in range(logs.FOLLOWERS_OF_ONE_MAX):
        logs.FOLLOWERS.enter(owner)
    try:
        found = api_of(people.viewer).get(f"{URL}&follow=true")
        assert (found.status_code, found.json()["reason"]) == (429, "TooManyAttempts")
        assert b"You follow 4 logs already." in asyncio.run(followed(owner=owner))
    finally:
        for _ in range(logs.FOLLOWERS_OF_ONE_MAX):
            logs.FOLLOWERS.leave(owner)
    assert not len(logs.FOLLOWERS)
    crowd = logs.Followers(total=1)
    crowd.enter("a")
    with pytest.raises(logs.TooManyFollowers, match="1 logs are followed already"):
        crowd.check("b")


MAKE = """
from console.workloads.models import Workload
from tests.console.workloads.workloads import a_workload, an_instance
an_instance(a_workload())
"""


@pytest.mark.slow
def test_a_person_follows_a_log_and_leaves(tmp_path: Path) -> None:
    """Over a real console, which notices that they leave; and the end of the instance ends the log."""
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as made:
        put(made, lines=3)
        with live_console(tmp_path, {"TIDEGATE_CLUSTER_URL": made.target}) as console:
            console.manage(MAKE)
            person = Person(tmp_path)
            person.output_of("login", console.address, told=f"{console.token()}\n")
            assert person.output_of("logs", "talk", "--tail", "2") == "line 1\nline 2\n"
            followed_until_left(console)
            ended = threading.Timer(1.0, lambda: put(made, goal=pb.DRAIN, lines=3))
            ended.start()
            command = ("logs", "-f", f"instance/talk/{NAME}", "--tail", "3")
            followed: list[Done] = []

            def has_a_place() -> bool:
                followed[:] = [person.run(*command)]
                return "TooManyAttempts" not in followed[0].errors

            wait_until("the console has noticed that they have left", has_a_place)
            assert followed[0].output.endswith("line 2\nended\n")


def followed_until_left(console: LiveConsole) -> None:
    headers = {"Authorization": f"Bearer {console.token()}"}
    asked = f"{console.address}{URL}&follow=true&tail=1"

    def follows() -> bool:
        with httpx.stream("GET", asked, headers=headers, timeout=ANSWER_SECONDS_MAX) as found:
            if found.status_code == httpx.codes.TOO_MANY_REQUESTS:
                return False  # the console has not noticed yet that the one before has left
            assert found.status_code == httpx.codes.OK
            assert next(found.iter_lines()) == "line 2"
            return True

    for _ in range(2 * logs.FOLLOWERS_OF_ONE_MAX):  # were they not noticed to leave, there were no place
        wait_until("there is a place", follows)
