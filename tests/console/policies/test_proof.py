"""The proof: what is told of expiry, purges with receipts of real drivers, signatures that hold."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from django.db import DatabaseError, connection, transaction
from django.test import Client

from console.audit.models import AuditEntry
from console.control import services as control
from console.operations import services as operations
from console.operations.models import Operation
from console.orgs import services as orgs
from console.policies import callers, history, proof, services
from console.policies.models import PolicyVersion, PurgeReceipt
from swdriver_shim.policy import OrgPolicies, Policy
from telemetry.folding import Row, bucket_of
from telemetry.metrics import Kind
from telemetry.rollup import RollUp
from telemetry.shapes import Series, Shape
from telemetry.storage import FRESH, Names, copy_in, day_of
from tests.conftest import People
from tests.console.control.drivers import DriverFleet, drivers
from tests.live import wait_until
from tests.swdriver_shim.test_service import C, kv

__all__ = ["drivers"]

pytestmark = pytest.mark.django_db
TOKENS = list(range(2 * C))


def tell(at: float, hit: int = 40) -> None:
    """What drivers told of acme at that time."""
    RollUp().tend_days(at)
    expired = Series(Kind.COUNTER, "swdriver_expired_columns_total", (("tier", "dram"),))
    overstay = Series(Kind.GAUGE, "swdriver_org_overstay_seconds_max")
    hits = Series(Kind.COUNTER, "swdriver_hit_tokens_total", (("tier", "dram"),))
    asked = Series(Kind.COUNTER, "swdriver_requested_tokens_total")
    shape = Shape([expired, overstay, hits, asked])
    cells = shape.cells({expired: 12, overstay: (0.7, 1, 0.7), hits: hit, asked: 100})
    rows = [Row("org:acme", bucket_of(at), shape, cells)]
    copy_in(FRESH, Names().stored(rows, day_of(at)))


def save(people: People, **policy: Any) -> None:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        wanted = OrgPolicies(policy=Policy(**policy))
        services.set_policy(people.principal("org_admin"), org, wanted, reason="=GDPR")


def test_a_report_says_what_expired_how_late_and_what_is_not_told(
    people: People, api_of: Callable[..., Client]
) -> None:
    nothing = proof.report(people.acme, 7)
    assert not nothing.is_told_of
    assert nothing.expired == {"dram": None, "tier2": None}
    tell(time.time() - 60)
    save(people, ttl_last_use_seconds=600)
    told = proof.report(people.acme, 7)
    assert told.expired == {"dram": 12, "tier2": None}
    assert told.overstay_seconds_max == pytest.approx(0.7)
    assert [version.number for version in told.versions] == [1]
    rows = list(csv.DictReader(io.StringIO(proof.as_csv(told))))
    assert [(row["fact"], row["value"], row["detail"]) for row in rows] == [
        ("overstay_max", "0.7", ""),
        ("expired", "12", "dram"),
        ("expired", "not told", "tier2"),
        ("policy", "1", "'=GDPR"),
    ]


def test_a_report_is_signed_with_a_key_that_anyone_can_ask_for(
    people: People, api_of: Callable[..., Client]
) -> None:
    answer = api_of(people.on_call).get("/api/v1/orgs/acme/retention?days=7").json()
    keys = jwt.PyJWKSet.from_dict(Client().get("/api/v1/signing-keys").json())
    key = keys[jwt.get_unverified_header(answer["jws"])["kid"]]
    assert jwt.decode(answer["jws"], key, algorithms=["EdDSA"]) == answer["report"]
    head, body, signature = answer["jws"].split(".")
    with pytest.raises(jwt.InvalidSignatureError):
        jwt.decode(f"{head}.{body[:-2]}AA.{signature}", key, algorithms=["EdDSA"])


def finished(operation: Operation) -> Operation:
    def is_done() -> bool:
        operations.advance(operation.pk)
        operation.refresh_from_db()
        return operation.done

    wait_until("the purge is done", is_done)
    return operation


@pytest.mark.slow
def test_a_purge_leaves_nothing_and_ends_with_a_receipt_from_every_driver(
    drivers: DriverFleet, people: People, api_of: Callable[..., Client]
) -> None:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        token = callers.add_caller(people.principal("org_admin"), org, name="engine")[1]
    control.push([control.ALL_DRIVERS])
    for daemon in drivers.daemons.values():
        wait_until("it is ready", daemon.is_ready)
        daemon.store(token, TOKENS, kv(len(TOKENS)))
    olga = api_of(people.org_admin)
    headers = {"Idempotency-Key": "purge"}
    body = {"reason": "the contract has ended"}
    begun = olga.post("/api/v1/orgs/acme/purge", body, content_type="application/json", headers=headers)
    assert begun.status_code == 202, begun.content
    again = olga.post(
        "/api/v1/orgs/acme/purge",
        body,
        content_type="application/json",
        headers={"Idempotency-Key": "2"},
    )
    assert again.status_code == 409

    operation = finished(Operation.objects.get(pk=begun.json()["id"]))
    assert operation.state == "succeeded", operation.error
    assert (operation.response or {})["columns"] == 4
    assert all(daemon.load(token, TOKENS) == (0, b"") for daemon in drivers.daemons.values())
    [receipt] = olga.get("/api/v1/orgs/acme/purges").json()["items"]
    assert (receipt["columns"], receipt["reason"]) == (4, "the contract has ended")
    assert sorted(receipt["places"]["drivers"]) == ["one", "two"]
    keys = jwt.PyJWKSet.from_dict(olga.get("/api/v1/signing-keys").json())
    key = keys[jwt.get_unverified_header(receipt["jws"])["kid"]]
    assert jwt.decode(receipt["jws"], key, algorithms=["EdDSA"])["columns"] == 4
    assert AuditEntry.objects.filter(action="org.purge").count() == 1


@pytest.mark.slow
def test_a_purge_waits_for_a_driver_that_is_away(drivers: DriverFleet, people: People) -> None:
    from console.policies import purges

    control.push([control.ALL_DRIVERS])
    drivers.kill("two")
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        operation = purges.purge(people.principal("org_admin"), org, reason="ended")
    operations.advance(operation.pk)
    operation.refresh_from_db()
    assert not operation.done
    assert operation.message.startswith("two: ")
    drivers.start("two")
    assert finished(operation).state == "succeeded"


def test_only_models_that_somebody_serves_are_purged(
    people: People, api_of: Callable[..., Client]
) -> None:
    body = {"reason": "x", "model": "nobody's"}
    answer = api_of(people.org_admin).post(
        "/api/v1/orgs/acme/purge",
        body,
        content_type="application/json",
        headers={"Idempotency-Key": "k"},
    )
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/body/model"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("statement", ["UPDATE %s SET columns = 0", "DELETE FROM %s"])
def test_the_database_refuses_to_change_a_receipt(statement: str, db: None) -> None:
    from uuid import uuid4

    from django.utils import timezone

    PurgeReceipt.objects.create(
        org_slug="acme",
        operation_id=uuid4(),
        asked_by="olga",
        reason="x",
        asked_at=timezone.now(),
        columns=1,
        bytes=1,
        files=0,
        file_bytes=0,
    )
    with pytest.raises(DatabaseError, match="never changed"):
        connection.cursor().execute(statement % "policies_purgereceipt")


def test_a_version_shows_hit_rates_before_and_after_it(people: People) -> None:
    tell(time.time() - 600, hit=40)
    save(people, ttl_last_use_seconds=600)
    version = PolicyVersion.objects.get()
    effect = history.effect(people.acme, version.made_at, version.made_at)
    assert effect.before == pytest.approx(0.4)
    assert (effect.after, effect.points) == (None, None)
