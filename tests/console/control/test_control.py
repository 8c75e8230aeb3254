"""Intent reaches real drivers: at once, after they were away, and whoever dies on the way."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.control import rounds
from console.control import services as control
from console.control.documents import Compiler, Document, NotYet, Partial
from console.control.models import Change, Target
from console.control.sending import Answer
from console.fleet.models import Driver
from console.orgs import services as orgs
from console.policies import callers
from tests.conftest import People
from tests.console.control.drivers import DriverFleet, drivers, join
from tests.console.control.targets import save, target
from tests.live import listening
from tests.swdriver_shim.daemons import C, Daemon, kv

__all__ = ["drivers"]

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
TOKENS = list(range(2 * C))


def caller(people: People) -> str:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        return callers.add_caller(people.principal("org_admin"), org, name="engine")[1]


def retry_now() -> None:
    Target.objects.update(retry_at=None)


def test_a_saved_policy_is_in_force_on_every_driver_and_its_columns_are_gone(
    drivers: DriverFleet, people: People
) -> None:
    token = caller(people)
    assert rounds.push([control.ALL_DRIVERS]) == 0
    one = drivers.daemons["one"]
    one_is_ready(one)
    one.store(token, TOKENS, kv(len(TOKENS)))
    assert one.load(token, TOKENS)[0] == len(TOKENS)

    change = save(people, tiers="none")
    reach = control.applied(change)
    assert (reach.has_it, len(reach.standings), reach.seconds) == (0, 2, None)
    assert {one.why_not for one in reach.lagging} == {"It is being configured."}
    with CaptureQueriesContext(connection) as asked:
        assert rounds.push([control.ALL_DRIVERS]) == 0
    assert any("pg_notify" in one["sql"] and "org:acme" in one["sql"] for one in asked), "pages see it"
    reach = control.applied(Change.objects.get(pk=change.pk))
    assert (reach.has_it, len(reach.standings)) == (2, 2)
    assert reach.seconds is not None
    assert one.load(token, TOKENS) == (0, b"")


def test_the_same_intent_is_the_same_generation(drivers: DriverFleet, people: People) -> None:
    change = save(people, ttl_last_use_seconds=60)
    for _ in range(3):
        assert rounds.reconcile() == 0
    assert {one.generation for one in Target.objects.all()} == {1}
    nothing = save(people, ttl_last_use_seconds=60).pk
    assert nothing == change.pk
    # What is there already is in force with the next look, without a word to anybody.
    with transaction.atomic():
        change = control.changed([control.ALL_DRIVERS], "of no consequence")
    rounds.reconcile()
    assert control.applied(change).has_it == 2
    assert {one.generation for one in Target.objects.all()} == {1}


def test_a_fleet_at_rest_costs_no_documents(drivers: DriverFleet, people: People) -> None:
    """And a round that makes none finds all that there is to do."""
    save(people, ttl_last_use_seconds=60)
    assert rounds.reconcile() == 0
    assert compiled_for() == []
    save(people, ttl_last_use_seconds=30)  # and its task is lost
    assert compiled_for() == ["one", "two"]
    assert {one.generation for one in Target.objects.all()} == {2}
    assert compiled_for() == []
    Target.objects.filter(name="two").update(observed_at=timezone.now() - 2 * rounds.ASK_EVERY)
    assert compiled_for() == ["two"]
    observed_at = target("two").observed_at
    assert observed_at
    assert observed_at > timezone.now() - rounds.ASK_EVERY
    Target.objects.filter(name="one").update(observed_generation=1)
    assert compiled_for() == ["one"]
    assert target("one").observed_generation == 2


def compiled_for() -> list[str]:
    """Whose documents a round makes that is not of all."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        compile_one = Compiler.compile

        def noted(self: Compiler, name: str, base: Partial) -> Document:
            made.append(name)
            return compile_one(self, name, base)

        patch.setattr(Compiler, "compile", noted)
        assert rounds.reconcile_unsettled(timezone.now()) == 0
    return sorted(made)


def test_a_driver_that_was_away_is_told_when_it_is_back(drivers: DriverFleet, people: People) -> None:
    save(people, ttl_last_use_seconds=60)
    rounds.reconcile()
    drivers.kill("two")
    change = save(people, ttl_last_use_seconds=30)
    assert rounds.push([control.ALL_DRIVERS]) == 1
    reach = control.applied(change)
    assert [(one.name, one.has_it) for one in reach.standings] == [("one", True), ("two", False)]
    assert reach.lagging[0].why_not.startswith("It does not answer")
    assert Change.objects.get(pk=change.pk).applied_at is None
    Driver.objects.filter(name="two").update(lost_at=timezone.now())
    drivers.start("two")  # from what it kept: the generation before
    retry_now()
    assert rounds.reconcile() == 0
    assert control.applied(Change.objects.get(pk=change.pk)).seconds is not None


def test_a_driver_that_has_lost_its_state_is_found_and_told_anew(
    drivers: DriverFleet, people: People
) -> None:
    change = save(people, ttl_last_use_seconds=60)
    rounds.reconcile()
    drivers.kill("one")
    (drivers.directory / "one" / "desired.json").unlink()
    daemon = drivers.start("one")
    Target.objects.update(observed_at=timezone.now() - 2 * rounds.ASK_EVERY)
    assert rounds.reconcile() == 1  # asked, and found out
    assert not control.applied(change).standings[0].has_it
    retry_now()
    assert rounds.reconcile() == 0
    assert daemon.control("observed").json()["generation"] == target("one").generation


