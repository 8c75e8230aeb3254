"""Who is let into the fleet, who is not, and what heartbeats say."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from console.accounts.principal import Refused
from console.audit.models import AuditEntry
from console.fleet import nodes, services
from console.fleet.membership import joins, tokens
from console.fleet.membership.facts import NicFacts
from console.fleet.membership.joins import TokenIsUsedUp
from console.fleet.models import Driver, JoinToken, Leaf, Node, Stamp, Watch
from console.fleet.nodes import Impossible
from console.placement.topology import State
from console.sessions.models import DriverOrg, Job, Session
from kvss_agent.process.membership import credential
from kvss_agent.security.identity import ProcessIdentity
from telemetry.models import Event
from tests.conftest import People
from tests.console.fleet.worlds import (
    CONTROL_TOKEN,
    DRIVER_FACTS,
    FACTS,
    PLUGGED,
    World,
    new_token,
    refreshed,
)
from tests.live import wait_until
from tests.locks import somebody_waits

OF_AX_1 = credential(CONTROL_TOKEN, "node:ax-1")


def test_an_agent_joins_as_a_new_node_with_what_it_tells(world: World) -> None:
    node = world.here
    assert (node.state, node.stamp, node.held_state) == ("ready", world.stamp, "")
    assert (node.memory_bytes, node.cpus, node.shards_max) == (1 << 40, 64, 64)
    assert [(nic.name, nic.leaf.name) for nic in node.nics.all()] == [("eth0", "leaf-1")]
    assert node.control_token == CONTROL_TOKEN
    entry = AuditEntry.objects.get(action="node.join")
    assert CONTROL_TOKEN not in str(entry.after)
    assert Event.objects.get(kind="node.join").topics == ["node:ax-1", "fleet"]


def test_an_agent_joins_as_the_node_that_waits_for_it_and_what_is_declared_holds(world: World) -> None:
    world.waits.declared = {"memory_bytes": 1 << 30, "shards_max": 3}
    world.waits.held_state, world.waits.held_reason = "cordoned", "not yet"
    world.waits.save()
    node = joins.join_node(new_token(), "ax-2", CONTROL_TOKEN, FACTS, PLUGGED)
    assert (node.memory_bytes, node.cpus, node.shards_max) == (1 << 30, 64, 3)
    assert (node.state, node.state_reason) == ("cordoned", "not yet")
    assert [nic.leaf.name for nic in node.nics.all()] == ["leaf-2"]  # as the fleet says, not the agent


@pytest.mark.parametrize(
    ("name", "facts", "nics", "said"),
    [
        ("ax-9", FACTS, (), "The fleet has no node ax-9"),
        ("ax-9", FACTS, (NicFacts("eth0", "nowhere", 16, 100),), "There is no leaf nowhere"),
        ("ax-9", FACTS, (*PLUGGED, NicFacts("eth1", "far", 16, 100)), "leaves of one stamp"),
        ("ax-9", replace(FACTS, protocol_min=8, protocol_max=9), PLUGGED, "speaks protocol 8 to 9"),
        ("ax-9", replace(FACTS, software_version="1.0.0"), PLUGGED, "Update the console"),
        ("ax-1", FACTS, PLUGGED, "ax-1 is taken, and alive"),
    ],
)
def test_who_is_not_let_in_hears_why_and_uses_nothing_up(
    world: World, name: str, facts: Any, nics: Any, said: str
) -> None:
    Leaf.objects.create(name="far", stamp=Stamp.objects.create(name="west"))
    token = new_token(uses=1)
    with pytest.raises(Impossible, match=said):
        joins.join_node(token, name, "x" * 32, facts, nics)
    assert JoinToken.objects.get(pk=token.pk).uses_left == 1
    assert refreshed(world.here).control_token == CONTROL_TOKEN


def test_a_token_is_for_one_kind(world: World) -> None:
    with pytest.raises(Impossible, match="lets a driver join"):
        joins.join_node(new_token("driver"), "ax-9", CONTROL_TOKEN, FACTS, PLUGGED)
    with pytest.raises(Impossible, match="lets a node join"):
        joins.join_driver(new_token(), "job-7", CONTROL_TOKEN, DRIVER_FACTS)


def test_a_machine_made_anew_takes_its_name_over_once_the_former_one_is_lost(world: World) -> None:
    Node.objects.filter(name="ax-1").update(state="lost", held_state="draining")
    node = joins.join_node(new_token(), "ax-1", "n" * 32, FACTS)
    assert (node.state, node.control_token) == ("draining", "n" * 32)
    assert not joins.beats("ax-1", OF_AX_1, FACTS)
    assert joins.beats("ax-1", credential("n" * 32, "node:ax-1"), FACTS)


def test_a_machine_made_anew_in_maintenance_takes_its_name_over_once_it_is_silent(world: World) -> None:
    """Nobody in maintenance counts as lost; and that is when machines are made anew."""
    Node.objects.filter(name="ax-1").update(state="maintenance")
    now = timezone.now()
    Watch.objects.create(pk=1, listening_since=now - timedelta(hours=1), swept_at=now)
    with pytest.raises(Impossible, match="is taken, and alive"):
        joins.join_node(new_token(), "ax-1", "n" * 32, FACTS)
    Node.objects.filter(name="ax-1").update(last_heartbeat_at=now - timedelta(minutes=2))
    Watch.objects.update(listening_since=now)
    with pytest.raises(Impossible, match="is taken, and alive"):
        joins.join_node(new_token(), "ax-1", "n" * 32, FACTS)  # nobody was there to hear it
    Watch.objects.update(listening_since=now - timedelta(hours=1), swept_at=now - timedelta(minutes=2))
    with pytest.raises(Impossible, match="is taken, and alive"):
        joins.join_node(new_token(), "ax-1", "n" * 32, FACTS)  # the console was off, and just starts
    Watch.objects.update(swept_at=now)
    node = joins.join_node(new_token(), "ax-1", "n" * 32, FACTS)
    assert (node.state, node.control_token) == ("maintenance", "n" * 32)


def test_a_token_that_is_used_up_expired_or_revoked_lets_nobody_in(world: World, people: People) -> None:
    admin = people.principal("platform_admin")
    in_an_hour = timezone.now() + timedelta(hours=1)
    token, text = tokens.issue(admin, kind="node", uses=1, expires_at=in_an_hour)
    assert tokens.authenticate(text) == token
    assert tokens.authenticate(f"{text[:-1]}{'A' if text[-1] != 'A' else 'B'}") is None
    assert tokens.authenticate("tgj_nonsense") is None
    joins.join_node(token, "ax-2", CONTROL_TOKEN, FACTS)
    assert tokens.authenticate(text) is None
    with pytest.raises(TokenIsUsedUp):
        joins.join_node(token, "ax-3", CONTROL_TOKEN, FACTS, PLUGGED)
    assert not Node.objects.filter(name="ax-3").exists()
    revoked, text = tokens.issue(admin, kind="node", uses=9, expires_at=in_an_hour)
    tokens.revoke(admin, revoked.public_id)
    tokens.revoke(admin, revoked.public_id)
    assert tokens.authenticate(text) is None
    _, text = tokens.issue(admin, kind="node", uses=9, expires_at=timezone.now())
    assert tokens.authenticate(text) is None
    actions = [entry.action for entry in AuditEntry.objects.filter(object_type="join_token")]
    assert actions.count("join_token.revoke") == 1
    assert text not in str([entry.after for entry in AuditEntry.objects.all()])


def test_a_credential_makes_no_join_token_that_outlives_it(people: People) -> None:
    now = timezone.now()
    short = replace(people.principal("platform_admin"), expires_at=now + timedelta(minutes=5))
    with pytest.raises(Refused, match="outlives"):
        tokens.issue(short, kind="node", uses=1, expires_at=now + timedelta(hours=1))
    assert tokens.issue(short, kind="node", uses=1, expires_at=now + timedelta(minutes=4))


@pytest.mark.django_db(transaction=True)
def test_the_last_use_of_a_token_is_had_by_one(world: World) -> None:
    token, let_in, refused = new_token(uses=1), [], []
    together = threading.Barrier(4)

    def join(name: str) -> None:
        together.wait(30)
        try:
            let_in.append(joins.join_node(token, name, CONTROL_TOKEN, FACTS, PLUGGED))
        except TokenIsUsedUp:
            refused.append(name)
        finally:
            connection.close()

    threads = [threading.Thread(target=join, args=(f"ax-1{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(let_in), len(refused)) == (1, 3)
    assert Node.objects.filter(name__startswith="ax-1", name__gt="ax-1").count() == 1


@pytest.mark.django_db(transaction=True)
def test_a_name_is_had_by_one(world: World) -> None:
    token, let_in, refused = new_token("driver", uses=9), [], []
    together = threading.Barrier(4)

    def join(secret: str) -> None:
        together.wait(30)
        try:
            joins.join_driver(token, "job-7", secret * 32, DRIVER_FACTS)
            let_in.append(secret)
        except Impossible:
            refused.append(secret)
        finally:
            connection.close()

    threads = [threading.Thread(target=join, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(let_in), len(refused)) == (1, 3)
    assert Driver.objects.get(name="job-7").control_token == let_in[0] * 32
    assert JoinToken.objects.get(pk=token.pk).uses_left == 8


def test_heartbeats_are_known_by_what_follows_from_the_token(world: World) -> None:
    before = refreshed(world.here)
    assert joins.beats("ax-1", OF_AX_1, FACTS)
    after = refreshed(world.here)
    assert after.last_heartbeat_at is not None
    assert before.last_heartbeat_at is not None
    assert after.last_heartbeat_at > before.last_heartbeat_at
    assert after.version == before.version
    for name, shown in (
        ("ax-1", "tgh_wrong"),
        ("ax-1", CONTROL_TOKEN),
        ("ax-1", credential(CONTROL_TOKEN, "node:ax-2")),
        ("ax-2", credential("", "node:ax-2")),  # has not joined
        ("nobody", OF_AX_1),
    ):
        assert not joins.beats(name, shown, FACTS)


def test_a_heartbeat_that_says_something_new_is_followed(world: World) -> None:
    Node.objects.filter(name="ax-1").update(declared={"cpus": 8})
    joins.beats("ax-1", OF_AX_1, replace(FACTS, software_version="0.1.1", cpus=128))
    node = refreshed(world.here)
    assert (node.software_version, node.cpus, node.reported["cpus"]) == ("0.1.1", 8, 128)
    assert node.version == world.here.version + 1
    assert Event.objects.get(kind="node.software").sentence == "ax-1 runs 0.1.1."
    joins.beats("ax-1", OF_AX_1, replace(FACTS, software_version="0.1.1", cpus=128))
    assert refreshed(world.here).version == node.version


@pytest.mark.django_db(transaction=True)
def test_who_was_lost_and_is_taken_over_meanwhile_changes_nothing(world: World) -> None:
    """Its heartbeat was let in, and then waits for the one that takes its name over."""
    Node.objects.filter(name="ax-1").update(state="lost", held_state="ready")
    heard: list[bool] = []

    def beat() -> None:
        heard.append(joins.beats("ax-1", OF_AX_1, replace(FACTS, cpus=1)))
        connection.close()

    late = threading.Thread(target=beat)
    with transaction.atomic():
        joins.join_node(new_token(), "ax-1", "n" * 32, FACTS)
        late.start()
        wait_until("it waits", somebody_waits)
    late.join(30)
    assert heard == [False]
    assert (refreshed(world.here).cpus, refreshed(world.here).control_token) == (64, "n" * 32)


def test_a_driver_joins_with_its_model_and_beats(db: None) -> None:
    model = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [1024]}]}
    joins.join_driver(new_token("driver"), "job-7", CONTROL_TOKEN, DRIVER_FACTS, model)
    Driver.objects.filter(name="job-7").update(lost_at=timezone.now())
    assert not services.reachable_drivers().exists()
    assert joins.beats("job-7", credential(CONTROL_TOKEN, "driver:job-7"), DRIVER_FACTS)
    assert [driver.model for driver in services.reachable_drivers()] == [model]
    assert Event.objects.filter(kind="driver.back").count() == 1


def lost_driver(request: str = "") -> Driver:
    """Of a session's running job, on behalf of acme."""
    driver = joins.join_driver(new_token("driver"), "job-7", CONTROL_TOKEN, DRIVER_FACTS, None, request)
    Driver.objects.filter(pk=driver.pk).update(lost_at=timezone.now())
    return driver


