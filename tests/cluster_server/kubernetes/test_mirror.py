"""The mirror of objects, over an API server that forgets changes and answers late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from cluster_server.kubernetes import mirror as mirrors
from cluster_server.kubernetes.api import CONFIG_MAP, SECRET, Api, Document
from cluster_server.kubernetes.mirror import Mirror
from tests.cluster_server.kubernetes.api_server import ApiServer, until
from tests.cluster_server.kubernetes.unconnected import stored

Made = Callable[[], Awaitable[Mirror]]


class Seen:
    """What the mirror calls with."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, bool]] = []
        self.ended = asyncio.Event()

    def __call__(self, name: str, document: Document | None) -> None:
        self.changes.append((name, document is not None))


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
async def mirror(server: ApiServer, api: Api, seen: Seen) -> AsyncIterator[Mirror]:
    server.put("configmaps", "old", {})
    server.put("configmaps", "goes", {})
    made = Mirror(api, CONFIG_MAP, {}, seen, seen.ended.set)
    await made.start()
    await until("it watches", lambda: made.is_current)
    yield made
    await made.stop()


async def test_what_was_made_while_a_list_was_read_stays(
    server: ApiServer, mirror: Mirror, seen: Seen
) -> None:
    def make() -> None:
        """As the backend does, which takes what the API server has answered."""
        mirror.take(server.put("configmaps", "new", {}))

    server.meanwhile = make
    server.forget_changes()
    await until("it was listed again", lambda: server.meanwhile is None)
    server.remove("configmaps", "goes")
    await until("it follows again", lambda: ("goes", False) in seen.changes)
    assert set(mirror.objects) == {"old", "new"}
    assert ("new", False) not in seen.changes


async def test_what_has_gone_while_nobody_watched_is_removed(
    server: ApiServer, mirror: Mirror, seen: Seen
) -> None:
    server.refusals["GET", "configmaps"] = 503
    server.forget_changes()
    del server.objects["configmaps", "goes"]
    del server.refusals["GET", "configmaps"]
    await until("it is removed", lambda: ("goes", False) in seen.changes)
    assert set(mirror.objects) == {"old"}


async def test_an_api_server_that_forgets_all_at_once_is_asked_with_pauses(
    server: ApiServer, api: Api, mirror: Mirror, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "BACKOFF_FIRST_SECONDS", 3600.0)  # it ends with the test
    server.put("configmaps", "new", {})
    await until("it follows", lambda: ("new", True) in seen.changes)
    asked = server.count("GET", "configmaps")
    server.forget_all_changes()
    await until("it has tried", lambda: server.count("GET", "configmaps") - asked >= 2)
    for _ in range(50):
        await api.list(SECRET, {})
    assert server.count("GET", "configmaps") - asked == 2, "a list, and a watch that failed at once"


async def test_what_we_have_deleted_does_not_come_back_with_an_older_list(
    server: ApiServer, mirror: Mirror, seen: Seen
) -> None:
    def delete() -> None:
        server.remove("configmaps", "goes")
        mirror.drop("goes")

    server.meanwhile = delete
    server.forget_changes()
    await until("it was listed again", lambda: server.meanwhile is None)
    server.put("configmaps", "last", {})
    await until("it follows again", lambda: ("last", True) in seen.changes)
    assert [change for change in seen.changes if change[0] == "goes"] == [
        ("goes", True),
        ("goes", False),
    ]


async def test_an_answer_that_the_watch_has_overtaken_brings_nothing_back(
    server: ApiServer, mirror: Mirror, seen: Seen
) -> None:
    """As of a pod that was asked for while it ended: nobody would report again that it is gone."""
    answer = server.objects["configmaps", "goes"]
    server.remove("configmaps", "goes")
    await until("it is removed", lambda: ("goes", False) in seen.changes)
    mirror.take(answer)
    assert set(mirror.objects) == {"old"}
    made = server.put("configmaps", "goes", {})
    await until("another one is there", lambda: "goes" in mirror.objects)
    mirror.take(answer)
    assert mirror.objects["goes"]["metadata"]["uid"] == made["metadata"]["uid"]


async def test_the_end_of_a_watch_is_told(server: ApiServer, mirror: Mirror, seen: Seen) -> None:
    """Whatever the reason is."""
    server.garbles = True
    server.put("configmaps", "new", {})
    async with asyncio.timeout(60):
        await seen.ended.wait()
    assert not mirror.is_current


async def test_an_object_that_nothing_can_be_made_of_is_passed_over(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []

    def on_change(name: str, one: Document | None) -> None:
        if one:
            seen.append(one["metadata"]["labels"]["workload"])

    ended = asyncio.Event()
    mirror = Mirror(api, CONFIG_MAP, {}, on_change, ended.set)
    mirror.take(stored({"metadata": {"name": "evil"}}, "u1"))
    mirror.take(stored({"metadata": {"name": "good", "labels": {"workload": "chat"}}}, "u2"))
    assert seen == ["chat"]
    assert "ConfigMap evil is passed over" in caplog.text
    assert not ended.is_set()