def test_a_driver_that_somebody_else_has_told_is_told_anew(drivers: DriverFleet, people: People) -> None:
    """As after a database was restored from a backup: it has heard of later generations than we know."""
    save(people, ttl_last_use_seconds=60)
    rounds.reconcile()
    mine = Compiler("driver").compile("one", rounds._bases("driver", [target("one")])["one"])
    told = drivers.daemons["one"].http.put(
        "/v1/desired",
        content=mine.of_generation(41),
        headers={"authorization": f"Bearer {'c' * 40}"},
    )
    assert told.status_code == 202
    change = save(people, ttl_last_use_seconds=30)
    assert rounds.push([("driver", "one")]) == 1
    assert "this console did not send" in target("one").problem
    assert rounds.push([("driver", "one")]) == 0
    assert target("one").generation == 42
    assert control.applied(change).standings[0].has_it


def test_a_driver_without_a_home_is_left_alone(people: People) -> None:
    with listening() as nobody:
        join("idle", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        change = save(people, ttl_last_use_seconds=60)
        rounds.push([control.ALL_DRIVERS])
    assert target("idle").generation == 0
    assert control.applied(change).standings == []


def test_who_does_not_answer_costs_nobody_else_anything(drivers: DriverFleet, people: People) -> None:
    with listening() as silent:  # it takes connections and never says a word
        port = silent.getsockname()[1]
        Driver.objects.filter(name="two").update(control_url=f"http://127.0.0.1:{port}")
        change = save(people, ttl_last_use_seconds=60)
        assert rounds.push([control.ALL_DRIVERS]) == 1
    assert [one.has_it for one in control.applied(change).standings] == [True, False]
    assert target("two").failures == 1
    assert target("two").retry_at is not None


def test_an_org_that_is_new_or_gone_is_told_of(drivers: DriverFleet, people: People) -> None:
    rounds.reconcile()
    admin = people.principal("platform_admin")
    orgs.create_org(admin, slug="initech", name="Initech")
    rounds.push([control.ALL_DRIVERS])
    assert drivers.daemons["one"].control("observed").json()["orgs"] == 3
    with transaction.atomic():
        orgs.delete_org(admin, orgs.for_change(admin, "initech"))
    rounds.push([control.ALL_DRIVERS])
    assert drivers.daemons["one"].control("observed").json()["orgs"] == 2


def test_an_answer_to_an_earlier_document_does_not_count_for_a_later_one(
    drivers: DriverFleet, people: People
) -> None:
    """Two tasks beside each other: the slower one's answer comes when there is a later generation."""
    save(people, ttl_last_use_seconds=60)
    rounds.reconcile()
    compiled = rounds._compile("driver", ["one"])
    [(stale, _)] = compiled.values()
    later = save(people, ttl_last_use_seconds=30)
    rounds._compile("driver", ["one", "two"])
    answer = Answer(stale.pk, generation=1, observed_generation=1)
    rounds._note(stale, answer, timezone.now(), was_told=True)
    found = target("one")
    assert (found.generation, found.observed_generation) == (2, 1)
    assert not control.applied(later).standings[0].has_it
    assert rounds.push([control.ALL_DRIVERS]) == 0


def test_an_answer_counts_although_the_one_before_was_noted_by_a_clock_that_was_ahead(
    drivers: DriverFleet, people: People
) -> None:
    save(people, ttl_last_use_seconds=60)
    assert rounds.push([control.ALL_DRIVERS]) == 0
    ahead = timezone.now() + timedelta(hours=1)
    Target.objects.update(observed_at=ahead)
    change = save(people, ttl_last_use_seconds=30)
    rounds.push([control.ALL_DRIVERS])
    assert control.applied(change).has_it == 2
    assert not Target.objects.filter(observed_at__gte=ahead).exists()


def test_an_answer_that_took_too_long_is_left_to_who_asks_by_now(
    drivers: DriverFleet, people: People
) -> None:
    save(people, ttl_last_use_seconds=60)
    rounds.push([control.ALL_DRIVERS])
    slow = target("one")
    slow.asked_until = timezone.now() - timedelta(seconds=1)
    theirs = timezone.now() + rounds.ASKED_FOR
    Target.objects.filter(name="one").update(asked_until=theirs)
    answer = Answer(slow.pk, generation=1, observed_generation=0)
    assert rounds._note(slow, answer, timezone.now(), was_told=True), "nobody has to ask again"
    found = target("one")
    assert (found.asked_until, found.observed_generation) == (theirs, 1)


def test_what_a_process_would_refuse_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    from console.control import documents

    monkeypatch.setitem(documents._parts, "driver", [lambda _name: {"homes": []}])
    monkeypatch.setitem(documents._common, "driver", [])
    with pytest.raises(NotYet, match="model"):
        Compiler("driver").compile("one", {"driver": "one", "secret": b"s" * 32})
    monkeypatch.setitem(documents._parts, "node", [])
    with pytest.raises(NotYet, match="Nobody says"):
        Compiler("node").compile("ax-1", {})


def test_a_node_that_leaves_the_fleet_meanwhile_is_its_own_problem() -> None:
    """Between a round's list and its documents: the round goes on with the others."""
    with pytest.raises(NotYet, match="left the fleet"):
        Compiler("node").compile("nobody-any-more", {})


def one_is_ready(daemon: Daemon) -> None:
    from tests.live import wait_until

    wait_until("it is ready", daemon.is_ready)
