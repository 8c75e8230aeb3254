"""The data plane over TCP with certificates of an authority: who may connect as whom, and pulls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from console.authority.issuing import Root, make_root
from kvss_agent.client import Credentials, Lost, ShardClient, TierAnswer, Wanted, connect
from kvss_agent.redundancy.layout import SLOTS, fragment_part, fragment_slot_bytes
from kvss_agent.security.certificates import Role
from kvss_agent.security.identity import ProcessIdentity, fingerprint
from kvss_agent.security.trust import Trust
from kvss_agent.shard.arena import slot_bytes_for
from tests.control_api import NO_CONSOLE, as_process
from tests.kvss_agent.certificates import NOW, process
from tests.kvss_agent.plane import DRIVER, PAYLOAD, READER, SECRET, TAG, column, kv
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.live import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root() -> Root:
    return make_root("one", NOW)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, root: Root) -> Iterator[list[AgentProcess]]:
    """Agents `a` and `b`, which were told nothing yet."""
    directory = tmp_path_factory.mktemp("agents")
    console = process(directory, Role.CONSOLE, "console", root)
    with ExitStack() as stack:
        found = []
        for name in ("a", "b"):
            trust = process(directory, Role.NODE, name, root)
            options = ("--name", name, "--console", NO_CONSOLE, "--tcp", "127.0.0.1:0")
            tls = as_process(console, trust.identity.public_key_pem)
            found.append(stack.enter_context(agent(directory / name, *options, tls=tls)))
        yield found


@pytest.fixture(scope="module")
def generations() -> Iterator[int]:
    """The agents outlive a test, and tests come in any order: each document is newer than all before."""
    return itertools.count(1)


@pytest.fixture
def two(started: list[AgentProcess], generations: Iterator[int]) -> list[AgentProcess]:
    """Agents `a` and `b`, each with shard `s` of the same driver, and nothing that a test told them."""
    for one in started:
        one.tell(document(next(generations), spec()))
    return started


def address(of: AgentProcess, key: str = "") -> str:
    own = ProcessIdentity.load(of.directory, "node:x").public_key_pem
    return f"tls:127.0.0.1:{of.tcp}#{key or fingerprint(own)}"


def client(of: AgentProcess, trust: Trust, secret: bytes | None = None, key: str = "") -> ShardClient:
    credentials = Credentials(DRIVER, secret, certified=trust.client_certificate())
    return connect(address(of, key), "s", credentials, transport="stream")


def test_a_driver_is_known_by_its_certificate(
    two: list[AgentProcess], root: Root, tmp_path: Path
) -> None:
    there, _ = two
    ours = process(tmp_path, Role.DRIVER, DRIVER, root)
    with client(there, ours) as connected:
        assert connected.slots == 8
    for trust, key in (
        (process(tmp_path, Role.DRIVER, READER, root), ""),
        (process(tmp_path / "node", Role.NODE, DRIVER, root), ""),  # a node of the driver's name
        (process(tmp_path / "console", Role.CONSOLE, DRIVER, root), ""),
        (process(tmp_path / "foreign", Role.DRIVER, DRIVER, make_root("other", NOW)), ""),
        (ours, "f" * 64),
        (Trust.load(ours.identity.load(tmp_path / "new", f"driver:{DRIVER}")), ""),
    ):
        with pytest.raises(Lost):
            client(there, trust, SECRET, key)


def test_a_driver_with_another_key_than_the_document_says_is_refused(
    two: list[AgentProcess], generations: Iterator[int], root: Root, tmp_path: Path
) -> None:
    _, there = two
    former = process(tmp_path / "former", Role.DRIVER, DRIVER, root)
    anew = process(tmp_path / "anew", Role.DRIVER, DRIVER, root)
    told = document(next(generations), spec())
    told["peers"][0]["key"] = fingerprint(anew.identity.public_key_pem)
    there.tell(told)
    with pytest.raises(Lost, match="the key of this driver has changed"):
        client(there, former)
    with client(there, anew):
        pass


def test_an_agent_fetches_from_another_by_its_certificate_and_the_drivers_secret(
    two: list[AgentProcess], root: Root, tmp_path: Path
) -> None:
    there, here = two
    asked = {"from": address(there), "shard": "s", "as": DRIVER, "slots": [0, 1]}
    pull = here.http.post("/v1/shards/s/pull", json=asked).json()

    def is_over() -> bool:
        pull.update(here.http.get(f"/v1/pulls/{pull['id']}").json())
        return bool(pull["state"] != "running")

    wait_until("the pull is over", is_over)
    assert (pull["state"], pull["done"]) == ("done", 2), pull["reason"]
    # The certificate of an agent alone is not enough, nor is it for anything but reading.
    node = process(tmp_path, Role.NODE, "c", root)
    for secret in (None, b"x" * 32):
        with pytest.raises(Lost):
            client(there, node, secret)
    with pytest.raises(Lost, match="another driver"):
        client(there, node, SECRET)  # it would evict as well


def test_an_agent_stores_fragments_at_another_by_its_certificate_and_the_drivers_secret(
    two: list[AgentProcess], generations: Iterator[int], root: Root, tmp_path: Path
) -> None:
    slot_bytes = fragment_slot_bytes(slot_bytes_for(PAYLOAD), 1)

    def of(place: int, one: AgentProcess) -> dict[str, object]:
        made = spec(f"f{place}", SLOTS, is_for_fragments=True)
        tier2 = {"kind": "posix", "path": str(tmp_path / f"store-{place}"), "cap_bytes": 1 << 30}
        shard = {**made, "slot_bytes": slot_bytes, "part": fragment_part("full.0", place, 1, 1)}
        holders = [{"address": address(each), "shard": f"f{at}"} for at, each in enumerate(two)]
        redundancy = {"data": 1, "parity": 1, "holders": holders}
        home = spec("s", 8, part="full.0", redundancy=redundancy)
        return document(next(generations), shard, *([home] if one is two[0] else []), tier2=tier2)

    here, there = two
    there.tell(of(1, there))
    here.tell(of(0, here))

    def is_ready() -> bool:
        shards = {one["name"]: one for one in here.observed()["shards"]}
        return bool(shards["s"]["redundancy"]["state"] == "ready")

    wait_until("redundancy is ready", is_ready)
    with client(here, process(tmp_path, Role.DRIVER, DRIVER, root)) as driver:
        number = driver.evict(0, column("x").key, TAG, 64, kv())
        stored = driver.spill([Wanted(0, column("x", number))], redundant=True)
        assert stored == [TierAnswer.DONE]
    assert all(len(list((tmp_path / f"store-{place}").glob("*/*/*/*"))) == 1 for place in (0, 1))
