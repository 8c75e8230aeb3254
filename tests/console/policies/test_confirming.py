"""What counts as a confirmation of a purge, and what does not."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone

from console.control import rounds
from console.control import services as control
from console.control.documents import Compiler
from console.control.models import Target
from console.fleet.membership import joins
from console.fleet.models import Driver, Node, RetiringStore, Stamp
from console.operations import services as operations
from console.operations.models import Operation
from console.orgs import services as orgs
from console.policies import callers, org_keys
from console.policies.evidence import confirmations, purges
from console.policies.models import PurgeConfirmation, PurgeReceipt
from console.policies.org_keys import keys_of
from console.sessions.changes import driver_removal
from kvss_agent.security.confirmations import PURPOSE, DriverStatement, ShardCover
from kvss_agent.security.identity import ProcessIdentity, verify
from swdriver_shim.keys import isolation_tag
from tests.conftest import People
from tests.console.control.drivers import DriverFleet, drivers, join
from tests.console.fleet.worlds import DRIVER_FACTS, new_token
from tests.console.policies.purges import TOKENS, finished, node_of
from tests.hostile.agent import Peer
from tests.hostile.answers import Answer, says_json
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.kvss_agent.stores import tier2
from tests.live import wait_until
from tests.swdriver_shim.daemons import ACME, CONTROL, EACH, C, Daemon, kv, org, stored_document, told

__all__ = ["drivers"]

pytestmark = pytest.mark.django_db


@pytest.fixture
def there(tmp_path: Path) -> Iterator[AgentProcess]:
    with agent(tmp_path / "agent", "--name", "ax-1") as running:
        yield running


def purge(people: People, **more: Any) -> Operation:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        return purges.purge(people.principal("org_admin"), org, reason="ended", **more)


def advanced(operation: Operation) -> Operation:
    """As far as it comes without waiting."""
    while operations.advance(operation.pk):
        pass
    operation.refresh_from_db()
    return operation


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (says_json({"done": True, "columns": 0, "bytes": 0, "confirmed": {}}), "not a confirmation"),
        (says_json({"columns": 0, "bytes": 0}), "not a confirmation"),
        (says_json({"detail": "Not Found"}, 404), "It answered 404"),
        (says_json({"detail": "There is no tier 2 here."}, 409), "It answered 409"),
        (says_json({"payload": "e30=", "signature": "e30="}), "not signed with its key"),
    ],
    ids=["done", "counts", "404", "409", "forged"],
)
def test_a_status_or_a_body_confirms_nothing(
    people: People, tmp_path: Path, answer: Answer, said: str
) -> None:
    """A plain web server, or an ingress while the agent is down."""
    own = ProcessIdentity.load(tmp_path, "driver:job7")
    with Peer(answer) as server:
        join("job7", server.url, public_key=own.public_key_pem)
        Target.objects.create(kind="driver", name="job7", generation=1)
        operation = advanced(purge(people))
        assert not operation.done
        assert said in operation.message
        assert not PurgeReceipt.objects.exists()


def test_who_has_no_identity_cannot_confirm_and_who_was_never_told_anything_is_not_asked(
    people: People, there: AgentProcess
) -> None:
    join("never-told", "http://127.0.0.1:1")
    there.tell(document(1))
    node_of(there)
    Node.objects.update(public_key="")
    operation = advanced(purge(people))
    assert operation.message == (
        "ax-1: It has no identity to sign with: it is of an earlier version, so update it."
    )


def test_a_driver_of_the_version_before_is_to_be_updated(people: People) -> None:
    """It has no such call, and says so: 404 is what it answers, and not what has to be done."""
    with Peer(says_json({"detail": "There is nothing here."}, 404)) as before:
        join("job7", before.url)
        Target.objects.create(kind="driver", name="job7", generation=1)
        assert "of an earlier version, so update it" in advanced(purge(people)).message


@pytest.mark.slow
def test_a_confirmation_of_before_is_none(people: People, there: AgentProcess, tmp_path: Path) -> None:
    there.tell(document(1))
    node = node_of(there)
    assert finished(purge(people)).state == "succeeded"
    [known] = PurgeConfirmation.objects.all()
    encoded = {
        name: base64.b64encode(bytes(raw)).decode()
        for name, raw in (("payload", known.payload), ("signature", known.signature))
    }
    with Peer(says_json(encoded)) as recorder:
        Node.objects.filter(pk=node.pk).update(control_url=recorder.url)
        operation = advanced(purge(people))
        assert "It is a statement on another purge" in operation.message


def test_a_confirmation_covers_every_store_that_the_node_has(
    people: People, there: AgentProcess, tmp_path: Path
) -> None:
    """Of an agent that has lost its state directory, say."""
    there.tell(document(1, tier2=tier2(tmp_path / "new")))
    node = node_of(there)
    Node.objects.update(
        declared={"tier2": {"kind": "posix", "path": str(tmp_path / "new"), "cap": "1G"}}
    )
    old = {"kind": "posix", "path": str(tmp_path / "old"), "cap": "1G"}
    RetiringStore.objects.create(
        node=node, place=f"posix:{tmp_path / 'old'}", said=old, since=node.state_since
    )
    operation = advanced(purge(people))
    assert operation.message == (
        f"ax-1: It does not speak of the store posix:{tmp_path / 'old'}, which it should have."
    )
    there.tell(document(2, tier2=tier2(tmp_path / "new"), retiring=[tier2(tmp_path / "old")]))
    assert finished(operation).state == "succeeded"


def test_a_driver_that_lost_its_state_covers_less_than_its_job_has() -> None:
    statement = DriverStatement(
        identity="driver:job7",
        operation="0" * 36,
        challenge="0" * 32,
        epoch=1,
        scopes=(),
        at=0.0,
        org="acme",
        shards=(ShardCover("full", 0, "unix:/x", "s"),),
        columns=0,
        bytes=0,
        files=0,
        file_bytes=0,
    )
    assert confirmations.lacking_of_driver({("full", 0)}, statement) == ""
    assert "shard full.1" in confirmations.lacking_of_driver({("full", 0), ("full", 1)}, statement)


@pytest.mark.slow
def test_what_a_driver_has_forgotten_is_removed_by_the_agent_that_keeps_it(
    people: People, there: AgentProcess, tmp_path: Path
) -> None:
    """The driver lost its state directory. Its columns are still in the memory of an agent."""
    there.tell(document(1, spec("s", 20, EACH * C)))
    node_of(there)
    secret = base64.b64encode(bytes(keys_of([people.acme])[people.acme.pk].secret)).decode()
    before = Daemon(tmp_path / "before", "--name", "job7")
    with contextlib.ExitStack() as stack:
        stack.callback(before.kill)
        document_of = told([there], orgs=[{**org("acme", ACME), "secret": secret}])
        before.control("desired", document_of).raise_for_status()
        wait_until("it is ready", before.is_ready)
        before.store(ACME, TOKENS, kv(len(TOKENS))).raise_for_status()
    assert there.http.get("/v1/shards/s").json()["occupied_slots"] == 2
    anew = Daemon(tmp_path / "anew", "--name", "job7")
    with contextlib.ExitStack() as stack:
        stack.callback(anew.kill)
        key = ProcessIdentity.load(tmp_path / "anew", "driver:job7").public_key_pem
        join("job7", str(anew.http.base_url), public_key=key)
        Target.objects.create(kind="driver", name="job7", generation=1)
        assert finished(purge(people)).state == "succeeded"
    assert there.http.get("/v1/shards/s").json()["occupied_slots"] == 0


@pytest.mark.slow
def test_the_data_key_is_destroyed_when_the_last_driver_has_dropped_it(
    drivers: DriverFleet, people: People, api_of: Callable[..., Client]
) -> None:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        token = callers.add_caller(people.principal("org_admin"), org, name="engine")[1]
    rounds.push([control.ALL_DRIVERS])
    for daemon in drivers.daemons.values():
        wait_until("it is ready", daemon.is_ready)
        daemon.store(token, TOKENS, kv(len(TOKENS)))
    keys = keys_of([people.acme])[people.acme.pk]
    key, tag = bytes(keys.data_key), isolation_tag("acme", bytes(keys.secret)).hex()
    drivers.kill("two")
    operation = advanced(purge(people))
    assert not operation.done
    assert "data_key_destroyed_at" not in operation.notes
    assert operation.notes["drivers"]["one"]["done"]
    drivers.start("two")
    assert finished(operation).state == "succeeded", operation.error
    receipt = PurgeReceipt.objects.get()
    last = max(one["confirmed_at"] for one in operation.notes["drivers"].values())
    assert receipt.data_key_destroyed_at is not None
    assert receipt.data_key_destroyed_at.isoformat() >= last
    assert (receipt.epoch, receipt.columns) == (2, 2), "the killed one's memory was empty again"
    kept = [stored_document(drivers.directory / name) for name in ("one", "two")]
    assert not any(key in (org.secret, org.data_key) for told in kept for org in told.orgs)

    told = {one.identity: one for one in PurgeConfirmation.objects.all()}
    assert set(told) == {"driver:one", "driver:two"}
    for one in told.values():
        assert verify(one.public_key, PURPOSE + bytes(one.payload), bytes(one.signature))
        assert json.loads(bytes(one.payload))["scopes"] == [{"tag": tag, "namespace": None}]
    [shown] = api_of(people.org_admin).get("/api/v1/orgs/acme/purges").json()["items"]
    assert (shown["epoch"], shown["confirmations"]) == (2, None)
    keys.refresh_from_db()
    assert (keys.epoch, keys.retired) == (2, [])
    assert tag not in org_keys.tags_of(people.acme, keys)
    rounds.push([control.ALL_DRIVERS])
    for daemon in drivers.daemons.values():
        wait_until("it is told anew", lambda daemon=daemon: daemon.load(token, TOKENS)[0] == 0)  # type: ignore[misc]
        assert daemon.store(token, TOKENS, kv(len(TOKENS))).json()["columns"] == 2


@pytest.mark.slow
def test_a_driver_whose_name_another_machine_took_is_not_forgotten(
    drivers: DriverFleet, people: People
) -> None:
    """Its disk has the data key. Whoever has its name now confirms for itself only."""
    rounds.push([control.ALL_DRIVERS])
    key = bytes(keys_of([people.acme])[people.acme.pk].data_key)
    drivers.kill("two")
    driver = Driver.objects.get(name="two")
    Driver.objects.filter(pk=driver.pk).update(lost_at=timezone.now())
    stolen = stored_document(drivers.directory / "two")
    anew = Daemon(drivers.directory / "anew", "--name", "two")
    with contextlib.ExitStack() as stack:
        stack.callback(anew.kill)
        own = ProcessIdentity.load(drivers.directory / "anew", "driver:two")
        facts = replace(DRIVER_FACTS, control_url=str(anew.http.base_url))
        token = new_token("driver", name="two")
        joins.join_driver(token, "two", CONTROL, facts, None, own.certificate_request())
        rounds.push([control.ALL_DRIVERS])
        operation = finished(purge(people))
    assert operation.state == "succeeded", operation.error
    assert operation.notes["drivers"]["two"]["done"]
    assert key in [one.data_key for one in stolen.orgs]
    receipt = PurgeReceipt.objects.get()
    assert receipt.data_key_destroyed_at is None
    [told] = receipt.places["removed"]
    assert (told["kind"], told["replaced"]) == ("driver", True)


@pytest.mark.slow
def test_a_driver_that_has_confirmed_and_is_removed_then_has_no_key(
    drivers: DriverFleet, people: People
) -> None:
    rounds.push([control.ALL_DRIVERS])
    drivers.kill("two")
    operation = advanced(purge(people))
    wait_until("one has confirmed", lambda: advanced(operation).notes["drivers"]["one"]["done"])
    driver_removal.remove(people.principal("platform_admin"), "one")
    drivers.start("two")
    assert finished(operation).state == "succeeded", operation.error
    receipt = PurgeReceipt.objects.get()
    assert receipt.data_key_destroyed_at is not None
    assert "removed" not in receipt.places


def test_agents_with_an_identity_are_told_which_tags_are_somebodys(people: People) -> None:
    def tags(name: str) -> list[str] | None:
        told = json.loads(Compiler("node").compile(name, {}).content)
        return told["orgs"]["tags"] if "orgs" in told else None

    stamp = Stamp.objects.create(name="a")
    Node.objects.create(name="new", stamp=stamp, public_key="a key")
    Node.objects.create(name="old", stamp=stamp)
    before = tags("new")
    keys = keys_of([people.acme])[people.acme.pk]
    mine = isolation_tag("acme", bytes(keys.secret)).hex()
    assert before is not None
    assert mine in before
    assert tags("old") is None, "it would refuse the document"
    org_keys.begin(people.acme, "x", model="llama", namespaces=["0" * 32])
    after = tags("new")
    assert after is not None
    assert set(after) > set(before), "other models have their tag, this one has a new one"
    org_keys.begin(people.acme, "x")
    last = tags("new")
    assert last is not None
    assert not set(last) & set(org_keys.tags_of(people.acme, keys))
    keys.refresh_from_db()
    assert [scope.tag for scope in org_keys.retired(keys)][:2] == [mine, mine]
    assert keys.epoch == 3
