"""Objects at a daemon, over HTTP; and what an operator writes to say where they are."""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvss_agent.documents import Invalid
from swdriver_shim.adapters import remote
from swdriver_shim.adapters.objects_config import Misconfigured, OpenObjects, open_objects
from swdriver_shim.adapters.remote import Objects, RemoteObjects
from swdriver_shim.daemon.binary import KV_BYTES_MAX
from swdriver_shim.desired import parse
from swdriver_shim.object_store import TooLarge
from swdriver_shim.objects import object_model
from swdriver_shim.policy import Rules
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import wait_until
from tests.swdriver_shim.answers import headed, saying
from tests.swdriver_shim.daemons import ACME, GLOBEX, Daemon, told
from tests.swdriver_shim.keeping import BYTES_MAX, Keeper, names, value

pytestmark = pytest.mark.usefixtures("patient")
SLOTS = 20
MODEL = object_model("llama", BYTES_MAX)


def objects_document(agents: list[AgentProcess], **more: Any) -> dict[str, Any]:
    document = told(agents, model=msgspec.to_builtins(MODEL), **more)
    document["homes"][0]["group"] = MODEL.groups[0].name
    return document


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[AgentProcess]]:
    """One for all tests: a driver that has no notes empties it before anything else."""
    with agent(tmp_path_factory.mktemp("agent") / "one") as made:
        made.tell(document(1, spec("s", SLOTS, BYTES_MAX)))
        yield [made]


@pytest.fixture
def daemon(tmp_path: Path, agents: list[AgentProcess]) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "driver")
    assert made.control("desired", objects_document(agents)).status_code == 202
    wait_until("it is ready", made.is_ready)
    yield made
    if made.process.poll() is None:
        assert made.stop() == 0


@contextlib.contextmanager
def asking(daemon: Daemon, token: str = ACME) -> Iterator[Keeper]:
    remote = RemoteObjects(str(daemon.http.base_url), token)
    kept: Objects = remote
    yield Keeper(kept)
    remote.close()


@pytest.mark.slow
def test_objects_come_back_from_a_daemon_and_are_their_orgs_alone(daemon: Daemon) -> None:
    with asking(daemon) as acme, asking(daemon, GLOBEX) as globex:
        assert acme.objects.value_bytes_max == BYTES_MAX
        assert acme.put(names(1, 2)) == [True, True]
        assert acme.put(names(3), 5) == [True]
        assert acme.objects.exists(names(1, 9, 3)) == [True, False, True]
        assert acme.get(names(1, 9, 3, 2)) == [BYTES_MAX, None, 5, BYTES_MAX]
        assert globex.get(names(1, 2, 3)) == [None] * 3
        assert acme.put(names(4), rules=Rules(no_store=True)) == [False]
        assert acme.objects.remove(names(1))
        assert acme.get(names(1, 2)) == [None, BYTES_MAX]
        globex.put(names(1))
        assert acme.objects.clear()
        assert acme.get(names(2)) == [None]
        assert globex.get(names(1)) == [BYTES_MAX]


@pytest.mark.slow
def test_what_does_not_fit_is_an_error_and_what_fits_no_place_a_miss(daemon: Daemon) -> None:
    with asking(daemon) as mine:
        with pytest.raises(TooLarge):
            mine.objects.put(names(1), [memoryview(bytes(BYTES_MAX + 1))])
        mine.put(names(1, 2))
        places = [memoryview(bytearray(10)), memoryview(bytearray(BYTES_MAX))]
        assert mine.objects.get(names(1, 2), places) == [None, BYTES_MAX]
        assert places[1] == value(b"page-2")


