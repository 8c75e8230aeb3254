"""Two drivers of one model on real agents: what one has computed, the other borrows, and every byte is
right; what a sibling can't or won't give costs a miss."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest

from kvss_agent.borrowing import Borrowing
from kvss_agent.client import Credentials
from kvss_agent.data_plane.connection import Connection
from kvss_agent.process.daemon import http_server
from kvss_agent.shard.arena import Arena
from kvss_agent.shard.hosted import HostedShard
from kvss_agent.shard.identity import ShardIdentity
from swdriver_shim import lending
from swdriver_shim.adapters.claims import ClaimVerifier, mint
from swdriver_shim.adapters.vllm.scheduling import ConnectorScheduler, GroupShape, Requester
from swdriver_shim.cache import loans
from swdriver_shim.cache.lookup import Match
from swdriver_shim.cache.reasons import DRAM, SIBLING, NoSpill, Reason
from swdriver_shim.cache.request_log import HasKeys
from swdriver_shim.cache_map.codec import SPACE_BYTES
from swdriver_shim.cache_map.recalls import Recalled
from swdriver_shim.daemon.service import Service
from swdriver_shim.daemon.shim import Shim
from swdriver_shim.data_plane import siblings
from swdriver_shim.decider import decider
from swdriver_shim.desired import (
    Desired,
    HomeSpec,
    OrgSpec,
    SiblingHome,
    SiblingSpec,
)
from swdriver_shim.keys import Prompt
from swdriver_shim.lending import LentColumn
from swdriver_shim.policy import OrgPolicies, Policy, Rules, Tier2Rule, Tiers
from swdriver_shim.prefixes import LocalPrefixes
from tests.kvss_agent.plane import Plane, running
from tests.live import wait_until
from tests.swdriver_shim.block_engine import FakeRequest
from tests.swdriver_shim.fleets import C, Engine, tokens
from tests.swdriver_shim.prompts import LAYOUT, MODEL, SECRET, prompt
from workload_manager.emulator import cache

SLOTS = 24
CLAIMS_KEY = b"a key that gateway and engines share"
SECRETS = {name: name.encode().ljust(32, b"!") for name in ("a", "b", "c")}


@dataclass
class Member:
    """One driver, its agent, and its API."""

    name: str
    plane: Plane
    shim: Shim
    url: str
    siblings: list[SiblingSpec] = field(default_factory=list)
    borrowers: tuple[str, ...] = ("a", "b")
    policy: Policy = field(default_factory=Policy)
    generation: int = 0

    def tell(self) -> None:
        self.generation += 1
        told = Desired(
            generation=self.generation,
            driver=self.name,
            secret=SECRETS[self.name],
            model=MODEL,
            homes=tuple(
                HomeSpec(
                    group=group, index=index, address=self.address, shard=f"{self.name}.{group}.{index}"
                )
                for group, index in places()
            ),
            orgs=(OrgSpec("acme", SECRET, OrgPolicies(policy=self.policy)),),
            siblings=tuple(self.siblings),
            borrowers=self.borrowers,
        )
        self.shim.set_desired(msgspec.json.encode(told))
        wait_until("it has its shards", lambda: self.shim.is_ready)
        for one in self.siblings:
            if sibling := self.shim.driver.siblings.find(one.driver):
                sibling.greet()
        wait_until("it has slots", lambda: all(pool.limit for pool in self.engine.driver.ledger.pools))

    @property
    def address(self) -> str:
        return f"tcp:127.0.0.1:{self.plane.tcp}"

    @property
    def engine(self) -> Engine:
        return Engine(self.shim.mover)

    def lends_to(self, other: Member, **more: object) -> SiblingSpec:
        spec = SiblingSpec(
            self.name,
            self.url,
            lending.token_for(SECRETS[self.name], other.name),
            tuple(
                SiblingHome(group, index, self.address, f"{self.name}.{group}.{index}", "leaf")
                for group, index in places()
            ),
        )
        return msgspec.structs.replace(spec, **more)

    def borrow(self, asked: Prompt, sibling: str) -> Recalled:
        space = asked.maker.tag + asked.maker.namespace.digest()[:SPACE_BYTES]
        return self.shim.recall(space, asked.keys, sibling)

    def settled(self, *outcomes: str) -> None:
        counted = self.engine.driver.borrowing.outcomes
        wait_until(
            f"it is one of {outcomes}, and not {counted}", lambda: any(counted[one] for one in outcomes)
        )


def places() -> list[tuple[str, int]]:
    return [(group.name, index) for group in LAYOUT.groups for index in range(group.shards)]


class World:
    """Members on agents of their own, or on one; all on one event loop."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever)
        thread.start()

        def stop() -> None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            thread.join()
            self.loop.close()

        stack.callback(stop)

    def run(self, work: Callable[[], Awaitable[object]]) -> None:
        async def awaited() -> None:
            await work()

        asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(30)

    def agent(self, name: str) -> Plane:
        directory = self._directory / name
        directory.mkdir()
        plane = self._stack.enter_context(running(directory))
        plane.secrets.update(SECRETS)

        def shown(driver: str) -> Credentials:
            return Credentials(driver, plane.secrets[driver], stall_seconds=30.0)

        plane.plane.borrowing = borrowing = Borrowing(plane.shards, shown)
        self._stack.callback(borrowing.close)
        return plane

    def member(self, name: str, plane: Plane, readers: str = "") -> Member:
        for group, index in places():
            shape = next(one for one in LAYOUT.groups if one.name == group)
            shard = f"{name}.{group}.{index}"
            identity = ShardIdentity(shard, shape.slot_bytes[index], name)
            plane.shards[shard] = HostedShard(
                identity,
                Arena.allocate(identity.slot_bytes, SLOTS),
                readers=set(readers),
                wake_me=plane.plane.wake,
            )
        shim = Shim(name, None)
        listener = socket.create_server(("127.0.0.1", 0))
        server = http_server(Service(shim, "t" * 40).application(), listener, shim.http)
        self.run(server.__aenter__)
        self._stack.callback(lambda: self.run(lambda: server.__aexit__(None, None, None)))
        self._stack.callback(shim.stop)
        return Member(name, plane, shim, f"http://127.0.0.1:{listener.getsockname()[1]}")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name in ("ASK_SECONDS", "GREET_SECONDS", "LEAST_SECONDS"):  # a machine that is busy answers late
        monkeypatch.setattr(siblings, name, 30.0)
    monkeypatch.setattr(decider, "SETTLING_SECONDS", 30.0)
    with contextlib.ExitStack() as stack:
        yield World(tmp_path, stack)