def takes_over(token: JoinToken, request: str = "") -> Driver:
    return joins.join_driver(token, "job-7", "n" * 32, DRIVER_FACTS, None, request)


@pytest.mark.parametrize("has", ["a job", "orgs"])
def test_a_lost_driver_with_a_job_or_orgs_is_taken_over_with_a_token_for_just_that(
    people: People, has: str
) -> None:
    """Whoever does is told the secrets of its orgs at once."""
    before = new_token("driver", name="job-7")
    driver = lost_driver()
    if has == "a job":
        session = Session.objects.create(
            name="chat", org=people.acme, boxes_desired=1, boxes_min=1, boxes_increment=1
        )
        Job.objects.create(session=session, name="serve", driver=driver, running=True)
    else:
        DriverOrg.objects.create(driver=driver, org=people.acme)
    general, other = new_token("driver"), new_token("driver", name="job-8")
    for token, said in (
        (general, "make a join token for the name job-7 now"),
        (before, "make a join token for the name job-7 now"),
        (other, "lets job-8 join"),
    ):
        with pytest.raises(Impossible, match=said):
            takes_over(token)
        assert JoinToken.objects.get(pk=token.pk).uses_left == token.uses_max
    assert Driver.objects.get().control_token == CONTROL_TOKEN
    assert takes_over(new_token("driver", name="job-7")).control_token == "n" * 32
    assert Driver.objects.get().lost_at is None


