"""A lost agent is not the end of hits: its shards are placed anew while load never stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from console.operations.core import State
from console.operations.models import Operation
from console.sessions.changes.replacements import KIND
from console.sessions.models import FormerHome, Loss
from console.sessions.plans.losses import Verdict
from tests.conftest import People
from tests.console.sessions import laboratory as lab
from tests.console.sessions.laboratory import Laboratory, laboratory
from tests.console.sessions.loads import Load, engine_with_tier2
from tests.console.sessions.planes import Plane, plane, run
from tests.console.sessions.requests import create, set_rules, shards, start_job
from tests.live import wait_until

pytestmark = [pytest.mark.django_db, pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(600)]

WARM, MORE = 300, 150  # requests
GRACE_SECONDS = 6
LONG_ENOUGH_SECONDS = 120


@pytest.fixture(autouse=True)
def _soon(people: People, settings: Any) -> None:
    """A heartbeat is missed after two seconds; two of three nodes have room for everything."""
    settings.LOST_AFTER_SECONDS = 6
    set_rules(people, replace_lost_after_seconds=GRACE_SECONDS, grant_percent=50)


def serve(people: People, fleet: Plane) -> None:
    """A job of the driver `job7`."""
    run(create(people, boxes=2, bytes_per_token=512))
    started = run(start_job(people, fleet.add_driver("job7")))
    assert started.state == State.SUCCEEDED, (started.message, started.error)


def tended(fleet: Plane, what: str, holds: Callable[[], object]) -> None:
    """The console does what it always does, until this holds."""

    def tend() -> object:
        fleet.tend()
        return holds()

    wait_until(what, tend, LONG_ENOUGH_SECONDS)


def warm(fleet: Plane, load: Load) -> float:
    tended(fleet, "prompts are stored", lambda: load.requests >= WARM)
    rate = load.hit_rate(since=load.served[WARM // 2].at)
    assert rate
    return rate


def rate_of_more(fleet: Plane, load: Load) -> float | None:
    begin = load.requests
    tended(fleet, "more requests are served", lambda: load.requests >= begin + MORE)
    return load.hit_rate(since=load.served[begin].at)


def hits_again(load: Load) -> Callable[[], bool]:
    begin = load.requests + 5  # some may be under way
    return lambda: any(one.hit for one in load.served[begin:])


def test_a_killed_agent_costs_hits_for_a_while_and_what_tier_2_has_comes_back(
    people: People, tmp_path: Path
) -> None:
    token = engine_with_tier2("acme")
    with plane(tmp_path, nodes=3, boxes=4, tier2=tmp_path / "tier2") as fleet:
        serve(people, fleet)
        with Load(fleet.drivers["job7"], token) as load:
            before = warm(fleet, load)
            dead = shards()[0].node.name
            fleet.agents[dead].kill()
            tended(fleet, "hits are back", hits_again(load))
            after = rate_of_more(fleet, load)
        assert load.failed == []
        assert load.wrong == []
        assert after
        assert after >= 0.9 * before
        assert dead not in {shard.node.name for shard in shards()}
        operation = Operation.objects.get(kind=KIND)
        assert (operation.state, operation.actor_name) == (State.SUCCEEDED, "system")
        assert Loss.objects.get().verdict == Verdict.REPLACED
        [driver] = [fleet.drivers["job7"].control("observed").json()]
        assert {shard["state"] for shard in driver["shards"]} == {"here"}
        former = [home for shard in driver["shards"] for home in shard["former_homes"]]
        assert former, "nobody says that a lost agent's memory is gone"


def test_a_home_that_was_left_is_emptied_at_another_address_of_its_agent(
    people: People, tmp_path: Path
) -> None:
    """The agent of a lost node comes back when its streams are elsewhere, and at another port."""

    def seen() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = fleet.drivers["job7"].control("observed").json()["shards"]
        return found

    with plane(tmp_path, nodes=3, boxes=4, is_far=True) as fleet:
        serve(people, fleet)
        dead = shards()[0].node.name
        before = fleet.data_address(dead)
        fleet.agents[dead].kill()
        tended(fleet, "it is replaced", lambda: dead not in {shard.node.name for shard in shards()})
        tended(fleet, "shards are there", lambda: {one["state"] for one in seen()} == {"here"})
        assert any(one["former_homes"] for one in seen())
        fleet.start_again(dead)
        assert fleet.data_address(dead) != before
        tended(fleet, "it is emptied", lambda: not any(one["former_homes"] for one in seen()))
        tended(fleet, "it lets the driver in no more", lambda: not FormerHome.objects.exists())


@pytest.fixture
def parted(db: None, tmp_path: Path) -> Iterator[Laboratory]:
    if reason := lab.why_not():
        pytest.skip(reason)
    with laboratory(tmp_path) as made:
        yield made


PROMPTS = range(4)


def load_all(parted: Laboratory, token: str) -> list[int]:
    """How many tokens of each prompt there are, each byte of which is verified."""
    found = [parted.drivers["job7"].load(token, lab.tokens_of(prompt)) for prompt in PROMPTS]
    assert all(
        bytes_of == lab.kv(prompt)[: len(bytes_of)]
        for prompt, (_, bytes_of) in zip(PROMPTS, found, strict=True)
    )
    return [tokens for tokens, _ in found]


def store_all(parted: Laboratory, token: str) -> None:
    """A driver stores nothing until it has looked at all of its shards, just after these are there."""

    def stores(prompt: int) -> bool:
        answer = parted.drivers["job7"].store(token, lab.tokens_of(prompt), lab.kv(prompt)).json()
        assert answer["failed"] == 0
        return bool(answer["columns"] == lab.COLUMNS)

    for prompt in PROMPTS:
        wait_until("it is stored", partial(stores, prompt))


def seen(parted: Laboratory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = parted.drivers["job7"].control("observed").json()["shards"]
    return found


def test_a_node_that_was_cut_off_is_taken_back_with_its_memory_or_replaced_and_emptied(
    people: People, parted: Laboratory
) -> None:
    token = engine_with_tier2("acme")
    everything = [len(lab.tokens_of(prompt)) for prompt in PROMPTS]
    set_rules(people, replace_lost_after_seconds=3600, grant_percent=45)
    run(create(people, boxes=1, bytes_per_token=4 * lab.EACH))
    assert run(start_job(people, parted.add_driver("job7"))).state == State.SUCCEEDED
    assert {shard.node.name for shard in shards()} == {"ax1"}
    store_all(parted, token)
    assert load_all(parted, token) == everything

    parted.cut_off("ax1")
    tended(parted, "nobody asks, and it is missed", lambda: Loss.objects.filter(verdict="waiting"))
    tended(parted, "shards are lost", lambda: {one["state"] for one in seen(parted)} == {"lost"})
    parted.join_again("ax1")
    tended(parted, "shards are back", lambda: {one["state"] for one in seen(parted)} == {"here"})
    tended(parted, "nothing is lost", lambda: not Loss.objects.exists())
    assert load_all(parted, token) == everything
    assert not Operation.objects.filter(kind=KIND).exists()

    set_rules(people, replace_lost_after_seconds=GRACE_SECONDS)
    parted.cut_off("ax1")
    tended(parted, "it is replaced", lambda: Loss.objects.filter(verdict="replaced"))
    assert {shard.node.name for shard in shards()} == {"ax2"}
    tended(parted, "shards are there", lambda: {one["state"] for one in seen(parted)} == {"here"})
    assert load_all(parted, token) == [0 for _ in PROMPTS]
    store_all(parted, token)
    assert load_all(parted, token) == everything
    assert any(one["former_homes"] for one in seen(parted))
    parted.join_again("ax1")
    tended(parted, "it is emptied", lambda: not any(one["former_homes"] for one in seen(parted)))
    tended(parted, "its memory is free", lambda: not parted.slots("ax1"))
    tended(parted, "it lets the driver in no more", lambda: not FormerHome.objects.exists())
    assert load_all(parted, token) == everything