@pytest.fixture(params=["two agents", "one agent"])
def pair(request: pytest.FixtureRequest, world: World) -> tuple[Member, Member]:
    """`a` may borrow from `b`."""
    first = world.agent("one")
    second = first if request.param == "one agent" else world.agent("two")
    a, b = world.member("a", first, "b"), world.member("b", second, "a")
    a.siblings = [b.lends_to(a)]
    for one in (b, a):
        one.tell()
    return a, b


def test_a_sibling_lends_what_it_has_and_the_bytes_are_right(pair: tuple[Member, Member]) -> None:
    a, b = pair
    asked = prompt(tokens(*range(1, 9), rest=10))
    b.engine.store(asked)
    assert a.engine.load(asked) == 0
    assert a.borrow(asked, "b") is Recalled.ASKED
    a.settled("borrowed")
    assert a.engine.load(asked) == 8 * C
    tally = a.engine.driver.ledger.tally("acme")
    assert (tally.hits[SIBLING], tally.hits[DRAM]) == (8 * C, 0)
    assert a.engine.load(asked) == 8 * C
    assert (tally.hits[SIBLING], tally.hits[DRAM]) == (8 * C, 8 * C)
    assert b.engine.load(asked) == 8 * C + 10  # it has kept all of it


def test_only_what_is_missing_is_borrowed(pair: tuple[Member, Member]) -> None:
    a, b = pair
    asked = prompt(tokens(*range(1, 9)))
    a.engine.store(prompt(tokens(1, 2, 3)))
    b.engine.store(asked)
    assert a.borrow(asked, "b") is Recalled.ASKED
    a.settled("borrowed")
    borrowed = a.engine.driver.ledger.tier2.borrowed
    groups = {group.name: group for group in LAYOUT.groups}
    window = 8 - groups["window"].first_needed(8 * C)
    assert borrowed.columns == 5 + window
    assert a.engine.load(asked) == 8 * C
    tally = a.engine.driver.ledger.tally("acme")
    assert (tally.hits[SIBLING], tally.hits[DRAM]) == (5 * C, 3 * C)
    assert a.borrow(asked, "b") is Recalled.ASKED
    a.settled("in_memory")


