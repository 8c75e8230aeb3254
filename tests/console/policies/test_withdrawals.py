"""An org that is taken off a driver: what real drivers and agents remove, confirm and go on without."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import transaction
from django.test import Client

from console.accounts.roles import Role
from console.control import rounds
from console.control import services as control
from console.fleet.models import Driver, Removed
from console.fleet.services import for_change, visible_drivers
from console.operations import services as operations
from console.operations.models import Operation
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies import callers
from console.policies.evidence import confirmations, purges
from console.policies.models import PurgeReceipt
from console.policies.org_keys import keys_of
from console.sessions import driver_orgs
from console.sessions.models import DriverOrg
from tests.conftest import People
from tests.console.control.drivers import DriverFleet, drivers
from tests.console.policies.purges import TOKENS, finished
from tests.live import wait_until
from tests.swdriver_shim.daemons import C, kv, stored_bytes

__all__ = ["drivers"]

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def serve(people: People, name: str, *served: Org) -> list[Operation]:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        driver = for_change(admin, visible_drivers, name, Role.PLATFORM_ADMIN)
        return driver_orgs.set_orgs(admin, driver, served, reason="asked for").operations


def caller(people: People, org: str) -> str:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        return callers.add_caller(admin, orgs.for_change(admin, org), name="engine")[1]


def advanced(operation: Operation) -> Operation:
    while operations.advance(operation.pk):
        pass
    operation.refresh_from_db()
    return operation


def knows_keys(directory: Path, org: Org) -> bool:
    """Whether a driver's state directory has a key of the org."""
    keys, files = keys_of([org])[org.pk], b"".join(stored_bytes(directory))
    secrets = [bytes(keys.secret), bytes(keys.data_key)]
    return any(one in files or base64.b64encode(one) in files for one in secrets)


def test_an_org_that_is_taken_off_a_driver_is_removed_there_with_a_receipt(
    drivers: DriverFleet, people: People, api_of: Callable[..., Client]
) -> None:
    token = caller(people, "acme")
    rounds.push([control.ALL_DRIVERS])
    for daemon in drivers.daemons.values():
        wait_until("it is ready", daemon.is_ready)
        daemon.store(token, TOKENS, kv(len(TOKENS)))
    assert knows_keys(drivers.directory / "one", people.acme)
    [operation] = serve(people, "one", people.globex)
    early = advanced(operation)
    assert not early.done, "it still has the document that names the org"
    assert "has not applied the document" in early.message
    rounds.push([control.ALL_DRIVERS])
    assert finished(operation).state == "succeeded", operation.error

    one, two = drivers.daemons["one"], drivers.daemons["two"]
    assert not knows_keys(drivers.directory / "one", people.acme)
    assert one.ask(token, "query", tokens=TOKENS).status_code == 401
    assert two.load(token, TOKENS)[0] == 2 * C, "the other one goes on"
    receipt = PurgeReceipt.objects.get()
    assert (receipt.org_slug, receipt.columns, receipt.epoch) == ("acme", 2, 1)
    assert receipt.data_key_destroyed_at is None
    assert not DriverOrg.objects.filter(is_leaving=True).exists()
    [shown] = api_of(people.org_admin).get("/api/v1/orgs/acme/purges").json()["items"]
    assert (shown["driver"], shown["confirmations"]) == (driver_orgs.NOT_OWN, None)
    [signed] = api_of(people.platform_admin).get("/api/v1/orgs/acme/purges").json()["items"]
    statement = signed["confirmations"]["driver:one"]["statement"]
    assert (statement["withdrawn"], statement["columns"]) == (True, 2)
    seen = api_of(people.viewer).get(f"/api/v1/operations/{operation.pk}").content
    assert b'"one"' not in seen

    # It comes back with the keys that it had, and leaves again.
    assert serve(people, "one", people.acme, people.globex) == []
    rounds.push([control.ALL_DRIVERS])
    assert one.load(token, TOKENS)[0] == 0
    one.store(token, TOKENS, kv(len(TOKENS))).raise_for_status()
    [second] = serve(people, "one", people.globex)
    rounds.push([control.ALL_DRIVERS])
    assert finished(second).state == "succeeded", second.error
    assert PurgeReceipt.objects.get(operation_id=second.pk).columns == 2


def test_a_purge_asks_who_was_ever_told_and_nobody_else(drivers: DriverFleet, people: People) -> None:
    serve(people, "two", people.globex)
    rounds.push([control.ALL_DRIVERS])
    drivers.kill("one")
    [leaving] = serve(people, "one", people.globex)  # it can't be told, and so confirms nothing
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        purge = purges.purge(people.principal("org_admin"), org, reason="ended")
    advanced(purge)
    assert not purge.done
    assert set(purge.notes["drivers"]) == {"one"}
    drivers.start("one")
    rounds.push([control.ALL_DRIVERS])
    assert finished(purge).state == "succeeded", purge.error
    assert finished(leaving).state == "succeeded", leaving.error


def test_a_driver_that_is_removed_before_it_confirms_is_named_by_the_receipt(
    drivers: DriverFleet, people: People
) -> None:
    rounds.push([control.ALL_DRIVERS])
    drivers.kill("one")
    [operation] = serve(people, "one", people.globex)
    assert "does not answer" in advanced(operation).message
    driver = Driver.objects.get(name="one")
    assert operations.waiting_for("driver:one") == [operation]
    Removed.of(driver).save()
    driver.delete()
    assert finished(operation).state == "succeeded", operation.error
    [removed] = PurgeReceipt.objects.get().places["removed"]
    assert (removed["kind"], removed["name"]) == ("driver", "")


def test_an_org_that_comes_back_meanwhile_is_not_removed(drivers: DriverFleet, people: People) -> None:
    rounds.push([control.ALL_DRIVERS])
    drivers.kill("one")
    [operation] = serve(people, "one", people.globex)
    assert not advanced(operation).done
    serve(people, "one", people.acme, people.globex)
    assert finished(operation).state == "succeeded"
    assert not PurgeReceipt.objects.exists()
    assert confirmations.NOT_OWN not in str(operation.response)