def test_a_lost_driver_that_was_told_nothing_is_taken_over_with_any_token(db: None) -> None:
    lost_driver()
    assert takes_over(new_token("driver")).control_token == "n" * 32


def test_a_lost_driver_comes_back_with_its_own_key_and_any_token(people: People, tmp_path: Path) -> None:
    """It has lost its token, say, and is who it was."""
    own = ProcessIdentity.load(tmp_path / "own", "driver:job-7").certificate_request()
    driver = lost_driver(own)
    DriverOrg.objects.create(driver=driver, org=people.acme)
    stranger = ProcessIdentity.load(tmp_path / "other", "driver:job-7").certificate_request()
    for request in (stranger, ""):
        with pytest.raises(Impossible, match="make a join token for the name"):
            takes_over(new_token("driver"), request)
    assert takes_over(new_token("driver"), own).lost_at is None


def test_a_node_that_is_lost_comes_back_as_what_it_was_told_to_be_meanwhile(
    world: World, people: People
) -> None:
    admin = people.principal("platform_admin")
    nodes.set_state(admin, world.here, State.CORDONED, reason="loud fan")
    Node.objects.filter(name="ax-1").update(
        state="lost", held_state="cordoned", held_reason="loud fan", state_reason="silent"
    )
    joins.beats("ax-1", OF_AX_1, FACTS)
    assert (refreshed(world.here).state, refreshed(world.here).state_reason) == ("cordoned", "loud fan")
    Node.objects.filter(name="ax-1").update(state="lost", held_state="cordoned")
    nodes.set_state(admin, refreshed(world.here), State.READY)
    assert refreshed(world.here).state == "lost"
    joins.beats("ax-1", OF_AX_1, FACTS)
    assert refreshed(world.here).state == "ready"
    assert Event.objects.filter(kind="node.back").count() == 2