def test_the_first_look_at_a_request_finds_on_its_way_what_its_claim_says_to_borrow(
    pair: tuple[Member, Member],
) -> None:
    """An engine looks as soon as a request has arrived, which is sooner than anybody else can ask."""
    a, b = pair
    asked = prompt(tokens(*range(1, 13)))
    b.engine.store(asked)
    shapes = [GroupShape(C, group.window, group.is_state) for group in LAYOUT.groups]
    scheduling = ConnectorScheduler(
        shapes, C, 1, lambda _: Requester(asked.maker, sibling="b"), wait_seconds=60.0
    )
    scheduling.use(a.shim.driver, is_far=False)
    request = FakeRequest("request", tokens(*range(1, 14)))
    scheduling.arrived(request)
    found: list[int] = []

    def has_come() -> bool:  # a look before that says that it is on its way, and not that there is less
        count, _ = scheduling.matched(request, 0)
        found.extend([count] if count is not None else [])
        return bool(found)

    wait_until("it has come", has_come)
    assert found == [12 * C]
    scheduling.finished(request, [])
    scheduling.close()


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_tier_2_is_asked_for_what_a_sibling_lacks_before_the_first_look(
    pair: tuple[Member, Member],
    monkeypatch: pytest.MonkeyPatch,
    is_looked_at: bool,  # noqa: FBT001
) -> None:
    """A request may be in the engine's queue for seconds. One that is looked at while the sibling is
    asked waits for the same search."""
    a, b = pair
    a.policy = Policy(tiers=Tiers.TIER2)
    a.tell()
    driver, whole = a.shim.driver, prompt(tokens(*range(1, 13)))
    b.engine.store(prompt(tokens(1, 2, 3, 4)))
    had: list[int] = []
    is_asked, may_borrow, borrow = threading.Event(), threading.Event(), driver.borrowing._borrow

    def borrowed(*what: Any) -> str:
        is_asked.set()
        may_borrow.wait()
        return borrow(*what)

    def answered(trail: HasKeys, _: object) -> list[set[int]]:
        had.append(driver.ledger.tier2.has(trail, 0.0))
        return []

    monkeypatch.setattr(driver.borrowing, "_borrow", borrowed)
    monkeypatch.setattr(driver._tier2, "_answered", answered)
    shapes = [GroupShape(C, group.window, group.is_state) for group in LAYOUT.groups]
    scheduling = ConnectorScheduler(
        shapes, C, 1, lambda _: Requester(whole.maker, sibling="b"), wait_seconds=60.0
    )
    scheduling.use(driver, is_far=False)
    request = FakeRequest("request", tokens(*range(1, 14)))
    scheduling.arrived(request)
    try:
        assert is_asked.wait(60)
        if is_looked_at:
            assert scheduling.matched(request, 0) == (None, False)
    finally:
        may_borrow.set()
    a.settled("borrowed")
    wait_until("tier 2 is asked", lambda: had)
    wait_until("it has answered", lambda: not driver._tier2._searching)
    assert had == [4], "once, when what the sibling has is there"
    scheduling.finished(request, [])
    scheduling.close()