@pytest.mark.slow
def test_a_daemon_that_is_away_is_a_miss_and_so_is_one_that_refuses(daemon: Daemon) -> None:
    with asking(daemon) as mine, asking(daemon, "x" * 40) as stranger:
        mine.put(names(1))
        assert stranger.get(names(1)) == [None]
        assert stranger.put(names(1)) == [False]
        assert isinstance(stranger.objects, RemoteObjects)
        assert "401" in (stranger.objects.lost_because or "")
        daemon.stop()
        assert mine.get(names(1)) == [None]
        assert mine.put(names(1)) == [False]
        assert mine.objects.exists(names(1)) == [False]
        assert not mine.objects.remove(names(1))
        assert not mine.objects.clear()


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>a proxy's page</html>",
        b"{}",
        b"",
        b"\xff\xff\xff\xff",
        b'{"exists": [], "value_bytes_max": 4096, "stored": [], "done": 1}',
        headed(b'{"lengths": [1, 2]}', b"abc"),
        headed(b'{"lengths": [9]}', b"abc"),
        headed(b'{"lengths": [2]}', b"abc"),
        headed(b'{"lengths": [-1]}', b"abc"),
        b'{"exists": [true, true], "value_bytes_max": 0}',
        b'{"exists": [true, true], "value_bytes_max": -1}',
        b'{"exists": [true, true], "value_bytes_max": 1180591620717411303424}',
    ],
)
def test_an_answer_that_is_not_one_is_a_miss(answer: bytes) -> None:
    """Whoever says it: a proxy, a daemon of another version."""
    with saying(answer) as url:
        mine = RemoteObjects(url, ACME)
        rooms = [memoryview(bytearray(10)) for _ in range(2)]
        assert mine.get(names(1, 2), rooms) == [None, None]
        assert mine.exists(names(1, 2)) == [False, False]
        assert mine.put(names(1, 2), [memoryview(b"one"), memoryview(b"two")]) == [False, False]
        assert not mine.remove(names(1))
        assert not mine.clear()
        assert mine.value_bytes_max > 0
        assert mine.lost_because
        mine.close()


@pytest.mark.parametrize(
    ("verb", "answer"),
    [("get", headed(b'{"lengths": [null]}', b"")), ("put", b'{"stored": [true]}')],
)
def test_values_that_go_one_by_one_have_one_deadline(
    monkeypatch: pytest.MonkeyPatch, verb: str, answer: bytes
) -> None:
    """So they do at a daemon that says that its values are as large as a request may be."""
    ticks = itertools.count()
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: next(ticks) * 0.5))
    with saying(answer) as url:
        mine = RemoteObjects(url, ACME)
        mine._value_bytes_max = KV_BYTES_MAX
        many = names(*range(200))
        found = getattr(mine, verb)(many, [memoryview(bytearray(10)) for _ in many])
        assert len(found) == len(many)
        assert not found[-1]
        assert "in time for all values" in (mine.lost_because or "")
        assert next(ticks) < len(many)
        mine.close()


@pytest.mark.slow
def test_bodies_that_contradict_themselves_are_refused(daemon: Daemon) -> None:
    def put(head: dict[str, Any], data: bytes) -> int:
        packed = json.dumps(head).encode()
        headers = {"authorization": f"Bearer {ACME}"}
        body = struct.pack("<I", len(packed)) + packed + data
        return daemon.http.post("/v1/objects/put", content=body, headers=headers).status_code

    assert put({"keys": ["00"], "lengths": [2]}, b"ab") == 200
    for head in (
        {"keys": ["00"], "lengths": [3]},
        {"keys": ["00"], "lengths": [1, 1]},
        {"keys": ["00", "01"], "lengths": [2]},
        {"keys": ["0"], "lengths": [2]},
        {"keys": ["zz"], "lengths": [2]},
        {"keys": ["00"], "lengths": [0]},
        {"keys": ["00"], "lengths": [2], "namespace": "another"},
        {"keys": ["00"], "lengths": [2], "org": "globex"},
    ):
        assert put(head, b"ab") == 422, head
    too_large = BYTES_MAX + 1
    assert put({"keys": ["02"], "lengths": [too_large]}, bytes(too_large)) == 422
    assert daemon.ask(ACME, "objects/get", keys=["00"] * 5000).status_code == 422
    described = daemon.http.get("/v1/openapi.json").json()["paths"]
    assert {"/v1/objects/exists", "/v1/objects/get", "/v1/objects/put"} <= described.keys()