def test_joining_binds_the_key_of_the_process_and_heartbeats_do_not(
    world: World, tmp_path: Path
) -> None:
    own = ProcessIdentity.load(tmp_path, "node:whoever")  # names in a request are not believed
    node = joins.join_node(new_token(), "ax-2", CONTROL_TOKEN, FACTS, PLUGGED, own.certificate_request())
    assert refreshed(node).public_key == own.public_key_pem
    assert joins.beats("ax-2", credential(CONTROL_TOKEN, "node:ax-2"), replace(FACTS, cpus=3))
    assert refreshed(node).public_key == own.public_key_pem
    driver = joins.join_driver(
        new_token("driver"), "job-8", CONTROL_TOKEN, DRIVER_FACTS, None, own.certificate_request()
    )
    assert driver.public_key == own.public_key_pem
    Node.objects.filter(name="ax-2").update(state="lost", held_state="ready")
    again = joins.join_node(new_token(), "ax-2", "n" * 32, FACTS, PLUGGED)  # by an older version
    assert again.public_key == ""
    token = new_token(uses=1)
    with pytest.raises(Impossible, match="certificate request"):
        joins.join_node(token, "ax-3", CONTROL_TOKEN, FACTS, PLUGGED, "nonsense")
    assert JoinToken.objects.get(pk=token.pk).uses_left == 1


def test_a_heartbeat_does_not_take_a_process_out_of_tls(world: World, tmp_path: Path) -> None:
    """Whoever has overheard what they are known by would be told its token, and secrets of orgs."""
    request = ProcessIdentity.load(tmp_path, "node:whoever").certificate_request()
    facts = replace(FACTS, control_url="https://10.0.0.8:8410")
    of_driver = replace(DRIVER_FACTS, control_url="https://10.0.0.9:8420")
    node = joins.join_node(new_token(), "ax-2", CONTROL_TOKEN, facts, PLUGGED, request)
    driver = joins.join_driver(new_token("driver"), "job-8", CONTROL_TOKEN, of_driver, None, request)
    of_ax_2, of_job_8 = (credential(CONTROL_TOKEN, name) for name in ("node:ax-2", "driver:job-8"))
    plain = "http://127.0.0.1:8410"
    assert not joins.beats("ax-2", of_ax_2, replace(facts, control_url=plain))
    assert not joins.beats("job-8", of_job_8, replace(of_driver, control_url=plain))
    assert refreshed(node).control_url == facts.control_url
    assert Driver.objects.get(pk=driver.pk).control_url == of_driver.control_url
    moved = replace(facts, control_url="https://10.0.0.11:8410")
    assert joins.beats("ax-2", of_ax_2, moved)
    Node.objects.filter(name="ax-2").update(state="lost", held_state="ready")
    assert not joins.beats("ax-2", of_ax_2, replace(facts, control_url=plain))
    again = replace(facts, control_url=plain)
    joins.join_node(new_token(), "ax-2", CONTROL_TOKEN, again, PLUGGED, request)
    assert joins.beats("ax-2", of_ax_2, again)