def test_who_waits_for_a_search_that_another_has_begun_hears_what_it_finds(
    pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why its tokens are missed: the arrival that has begun it has no match."""
    a, _ = pair
    a.policy = Policy(tiers=Tiers.TIER2)
    a.tell()
    driver, asked = a.shim.driver, prompt(tokens(*range(1, 5)))
    told: list[Match] = []
    monkeypatch.setattr(driver._tier2, "_answered", lambda *_: [{0}])
    monkeypatch.setattr(driver._tier2, "_bring", lambda _, __, matches: told.extend(matches))
    with driver._lock:
        driver._tier2.is_to_come(asked.keys[0])
    assert driver.prefetch_rest(asked)
    load = driver.begin_load(asked)
    driver._tier2.has_come(asked.keys[0])
    assert load.lookup
    assert load.lookup.wait(60)
    assert told == [load.match]
    driver.end_load(load)


@dataclass
class Joined:
    """The driver of an emulated engine, whose requests are those of one org."""

    member: Member
    is_attached: bool = True

    def claims(self) -> ClaimVerifier:
        return ClaimVerifier(CLAIMS_KEY, self.member.name)

    def prefixes(self, org: str, adapter: str = "") -> LocalPrefixes:
        assert (org, adapter) == ("acme", "")
        return LocalPrefixes(self.member.shim.mover, prompt([]).maker)

    def close(self) -> None:
        pass


def test_an_emulated_engine_borrows_what_its_claim_says_before_it_loads(
    pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "WAIT_SECONDS", 60.0)
    told = tokens(*range(1, 13))
    a, b = (cache.Cache(MODEL) for _ in pair)
    for emulated, member in zip((a, b), pair, strict=True):
        emulated.use(Joined(member))
    b.computed(b.load(told, {"tidegate": mint(CLAIMS_KEY, "b", "acme")}, "first"), 1.0)
    claim = mint(CLAIMS_KEY, "a", "acme", sibling="b")
    got = a.load(told, {"tidegate": claim}, "second")
    assert (got.hit, got.wrong_bytes) == (12 * C, 0)


def test_a_load_that_comes_meanwhile_waits_for_what_is_coming(pair: tuple[Member, Member]) -> None:
    a, b = pair
    asked = prompt(tokens(*range(1, 13)))
    b.engine.store(asked)
    assert a.borrow(asked, "b") is Recalled.ASKED
    assert a.engine.load(asked, seconds=60.0) == 12 * C


def test_what_is_computed_sooner_is_not_borrowed(pair: tuple[Member, Member]) -> None:
    """By what borrows over this path, refills and computing took; now and then it is tried again."""
    a, b = pair
    driver, outcomes = a.engine.driver, a.engine.driver.borrowing.outcomes

    def borrowed(number: int) -> None:
        asked, before = prompt(tokens(number)), outcomes.total()
        b.engine.store(asked)
        assert a.borrow(asked, "b") is Recalled.ASKED
        wait_until("it is known what became of it", lambda: outcomes.total() > before)
        a.engine.load(asked)

    for number in range(4):
        borrowed(number)
    assert outcomes == {"borrowed": 4}
    for _ in range(10):
        driver.computed("acme", 1000, 1e-9)
    for number in range(10, 13):
        borrowed(number)
    assert outcomes == {"borrowed": 5, "slower": 2}
    for _ in range(200):
        driver.computed("acme", 1000, 1000.0)
    borrowed(20)
    assert outcomes == {"borrowed": 6, "slower": 2}


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Agents do not take evicts until it is set."""
    let, take = threading.Event(), Connection._take

    def taken(connection: Connection, *what: Any) -> None:
        let.wait()
        take(connection, *what)

    monkeypatch.setattr(Connection, "_take", taken)
    yield let
    let.set()


def test_what_was_sent_to_an_agent_a_moment_ago_is_lent_once_it_is_there(
    pair: tuple[Member, Member], held_up: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store ends when its bytes are sent. The lender itself would refill after its evicts."""
    a, b = pair
    lent, ledger = threading.Event(), b.engine.driver.ledger
    lend = ledger.lend

    def asked_for(*what: Any) -> list[list[LentColumn]]:
        lent.set()
        return lend(*what)

    monkeypatch.setattr(ledger, "lend", asked_for)
    asked = prompt(tokens(*range(1, 9)))
    b.engine.store(asked)
    assert a.borrow(asked, "b") is Recalled.ASKED
    assert lent.wait(60)
    time.sleep(0.05)  # for a wrong answer to be acted upon
    held_up.set()
    outcomes = a.engine.driver.borrowing.outcomes
    wait_until("it is known what became of it", outcomes.total)
    assert outcomes == {"borrowed": 1}
    assert a.engine.load(asked) == 8 * C


def test_a_sibling_does_not_wait_long_for_what_an_agent_does_not_take(
    pair: tuple[Member, Member], held_up: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decider, "SETTLING_SECONDS", 0.05)
    a, b = pair
    asked = prompt(tokens(1, 2))
    b.engine.store(asked)
    assert a.borrow(asked, "b") is Recalled.ASKED
    a.settled("failed")
    assert not held_up.is_set()
    assert a.engine.load(asked) == 0


@pytest.mark.parametrize(("seconds", "waits"), [(3600.0, 1), (0.0, 3)])
def test_siblings_do_not_all_wait_for_what_an_agent_does_not_take(
    pair: tuple[Member, Member],
    held_up: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    waits: int,
) -> None:
    monkeypatch.setattr(decider, "SETTLING_SECONDS", 0.05)
    monkeypatch.setattr(decider, "UNSETTLED_SECONDS", seconds)
    _, b = pair
    asked = prompt(tokens(1, 2))
    b.engine.store(asked)
    threads = b.engine.driver._shard_threads
    with mock.patch.object(threads, "wait_applied", wraps=threads.wait_applied) as waited:
        lent = [b.engine.driver.lend(asked, 0) for _ in range(3)]
        assert waited.call_count == waits
        assert not held_up.is_set()
        held_up.set()
    assert all(map(any, lent)), "they are told where columns are in any case"


def test_what_expires_at_the_lender_expires_at_the_borrower(world: World) -> None:
    plane = world.agent("one")
    a, b = world.member("a", plane, "b"), world.member("b", plane, "a")
    a.siblings = [b.lends_to(a)]
    a.policy = b.policy = Policy(ttl_first_use_seconds=600, ttl_last_use_seconds=None)
    for one in (b, a):
        one.tell()
    asked = prompt(tokens(1, 2, 3))
    b.engine.store(asked)
    assert a.borrow(asked, "b") is Recalled.ASKED
    a.settled("borrowed")
    assert a.engine.load(asked) == 3 * C
    stored = [column.stored_at for column in b.engine.driver.ledger.accounts["acme"].columns(0)]
    for column in a.engine.driver.ledger.accounts["acme"].columns(0):
        assert column.stored_at <= max(stored)  # not from when it was borrowed
    driver = a.engine.driver
    driver._clock = driver._housekeeper._clock = lambda: time.monotonic() + 600
    assert a.engine.load(asked) == 0, "it has expired"


def test_rules_of_a_request_hold_at_the_borrower(pair: tuple[Member, Member]) -> None:
    a, b = pair
    a.policy = b.policy = Policy(tiers=Tiers.TIER2)
    for one in (b, a):
        one.tell()
    asked = prompt(tokens(1, 2, 3))
    b.engine.store(asked, Rules(ttl_seconds=600, tier2=Tier2Rule.NEVER))
    assert a.borrow(asked, "b") is Recalled.ASKED
    a.settled("borrowed")
    borrowed = list(a.engine.driver.ledger.accounts["acme"].columns(0))
    assert len(borrowed) == 3
    for column in borrowed:
        assert column.ttl == 600
        assert a.engine.driver.ledger._stock.why_no_spill(column) is NoSpill.REQUEST


def test_a_purged_org_is_lent_nothing_of(pair: tuple[Member, Member]) -> None:
    a, b = pair
    asked = prompt(tokens(1, 2, 3))
    b.engine.store(asked)
    b.shim.ban_tags([asked.maker.tag.hex()])
    assert a.borrow(asked, "b") is Recalled.ASKED
    a.settled("nothing")
    assert a.engine.load(asked) == 0


def test_what_was_purged_here_does_not_come_back_from_a_sibling(pair: tuple[Member, Member]) -> None:
    a, b = pair
    before, after = prompt(tokens(1, 2, 3)), prompt(tokens(4, 5, 6))
    b.engine.store(before)
    assert a.engine.driver.removals.purge("acme", tag=before.maker.tag, seconds=30).done
    assert a.borrow(before, "b") is Recalled.ASKED
    a.settled("nothing")
    assert a.engine.load(before) == 0
    b.engine.store(after)
    assert a.borrow(after, "b") is Recalled.ASKED
    a.settled("borrowed")
    assert a.engine.load(after) == 3 * C


def test_what_is_deleted_while_a_sibling_is_asked_does_not_come_back(
    pair: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    asked = prompt(tokens(1, 2, 3))
    b.engine.store(asked)
    lend = b.shim.lend

    def lend_late(body: lending.LendBody) -> lending.LentAnswer:
        answer = lend(body)
        assert a.engine.driver.removals.delete(asked, seconds=30).done
        return answer

    monkeypatch.setattr(b.shim, "lend", lend_late)
    assert a.borrow(asked, "b") is Recalled.ASKED
    a.settled("nothing")
    assert a.engine.load(asked) == 0


def test_slots_that_were_used_again_are_a_miss_with_its_reason(pair: tuple[Member, Member]) -> None:
    """The lender's ledger says one thing, and its memory another."""
    a, b = pair
    asked = prompt(tokens(1, 2, 3))
    b.engine.store(asked)
    for shard in b.engine.driver._shard_threads.all:
        assert shard.wait_applied(20)  # or else they come after this
    for group, index in places():
        for slot in range(SLOTS):
            b.plane.shards[f"b.{group}.{index}"].empty([slot], 1 << 40)
    assert a.borrow(asked, "b") is Recalled.ASKED
    a.settled("failed")
    assert a.engine.load(asked) == 0
    assert a.engine.driver.ledger.tally("acme").missed[Reason.NOT_BORROWED] == 3 * C
    assert a.borrow(asked, "b") is Recalled.ASKED
    a.settled("away")  # it is not asked again so soon


def test_a_sibling_that_is_gone_costs_a_miss(world: World) -> None:
    plane = world.agent("one")
    a, b = world.member("a", plane, "b"), world.member("b", plane, "a")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nowhere = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    a.siblings = [b.lends_to(a, url=nowhere)]
    a.tell()
    asked = prompt(tokens(1, 2, 3))
    assert a.borrow(asked, "b") is Recalled.ASKED
    a.settled("away")
    assert a.engine.load(asked, seconds=5.0) == 0


def test_who_is_no_sibling_is_not_asked(pair: tuple[Member, Member]) -> None:
    a, _ = pair
    assert a.borrow(prompt(tokens(1)), "c") is Recalled.NO_SIBLING
    assert not a.shim.driver.borrow_from(prompt(tokens(1)), "c")
    a.settled("no_sibling")


def test_a_driver_that_is_closed_borrows_nothing(pair: tuple[Member, Member]) -> None:
    """A request that comes meanwhile asks in the thread of vLLM's scheduler, which an exception ends."""
    a, _ = pair
    driver = a.shim.driver
    driver.close()
    assert not driver.borrow_from(prompt(tokens(1)), "b")


@pytest.mark.parametrize(
    ("name", "token", "status"),
    [
        ("a", lending.token_for(SECRETS["b"], "a"), 200),
        ("a", lending.token_for(SECRETS["b"], "c"), 401),  # of another borrower
        ("c", lending.token_for(SECRETS["b"], "c"), 401),  # who may not any more
        ("a", lending.token_for(SECRETS["c"], "a"), 401),  # of another lender
        ("", lending.token_for(SECRETS["b"], ""), 401),
        ("a", "none", 401),
    ],
)
def test_a_driver_lends_to_whom_the_console_lets_borrow(
    pair: tuple[Member, Member], name: str, token: str, status: int
) -> None:
    _, b = pair
    asked = prompt(tokens(1, 2, 3))
    b.engine.store(asked)
    body = lending.LendBody(lending.digest_of(MODEL), asked.maker.tag, b"".join(asked.keys), 0)
    reply = httpx.post(
        f"{b.url}{lending.PATH}",
        params={"as": name},
        headers={"authorization": f"Bearer {token}"},
        content=msgspec.json.encode(body),
        timeout=60,
    )
    assert reply.status_code == status
    if status == 200:
        answer = msgspec.json.decode(reply.content, type=lending.LentAnswer)
        assert [len(group) for group in answer.groups] == [3, 3]


def test_a_driver_of_another_model_lends_nothing(pair: tuple[Member, Member]) -> None:
    _, b = pair
    asked = prompt(tokens(1, 2, 3))
    b.engine.store(asked)
    other = lending.digest_of(msgspec.structs.replace(MODEL, kv_dtype="fp8"))
    body = lending.LendBody(other, asked.maker.tag, b"".join(asked.keys), 0)
    reply = httpx.post(
        f"{b.url}{lending.PATH}",
        params={"as": "a"},
        headers={"authorization": f"Bearer {lending.token_for(SECRETS['b'], 'a')}"},
        content=msgspec.json.encode(body),
        timeout=60,
    )
    assert reply.status_code == 409


@pytest.fixture
def long_loans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a slow machine takes for as many stores as there are slots."""
    monkeypatch.setattr(loans, "LOAN_SECONDS", 300.0)


@pytest.mark.usefixtures("long_loans")
def test_what_is_lent_is_not_displaced_meanwhile(pair: tuple[Member, Member]) -> None:
    _, b = pair
    b.policy = Policy(displacement="lru")
    b.tell()
    asked = prompt(tokens(1, 2, 3))
    b.engine.store(asked)
    assert b.shim.driver.lend(asked, 0)
    for kind in range(100, 100 + 2 * SLOTS):
        b.engine.store(prompt(tokens(kind)))
    assert b.engine.load(asked) == 3 * C
    ledger = b.engine.driver.ledger
    with b.engine.driver._lock:
        ledger.sweep(b.engine.driver._clock() + loans.LOAN_SECONDS + 1)
    for kind in range(200, 200 + 2 * SLOTS):
        b.engine.store(prompt(tokens(kind)))
    assert b.engine.load(asked) == 0


@pytest.mark.usefixtures("long_loans")
def test_a_lender_stores_on_however_much_is_lent(pair: tuple[Member, Member]) -> None:
    """A part of its slots is kept for borrowers, and no more."""
    _, b = pair
    b.policy = Policy(displacement="lru")
    b.tell()
    prompts = [prompt(tokens(*range(kind, kind + 6))) for kind in (1, 11, 21)]
    for asked in prompts:
        b.engine.store(asked)
        assert b.shim.driver.lend(asked, 0)
    for kind in range(100, 100 + 2 * SLOTS):
        assert b.engine.store(prompt(tokens(kind))) == 2  # one in each group
