"""One target's answers are that target's state: they hold up nobody else, and nothing else fails."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.test import Client
from django.utils import timezone

from console.accounts.models import User
from console.control import documents, rounds
from console.control import services as control
from console.control.models import BadAnswers, Target
from console.control.observed import Observed
from console.control.sending import SUSPECTS_AT_ONCE_MAX, Call, Endpoint, ask_all
from console.fleet.models import Driver
from console.sessions.steps.observations import Observations
from kvss_agent.http.answers import Budget, Reply
from tests.conftest import People
from tests.console.control.drivers import DriverFleet, drivers, join
from tests.console.control.targets import save, target
from tests.hostile.agent import Peer
from tests.hostile.answers import EXHAUSTING, OBSERVED, Answer, Asked, bomb, says, says_json
from tests.kvss_agent.plane import SECRET
from tests.live import wait_until

__all__ = ["drivers"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EVIL = {**OBSERVED, **EXHAUSTING, "bomb": bomb(64)}
FAULTS = {
    "shards are texts": "malformed",
    "generation is infinite": "malformed",
    "generation has 4,000 digits": "malformed",
    "generation is negative": "malformed",
    "deep": "malformed",
    "deep and open": "malformed",
    "NUL in a reason": "malformed",
    "not UTF-8": "malformed",
    "closes midway": "broken",
    "garbage": "broken",
    "500": "refused",
    "redirects": "refused",
    "bomb": "compressed",
    "endless text": "too_long",
    "drips": "late",
    "drips headers": "late",
    "says nothing": "late",
}


def name_of(answer: str) -> str:
    return f"evil-{list(EVIL).index(answer)}"


class GoodDriver:
    """What a driver answers: it follows each document at once, as soon as it may answer."""

    def __init__(self, *, may_answer: bool = True) -> None:
        self.told: list[int] = []
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        if may_answer:
            self.may_answer.set()

    def __call__(self, asked: Asked, connected: socket.socket) -> None:
        if asked.method == "PUT":
            self.told.append(msgspec.json.decode(asked.body)["generation"])
        self.asked.set()
        self.may_answer.wait(60)
        generation = self.told[-1] if self.told else 0
        now = {"generation": generation, "observed_generation": generation}
        says_json(now, 202 if asked.method == "PUT" else 200)(asked, connected)


def at_home(name: str) -> dict[str, Any]:
    home = {"group": "full", "index": 0, "shard": name, "address": "unix:/nowhere/data.sock"}
    return {"secret": SECRET, "homes": [home]}


@pytest.fixture
def neighbours(db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`one` and `two`, who follow. What the console does about others does not depend on how they do it:
    real drivers stand beside evil ones in the tests that look at what is answered."""
    monkeypatch.setitem(documents._parts, "driver", [at_home])
    with Peer(GoodDriver()) as one, Peer(GoodDriver()) as two:
        join("one", one.url)
        join("two", two.url)
        yield


@pytest.fixture
def evil(drivers: DriverFleet) -> Iterator[dict[str, Peer]]:
    """A driver that has joined for each answer that there is, beside `one` and `two`."""
    with contextlib.ExitStack() as stack:
        peers = {what: stack.enter_context(Peer(answer)) for what, answer in EVIL.items()}
        for what, peer in peers.items():
            join(name_of(what), peer.url)
        yield peers


@pytest.mark.django_db
def test_what_a_driver_answers_is_its_own_state(
    drivers: DriverFleet,
    evil: dict[str, Peer],
    people: People,
    api_of: Callable[..., Client],
    browser_of: Callable[[User], Client],
) -> None:
    change = save(people, ttl_last_use_seconds=60)
    # Some of them would be waited for without end.
    assert rounds.push([control.ALL_DRIVERS]) == len(evil)
    reach = control.applied(change)
    assert [one.name for one in reach.standings if one.has_it] == ["one", "two"]
    wait_until("all were asked", lambda: all(peer.asked for peer in evil.values()))
    found = {what: target(name_of(what)) for what in evil}
    assert {what: found[what].fault for what in FAULTS} == FAULTS
    for what, one in found.items():
        assert one.problem, what
        assert one.problem.isprintable()
        assert one.fault, what
        assert one.bad_since
        assert one.retry_at
        assert one.asked_until is None
    assert found["shards are texts"].problem == (
        "Its answer is not valid: Expected `object`, got `str` - at `$.shards[0]`. "
        "Is it one of ours, and of this version?"
    )
    counted = dict(BadAnswers.objects.values_list("fault", "count"))
    assert sum(counted.values()) == len(evil)

    asked = {"faulty": "true", "limit": "200"}
    page = api_of(people.platform_viewer).get("/api/v1/targets", asked).json()["items"]
    told = {one["name"]: one["fault"] for one in page}
    assert told == {one.name: one.fault for one in found.values()}
    texts = api_of(people.platform_viewer).get("/metrics").content.decode()
    assert 'tidegate_targets{state="malformed"}' in texts
    late = 'tidegate_bad_answers_total{fault="late"}'
    assert f"{late} {counted['late']}\n" in texts
    browser = browser_of(people.platform_viewer)
    shown = browser.get(f"/fleet/drivers/{name_of('deep')}/").content.decode()
    assert "Its answer is not valid: It is nested deeper than 32 levels." in shown
    assert "No valid answer since" in shown

    change = save(people, ttl_last_use_seconds=30)  # and nobody has learned to be afraid of them
    Target.objects.update(retry_at=None)
    assert rounds.reconcile() == len(evil)
    assert control.applied(change).has_it == 2


