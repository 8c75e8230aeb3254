"""Rails and a spine of real interfaces: what telemetry says of the spine is what they have carried."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.db import transaction

from console.control.services import secret_of
from console.environment import PROJECT
from console.fleet.models import Node, SpineLink
from console.operations.core import State
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies import callers
from console.policies.org_keys import tags_by_org
from console.sessions import services
from console.sessions.changes import moves
from console.sessions.models import Stream
from kvss_agent.client import Column, Credentials, Miss, TierAnswer, Wanted, connect
from tests.conftest import People
from tests.console.sessions import laboratory as lab
from tests.console.sessions import network
from tests.console.sessions.fleets import make_box
from tests.console.sessions.laboratory import Laboratory, kv, laboratory, tokens_of
from tests.console.sessions.loads import engine_with_tier2
from tests.console.sessions.planes import declared_with, push, run
from tests.console.sessions.requests import create, set_rules, shards, start_job
from tests.live import wait_until
from tests.swdriver_shim.daemons import C

pytestmark = [pytest.mark.django_db, pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(300)]

PROMPTS = range(8)
SPINE_BYTES_A_SECOND = 12_500_000
MOVES_PERCENT = 4
AT_ONCE_BYTES = 1 << 20  # before a link is full
FRAGMENTS_PERCENT = 1  # so little that a slow machine offers more, too
STRAY_BYTES_MAX = 10_000  # of neighbours that look for each other
BURSTS, BURST_COLUMNS = 3, 60


@pytest.fixture
def spine(db: None, tmp_path: Path) -> Iterator[Laboratory]:
    if reason := lab.why_not():
        pytest.skip(reason)
    with laboratory(tmp_path) as made:
        yield made


def load_all(spine: Laboratory, token: str) -> float:
    """All prompts, each byte of which is verified; the seconds that it took."""
    began = time.monotonic()
    found = [spine.drivers["job7"].load(token, tokens_of(prompt)) for prompt in PROMPTS]
    took = time.monotonic() - began
    assert found == [(len(tokens_of(prompt)), kv(prompt)) for prompt in PROMPTS]
    return took


def agree(spine: Laboratory) -> None:
    """Telemetry and the link's interfaces, within 2 %; and nobody tells of more than was carried, since
    beside the columns there is the protocol."""
    carried = spine.network.over_spine("l1").payload
    told = 0.0

    def is_near() -> bool:
        nonlocal told
        told = sum(spine.told_over_spine().values())
        return 0.98 * carried <= told

    wait_until("telemetry has told what the interfaces have carried", is_near, 30)
    assert told <= carried


def test_spine_bytes_of_telemetry_are_those_of_the_interfaces_and_rails_take_none(
    people: People, spine: Laboratory
) -> None:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        _, token = callers.add_caller(admin, orgs.for_change(admin, "acme"), name="engine")
    Node.objects.filter(name="ax1").update(state="cordoned")
    set_rules(people, grant_percent=45)  # all of it fits one of the two nodes
    run(create(people, boxes=1, bytes_per_token=4 * lab.EACH))
    started = run(start_job(people, spine.add_driver("job7")))
    assert started.state == State.SUCCEEDED, started.message
    assert {shard.path for shard in shards()} == {"spine"}
    for prompt in PROMPTS:
        stored = spine.drivers["job7"].store(token, tokens_of(prompt), kv(prompt))
        assert stored.json()["failed"] == 0
    spine.network.limit_spine("l1", SPINE_BYTES_A_SECOND)
    over_spine = load_all(spine, token)
    assert over_spine > 0.8 * sum(len(kv(prompt)) for prompt in PROMPTS) / SPINE_BYTES_A_SECOND
    agree(spine)

    Node.objects.filter(name="ax1").update(state="ready")
    with transaction.atomic():
        brought = moves.restore_rails(admin, services.for_change(admin, "chat"))
    assert run(brought).state == State.SUCCEEDED, brought.message
    assert {shard.path for shard in shards()} == {"rail"}
    agree(spine)

    before = spine.network.over_spine("l1").payload
    load_all(spine, token)
    assert spine.network.over_spine("l1").payload - before < STRAY_BYTES_MAX, (
        "so its limit is not theirs"
    )


def test_moves_keep_to_their_share_of_a_link_and_requests_have_the_rest(
    people: People, spine: Laboratory
) -> None:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        _, token = callers.add_caller(admin, orgs.for_change(admin, "acme"), name="engine")
    Node.objects.filter(name="ax1").update(state="cordoned")
    SpineLink.objects.update(gbits=1)
    set_rules(people, grant_percent=45, moves_percent=MOVES_PERCENT)
    run(create(people, boxes=1, bytes_per_token=4 * lab.EACH))
    started = run(start_job(people, spine.add_driver("job7")))
    assert started.state == State.SUCCEEDED, started.message
    for prompt in PROMPTS:
        assert spine.drivers["job7"].store(token, tokens_of(prompt), kv(prompt)).json()["failed"] == 0

    Node.objects.filter(name="ax1").update(state="ready")
    before, began = spine.network.over_spine("l1").payload, time.monotonic()
    with transaction.atomic():
        brought = moves.restore_rails(admin, services.for_change(admin, "chat"))
    assert run(brought).state == State.SUCCEEDED, brought.message
    took = time.monotonic() - began
    moved = spine.network.over_spine("l1").payload - before
    assert {shard.path for shard in shards()} == {"rail"}
    assert moved > sum(len(kv(prompt)) for prompt in PROMPTS)
    assert moved / took < 1.05 * 125_000_000 * MOVES_PERCENT / 100
    load_all(spine, token)


def test_borrows_keep_to_their_share_of_the_spine_and_every_byte_is_right(
    people: People, spine: Laboratory
) -> None:
    """`job8`, on `l1`, borrows from `job7`, whose four shards are across the spine."""
    admin = people.principal("platform_admin")
    with transaction.atomic():
        _, token = callers.add_caller(admin, orgs.for_change(admin, "acme"), name="engine")
    SpineLink.objects.update(gbits=1)
    set_rules(people, grant_percent=45, moves_percent=MOVES_PERCENT, borrow="spine")
    make_box("cs2", ("l1",) * 4)
    for name, session, away in (("job7", "chat", "ax1"), ("job8", "code", "ax2")):
        Node.objects.filter(name=away).update(state="cordoned")
        run(create(people, session, boxes=1, bytes_per_token=4 * lab.EACH))
        started = run(start_job(people, spine.add_driver(name), session))
        assert started.state == State.SUCCEEDED, started.message
        Node.objects.filter(name=away).update(state="ready")
    push()
    for prompt in PROMPTS:
        assert spine.drivers["job7"].store(token, tokens_of(prompt), kv(prompt)).json()["failed"] == 0

    before, began = spine.network.over_spine("l1").payload, time.monotonic()
    for prompt in PROMPTS:
        spine.borrow("job8", "acme", tokens_of(prompt), "job7")
    took = time.monotonic() - began
    moved = spine.network.over_spine("l1").payload - before
    assert moved > sum(len(kv(prompt)) for prompt in PROMPTS)
    assert moved / took < 1.05 * 125_000_000 * MOVES_PERCENT / 100
    for prompt in PROMPTS:
        assert spine.drivers["job8"].load(token, tokens_of(prompt)) == (
            len(tokens_of(prompt)),
            kv(prompt),
        )
    assert spine.network.over_spine("l1").payload - before - moved < STRAY_BYTES_MAX, "it is here"


def spill_burst(address: str, shard: str, secret: bytes, tag: bytes) -> Counter[TierAnswer | Miss]:
    """As a driver that spills as fast as it is answered."""
    answers: Counter[TierAnswer | Miss] = Counter()
    payload = memoryview(random.Random(shard).randbytes(lab.EACH * C))
    with connect(address, shard, Credentials("job7", secret), transport="stream") as client:
        for number in range(BURSTS):
            keys = [f"{number}-{slot}".encode().ljust(16) for slot in range(BURST_COLUMNS)]
            wanted = [
                Wanted(slot, Column(key, tag, client.evict(slot, key, tag, C, payload)))
                for slot, key in enumerate(keys)
            ]
            answers.update(client.spill(wanted, wait_seconds=10, redundant=True))
    return answers


def test_fragments_keep_to_their_part_of_a_link_whatever_drivers_spill(
    people: People, spine: Laboratory, tmp_path: Path
) -> None:
    for node in Node.objects.all():
        declared = declared_with(tmp_path / f"store-{node.name}")
        declared["tier2"]["shared"] = False
        Node.objects.filter(pk=node.pk).update(declared=declared)
    engine_with_tier2("acme")
    Node.objects.filter(name="ax2").update(state="cordoned")
    SpineLink.objects.update(gbits=1)
    set_rules(people, grant_percent=30, moves_percent=FRAGMENTS_PERCENT)
    run(create(people, boxes=1, bytes_per_token=4 * lab.EACH))
    started = run(start_job(people, spine.add_driver("job7")))
    assert started.state == State.SUCCEEDED, started.message
    spine.drivers["job7"].stop()
    Node.objects.filter(name="ax2").update(state="ready")
    set_rules(people, grant_percent=30, moves_percent=FRAGMENTS_PERCENT, redundancy="1+1")

    def is_ready() -> bool:
        push()
        shown = [one.get("redundancy", {}) for one in spine.agents["ax1"].observed()["shards"]]
        return [one["state"] for one in shown if one] == ["ready"] * 4

    wait_until("all shards have holders", is_ready, 60)
    streams = list(Stream.objects.select_related("node", "job__driver"))
    names = [stream.name for stream in streams]
    assert {stream.node.name for stream in streams} == {"ax1"}
    secret, address = secret_of("driver", "job7"), streams[0].node.data_address
    [(_, tags)] = tags_by_org(list(Org.objects.filter(slug="acme")))
    tag = bytes.fromhex(tags[0])
    before, began = spine.network.over_spine("l1").payload, time.monotonic()
    with spine.network.host("engine", "l1").entered(), ThreadPoolExecutor(len(streams)) as pool:
        bursts = [pool.submit(spill_burst, address, name, secret, tag) for name in names]
        answers = sum((burst.result(120) for burst in bursts), Counter())
    took = time.monotonic() - began
    sent = spine.network.over_spine("l1").payload - before
    assert set(answers) == {TierAnswer.DONE}, "what the link has no room for is stored at home"
    half = 125_000_000 * FRAGMENTS_PERCENT / 100 / 2
    offered = len(streams) * BURSTS * BURST_COLUMNS * lab.EACH * C
    assert offered > 2 * half * took, "the link is the limit"
    assert 1 << 20 < sent < 1.1 * half * took + AT_ONCE_BYTES, "and is used"


MAKE_AND_WAIT = """
import os, subprocess, sys
from tests.console.sessions.network import OURS, WITH_US, Network
host = Network(["l1", "l2"]).host("ax1", "l1")
with host.entered():
    process = subprocess.Popen([*WITH_US, "sleep", "600"])
    print(process.pid, os.stat(OURS).st_ino, flush=True)
process.wait()
"""


def test_nothing_of_a_laboratory_outlives_who_made_it_however_that_ends() -> None:
    if reason := network.why_not():
        pytest.skip(reason)
    maker = subprocess.Popen([sys.executable, "-c", MAKE_AND_WAIT], cwd=PROJECT, stdout=subprocess.PIPE)
    assert maker.stdout
    process, namespace = map(int, maker.stdout.readline().split())
    assert namespace in namespaces()
    # Before that it has not yet asked the kernel to die with us.
    wait_until(
        "setpriv has begun it", lambda: Path(f"/proc/{process}/comm").read_text() == "sleep\n", 30
    )
    maker.kill()
    maker.communicate()
    wait_until("its process is gone", lambda: not Path(f"/proc/{process}").exists(), 30)
    wait_until("its network is gone", lambda: namespace not in namespaces(), 30)


def namespaces() -> set[int]:
    """The networks that processes of this machine are in."""
    found = set()
    for one in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):  # it has just ended
            found.add(one.stat().st_ino)
    return found