@pytest.mark.slow
def test_objects_outlive_a_daemon_that_is_stopped_in_order(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    first = Daemon(tmp_path / "driver")
    first.control("desired", objects_document(agents))
    wait_until("it is ready", first.is_ready)
    with asking(first) as mine:
        assert mine.put(names(1, 2), 77) == [True, True]
    assert first.stop() == 0
    second = Daemon(tmp_path / "driver")
    wait_until("it is ready", second.is_ready)
    with asking(second) as mine, asking(second, GLOBEX) as other:
        assert mine.get(names(1, 3, 2)) == [77, None, 77]
        assert other.get(names(1)) == [None]
    assert second.stop() == 0


@pytest.mark.slow
def test_a_driver_of_prefixes_refuses_objects(tmp_path: Path) -> None:
    with agent(tmp_path / "agent") as made:
        made.tell(document(1, spec("s", SLOTS, 64 * 64)))
        daemon = Daemon(tmp_path / "driver")
        daemon.control("desired", told([made]))
        answer = daemon.ask(ACME, "objects/exists", keys=[])
        assert answer.status_code == 409
        assert "alone" in answer.text
        daemon.stop()


@pytest.mark.slow
def test_an_operator_says_where_they_are(
    daemon: Daemon, agents: list[AgentProcess], tmp_path: Path
) -> None:
    token = tmp_path / "acme.token"
    token.write_text(ACME + "\n")
    at_daemon = {"url": str(daemon.http.base_url), "token_file": str(token), "other": 1}
    with contextlib.closing(open_objects(at_daemon, value_bytes=BYTES_MAX)) as made:
        assert Keeper(made.objects).put(names(1)) == [True]
        assert Keeper(made.objects).get(names(1)) == [BYTES_MAX]
        assert made.of("globex") is None
    daemon.stop()
    state_dir = tmp_path / "rank-3"
    state_dir.mkdir()
    (state_dir / "desired.json").write_text(json.dumps(objects_document(agents)))
    in_process = {"state_dir": str(tmp_path / "rank-{rank}"), "org": "acme"}
    with contextlib.closing(open_objects(in_process, rank=3)) as made:
        _is_kept_apart(made)


def _is_kept_apart(made: OpenObjects) -> None:
    mine, globex = Keeper(made.objects), made.of("globex")
    assert globex is not None
    wait_until("the agent is there", lambda: mine.put(names(1)) == [True])
    assert mine.get(names(1)) == [BYTES_MAX]
    assert Keeper(globex).get(names(1)) == [None]
    assert made.of("nobody") is None


def test_documents_of_objects_that_can_not_be_are_refused(agents: list[AgentProcess]) -> None:
    good = objects_document(agents)
    for change, because in (
        ({"unit_tokens": 128}, "no units"),
        ({"groups": [{**good["model"]["groups"][0], "window": 64}]}, "no window"),
        ({"groups": [*good["model"]["groups"], {"name": "x", "bytes_per_token": [1]}]}, "of its own"),
    ):
        with pytest.raises(Invalid, match=because):
            parse(json.dumps({**good, "model": {**good["model"], **change}}).encode())
    parse(json.dumps(good).encode())


@pytest.mark.parametrize(
    ("told", "because"),
    [
        ({}, "none of these"),
        ({"url": "http://x"}, "token_file for a daemon.*Found url"),
        ({"url": "http://x", "token_file": "/nowhere"}, "can't be read"),
        ({"url": "http://x", "wait_seconds": 61}, "`wait_seconds` is 61: set 0 to 60 seconds"),
        ({"url": "http://x", "wait_seconds": -1}, "`wait_seconds` is -1"),
        ({"url": "http://x", "wait_seconds": "nan"}, "`wait_seconds` is nan"),
        ({"url": "http://x", "wait_seconds": "1 s"}, "`wait_seconds` is 1 s"),
        ({"state_dir": "/nowhere/at/all", "org": "acme", "url": "http://x"}, "Found org, state_dir"),
    ],
)
def test_what_an_operator_says_wrong_is_told(told: dict[str, Any], because: str) -> None:
    with pytest.raises(Misconfigured, match=because):
        open_objects(told)


def test_a_document_that_is_missing_or_of_another_org_is_told(
    tmp_path: Path, agents: list[AgentProcess]
) -> None:
    with pytest.raises(Misconfigured, match="no valid document"):
        open_objects({"state_dir": str(tmp_path / "new"), "org": "acme"})
    (tmp_path / "desired.json").write_text(json.dumps(objects_document(agents)))
    with pytest.raises(Misconfigured, match="no org nobody"):
        open_objects({"state_dir": str(tmp_path), "org": "nobody"})
    with pytest.raises(Misconfigured, match="97 bytes per token or more"):
        open_objects({"state_dir": str(tmp_path), "org": "acme"}, value_bytes=BYTES_MAX + 1)