@pytest.mark.django_db
def test_a_target_that_is_well_again_is_told_and_says_so(people: People, neighbours: None) -> None:
    with Peer(OBSERVED["deep"]) as peer:
        join("ill", peer.url)
        save(people, ttl_last_use_seconds=60)
        rounds.push([("driver", "ill")])
        assert (target("ill").fault, target("ill").failures) == ("malformed", 1)
        began = target("ill").bad_since
        Target.objects.update(retry_at=None)
        rounds.reconcile()
        assert (target("ill").failures, target("ill").bad_since) == (2, began)
        peer.answer = says_json({"generation": 1, "observed_generation": 1}, 202)
        Target.objects.update(retry_at=None)
        assert rounds.reconcile() == 0
        well = target("ill")
        assert (well.fault, well.bad_since, well.problem, well.failures) == ("", None, "", 0)


@pytest.mark.django_db
def test_the_largest_generation_that_is_told_can_be_followed(people: People, neighbours: None) -> None:
    """It is noted, as 'somebody else has told it', and nothing overflows where it is kept."""
    with Peer(says_json({"generation": (1 << 62) - 1, "observed_generation": 0}, 202)) as peer:
        join("large", peer.url)
        save(people, ttl_last_use_seconds=60)
        for _ in range(2):
            rounds.push([("driver", "large")])
            assert target("large").generation == 1 << 62
        peer.answer = says_json({"generation": 1 << 62, "observed_generation": 0}, 202)
        rounds.push([("driver", "large")])
        assert target("large").fault == "malformed"
        assert control.applied(None).has_it == 0
        rounds.push([control.ALL_DRIVERS])
        assert control.applied(None).has_it == 2


@pytest.mark.django_db
@pytest.mark.parametrize("url", ["http://a..b:80", f"http://{'x' * 70}.example:80"])
def test_an_address_that_is_none_is_a_problem_of_whom_it_is_said_to_be(
    url: str, people: People, neighbours: None
) -> None:
    join("nowhere", url)
    change = save(people, ttl_last_use_seconds=60)
    assert rounds.push([control.ALL_DRIVERS]) == 1
    assert control.applied(change).has_it == 2
    assert target("nowhere").fault == "unreached"


@pytest.mark.django_db
def test_who_gives_no_answers_is_asked_less_often(people: People, neighbours: None) -> None:
    """Also when intent changes: a change a second must not be a worker each for it."""
    with Peer(OBSERVED["null"]) as peer:
        join("evil", peer.url)
        patient, changes = rounds.FAILURES_PATIENT_MAX, iter(range(60, 70))
        for seconds in itertools.islice(changes, patient):
            save(people, ttl_last_use_seconds=seconds)
            before = timezone.now()
            rounds.push([control.ALL_DRIVERS])
        waits = target("evil").retry_at
        assert waits
        assert waits >= before + timedelta(seconds=rounds.RETRY_SECONDS[patient - 1])
        Target.objects.filter(name="evil").update(retry_at=timezone.now() + timedelta(hours=1))
        for seconds in changes:
            save(people, ttl_last_use_seconds=seconds)
            rounds.push([control.ALL_DRIVERS])
        assert control.applied(None).has_it == 2
        asked = [one for one in peer.asked if one.method == "PUT"]
        assert target("evil").failures == len(asked) == patient


@pytest.mark.django_db
def test_who_gives_no_answers_takes_few_places(people: People, neighbours: None) -> None:
    """However many they are, over all workers."""
    many = SUSPECTS_AT_ONCE_MAX + 10
    with Peer(EXHAUSTING["says nothing"]) as peer:
        for number in range(many):
            join(f"evil-{number}", peer.url)
        save(people, ttl_last_use_seconds=60)
        rounds.push([control.ALL_DRIVERS])
        # Who is asked may note it after who asks has given up.
        wait_until("all were asked, since nobody knows yet", lambda: len(peer.asked) == many)
        peer.asked.clear()
        Target.objects.update(retry_at=None)
        change = save(people, ttl_last_use_seconds=30)
        rounds.reconcile()
        wait_until("some are asked", lambda: len(peer.asked) >= SUSPECTS_AT_ONCE_MAX)
        assert len(peer.asked) == SUSPECTS_AT_ONCE_MAX
        assert control.applied(change).has_it == 2


@pytest.mark.django_db(transaction=True)
def test_one_at_a_time_asks_a_target_and_tells_it_what_is_newer(
    people: People, neighbours: None
) -> None:
    """Somebody changes intent while a target takes long over what was intended before."""
    driver = GoodDriver(may_answer=False)
    with Peer(driver) as peer:
        join("slow", peer.url)
        save(people, ttl_last_use_seconds=60)
        outcome = list[int]()

        def first() -> None:
            try:
                outcome.append(rounds.push([("driver", "slow")]))
            finally:
                connection.close()

        pushing = threading.Thread(target=first)
        pushing.start()
        assert driver.asked.wait(60)
        change = save(people, ttl_last_use_seconds=30)
        assert rounds.push([control.ALL_DRIVERS]) == 1, "it is left to who is at it"
        assert driver.told == [1]
        driver.may_answer.set()
        pushing.join(60)
        assert driver.told == [1, 2]
        assert outcome == [0]
        assert {one.name for one in control.applied(change).standings if one.has_it} == {
            *("one", "two", "slow")
        }
        assert target("slow").asked_until is None


@pytest.mark.django_db
def test_who_died_while_asking_is_not_waited_for(people: People, neighbours: None) -> None:
    rounds.push([control.ALL_DRIVERS])
    Target.objects.filter(name="one").update(asked_until=timezone.now() + rounds.ASKED_FOR)
    change = save(people, ttl_last_use_seconds=60)
    assert rounds.push([control.ALL_DRIVERS]) == 1
    Target.objects.filter(name="one").update(asked_until=timezone.now())
    assert rounds.push([control.ALL_DRIVERS]) == 0
    assert control.applied(change).has_it == 2


@pytest.mark.django_db
def test_whoever_asks_many_gets_the_answers_of_those_who_answer(
    drivers: DriverFleet, evil: dict[str, Peer]
) -> None:
    """Purges, previews, explanations, moves of sessions."""
    calls = [
        Call(Endpoint(one.control_url, str(one.control_token)), "GET", "/v1/observed")
        for one in Driver.objects.order_by("pk")
    ]
    answers = ask_all(calls, Budget(10.0))
    for answer in answers[:2]:
        assert isinstance(answer, Reply)
        assert answer.read(Observed).shards == []


@pytest.mark.django_db  # where the certificates are
def test_what_nobody_has_foreseen_is_the_problem_of_one(caplog: pytest.LogCaptureFixture) -> None:
    """Here a name of a certificate that Python refuses, in a way of its own, to look for."""
    with Peer(says(b"{}")) as peer:
        unforeseen = Endpoint(peer.url.replace("http:", "https:"), "t", "a\0b")
        calls = [Call(one, "GET", "/") for one in (unforeseen, Endpoint(peer.url, "t"))]
        inside, answer = ask_all(calls, Budget(60.0))
    assert inside == "Asking it failed inside; the log tells more."
    assert isinstance(answer, Reply)
    assert f"Asking {unforeseen.url} failed inside" in caplog.text


@pytest.mark.django_db
def test_what_a_shard_says_is_cut_and_not_believed(people: People, neighbours: None) -> None:
    long = {"shard": "x" * 2000, "reason": "because \u202e\n" * 100}
    answer: Answer = says_json({"generation": 1, "observed_generation": 0, "shards": [long] * 500}, 202)
    with Peer(answer) as peer:
        join("wordy", peer.url)
        save(people, ttl_last_use_seconds=60)
        rounds.push([("driver", "wordy")])
    assert len(target("wordy").problem) == 500
    assert target("wordy").problem.isprintable()
    assert target("wordy").fault == ""


@pytest.mark.django_db  # where the certificates are
def test_every_status_is_an_answer() -> None:
    for status in (200, 204, 302, 404, 500, 999):
        with Peer(says(b"{}", status)) as peer:
            [answer] = ask_all([Call(Endpoint(peer.url, "t"), "GET", "/")], Budget(60.0))
            assert not isinstance(answer, str)
            assert answer.status_code == status
            assert answer.is_success == (status < 300)


@pytest.mark.django_db
def test_a_driver_that_has_lost_its_agent_is_understood(people: People, drivers: DriverFleet) -> None:
    """Of a shard that is lost it says less than of one that is there."""
    save(people, ttl_last_use_seconds=60)
    assert rounds.push([control.ALL_DRIVERS]) == 0
    drivers.agent.kill()
    daemon = drivers.daemons["one"]

    def is_lost() -> bool:
        [shard] = daemon.control("observed").json()["shards"]
        return bool(shard["state"] == "lost")

    wait_until("it has lost its agent", is_lost)
    shard = Observations(set(), set(Driver.objects.filter(name="one"))).shard_of("one", "full", 0)
    assert shard
    assert (shard.state, shard.slots) == ("lost", None)
    Target.objects.update(observed_at=None)
    rounds.reconcile()
    assert target("one").fault == ""
