"""The proof: what is told of expiry, purges with receipts of real drivers, signatures that hold."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import jwt
import msgspec
import pytest
from django.db import DatabaseError, connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.accounts.models import User
from console.audit.models import AuditEntry
from console.control import rounds
from console.control import services as control
from console.fleet.models import Driver, Removed
from console.operations import services as operations
from console.operations.models import Operation
from console.orgs import services as orgs
from console.policies import callers, history, services
from console.policies.evidence import confirmations, purges, reports, standings
from console.policies.models import PolicyVersion, PurgeConfirmation, PurgeReceipt
from console.policies.org_keys import keys_of
from swdriver_shim.desired import ModelSpec
from swdriver_shim.keys import isolation_tag
from swdriver_shim.policy import OrgPolicies, Policy
from telemetry.ingest.folder import Row, bucket_of
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from tests.conftest import People
from tests.console.control.drivers import MODEL, DriverFleet, drivers
from tests.console.policies.purges import TOKENS, finished, node_of
from tests.kvss_agent.process import agent, document, spec
from tests.kvss_agent.stores import tier2
from tests.live import wait_until
from tests.swdriver_shim.daemons import ACME, EACH, C, Daemon, kv, org, told

__all__ = ["drivers"]

pytestmark = pytest.mark.django_db


def tell(at: float, hit: int = 40) -> None:
    """What drivers told of acme at that time."""
    RollUp().tend_days(at)
    expired = Series(Kind.COUNTER, "swdriver_expired_columns_total", (("tier", "dram"),))
    overstay = Series(Kind.GAUGE, "swdriver_org_overstay_seconds_max")
    hits = Series(Kind.COUNTER, "swdriver_hit_tokens_total", (("tier", "dram"),))
    asked = Series(Kind.COUNTER, "swdriver_requested_tokens_total")
    shape = Shape([expired, overstay, hits, asked])
    cells = shape.cells({expired: 12, overstay: (0.7, 1, 0.7), hits: hit, asked: 100})
    files = Shape([Series(Kind.GAUGE, "kvss_tier2_overstay_seconds_max")])  # of agents
    rows = [
        Row("org:acme", bucket_of(at), shape, cells),
        Row("fleet", bucket_of(at), files, files.cells({files.series[0]: (2.5, 1, 2.5)})),
    ]
    copy_in(FRESH, Names().stored(rows, day_of(at)))


def save(people: People, **policy: Any) -> None:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        wanted = OrgPolicies(policy=Policy(**policy))
        services.set_policy(people.principal("org_admin"), org, wanted, reason="=GDPR")


def test_a_report_says_what_expired_how_late_and_what_is_not_told(
    people: People, api_of: Callable[..., Client]
) -> None:
    nothing = reports.report(people.acme, 7)
    assert not nothing.is_told_of
    assert nothing.expired == {"dram": None, "tier2": None}
    tell(time.time() - 60)
    save(people, ttl_last_use_seconds=600)
    told = reports.report(people.acme, 7)
    assert told.expired == {"dram": 12, "tier2": None}
    assert told.overstay == {"dram": pytest.approx(0.7), "tier2": pytest.approx(2.5)}
    assert [version.number for version in told.versions] == [1]
    rows = list(csv.DictReader(io.StringIO(reports.as_csv(told))))
    assert [(row["fact"], row["value"], row["detail"].partition(":")[0]) for row in rows] == [
        ("overstay_max", "0.7", "dram"),
        ("overstay_max", "2.5", "tier2"),
        ("expired", "12", "dram"),
        ("expired", "not told", "tier2"),
        ("policy", "1", "'=GDPR"),
    ]


def test_a_report_says_what_each_model_was_held_to(
    people: People, browser_of: Callable[..., Client]
) -> None:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        wanted = OrgPolicies(models={"llama": Policy(ttl_last_use_seconds=30)})
        services.set_policy(people.principal("org_admin"), org, wanted, reason="it is secret")
    page = browser_of(people.on_call).get("/orgs/acme/retention/").content.decode()
    assert "for 1 h after their last use" in page
    assert "<strong>llama:</strong>" in page
    assert "for 30 s after their last use" in page


def test_a_refused_purge_keeps_what_was_typed(people: People, browser_of: Callable[..., Client]) -> None:
    wrong = {"model": "llama", "reason": "somebody asked for it", "typed": "acmee"}
    page = browser_of(people.org_admin).post("/orgs/acme/purge/", wrong).content.decode()
    assert "Nothing is purged: type “acme” to confirm." in page
    assert page.count('value="somebody asked for it"') == page.count('value="llama"') == 1
    assert not Operation.objects.exists()


def test_a_report_names_the_version_that_was_in_force_when_its_time_began(people: People) -> None:
    for number, days in ((1, 30), (2, 20), (3, 1)):
        PolicyVersion.objects.create(
            org=people.acme,
            number=number,
            document="null",
            author_name="olga",
            reason="asked for",
            made_at=timezone.now() - timedelta(days=days),
        )
    assert [version.number for version in reports.report(people.acme, 7).versions] == [3, 2]


def add_receipt(asked_by: str, reason: str, asked_at: datetime) -> None:
    PurgeReceipt.objects.create(
        org_slug="acme",
        operation_id=uuid4(),
        asked_by=asked_by,
        reason=reason,
        asked_at=asked_at,
        columns=1,
        bytes=1,
        files=0,
        file_bytes=0,
    )


def test_a_report_says_what_it_leaves_out_and_which_defaults_were_followed(
    people: People, browser_of: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = timezone.now()
    for whose, number, days in (
        (None, 1, 30),
        (None, 2, 20),
        (None, 3, 2),
        *((people.acme, n, 1) for n in (1, 2)),
    ):
        PolicyVersion.objects.create(
            org=whose,
            number=number,
            document="null",
            author_name="olga",
            reason="asked for",
            made_at=now - timedelta(days=days),
        )
    for _ in range(3):
        add_receipt("olga", "asked for", now)
    whole = reports.report(people.acme, 7)
    assert [version.number for version in whole.defaults] == [3, 2]
    assert (whole.versions_left_out, whole.receipts_left_out) == (0, 0)
    monkeypatch.setattr(reports, "ROWS_MAX", 1)
    told = reports.report(people.acme, 7).statement()
    assert [one["version"] for one in told["policies"]] == [2]
    left_out = [told[f"{what}_left_out"] for what in ("policies", "default_policies", "purges")]
    assert left_out == [1, 1, 2]
    facts = {
        row["fact"]: row["value"]
        for row in csv.DictReader(io.StringIO(reports.as_csv(reports.report(people.acme, 7))))
    }
    assert facts["default_policy"] == "3"
    counts = [facts[f"{what}_left_out"] for what in ("policy", "default_policy", "purge")]
    assert counts == ["1", "1", "2"]
    page = browser_of(people.on_call).get("/orgs/acme/retention/").content.decode()
    assert "2 older ones of this period are in the API only." in page
    assert "version 3 from" in page


def test_receipts_of_an_org_that_had_the_slug_before_are_nobody_elses(
    people: People, api_of: Callable[..., Client]
) -> None:
    before = people.acme.created_at - timedelta(days=1)
    add_receipt("somebody of theirs", "a secret of theirs", before)
    assert reports.report(people.acme, 7).receipts == []
    assert api_of(people.org_admin).get("/api/v1/orgs/acme/purges").json()["items"] == []


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


@pytest.mark.slow
def test_a_purge_leaves_nothing_and_ends_with_a_receipt_from_every_driver(
    drivers: DriverFleet, people: People, api_of: Callable[..., Client]
) -> None:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        token = callers.add_caller(people.principal("org_admin"), org, name="engine")[1]
    rounds.push([control.ALL_DRIVERS])
    for daemon in drivers.daemons.values():
        wait_until("it is ready", daemon.is_ready)
        daemon.store(token, TOKENS, kv(len(TOKENS)))
    olga = api_of(people.org_admin)
    headers = {"Idempotency-Key": "purge"}
    body = {"reason": "the contract has ended"}
    key_before = bytes(keys_of([people.acme])[people.acme.pk].data_key)
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
    rounds.push([control.ALL_DRIVERS])
    assert all(daemon.load(token, TOKENS) == (0, b"") for daemon in drivers.daemons.values())
    [receipt] = olga.get("/api/v1/orgs/acme/purges").json()["items"]
    assert (receipt["columns"], receipt["reason"]) == (4, "the contract has ended")
    # Of no session of acme's, so it is not told their names.
    told_by = receipt["places"]["drivers"]
    assert [(name, one["drivers"]) for name, one in told_by.items()] == [(confirmations.NOT_OWN, 2)]
    assert receipt["data_key_destroyed_at"]
    assert bytes(keys_of([people.acme])[people.acme.pk].data_key) != key_before
    keys = jwt.PyJWKSet.from_dict(olga.get("/api/v1/signing-keys").json())
    key = keys[jwt.get_unverified_header(receipt["jws"])["kid"]]
    assert jwt.decode(receipt["jws"], key, algorithms=["EdDSA"])["columns"] == 4
    assert AuditEntry.objects.filter(action="org.purge").count() == 1


@pytest.mark.slow
def test_a_purge_waits_for_a_driver_that_is_away(drivers: DriverFleet, people: People) -> None:
    rounds.push([control.ALL_DRIVERS])
    drivers.kill("two")
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        operation = purges.purge(people.principal("org_admin"), org, reason="ended")

    def waits_for_it() -> bool:
        operations.advance(operation.pk)
        operation.refresh_from_db()
        return operation.message.startswith(f"{confirmations.NOT_OWN}: It does not answer")

    wait_until("it is waited for", waits_for_it)
    assert not operation.done
    drivers.start("two")
    assert finished(operation).state == "succeeded"


@pytest.mark.slow
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_purge_of_one_model_leaves_nothing_of_it_with_any_adapter_and_files_of_the_others(
    tmp_path: Path, people: People, *, is_removed: bool
) -> None:
    """Where no driver is left that knows them: the files of this model go from every agent."""
    admin, acme = people.principal("org_admin"), people.acme
    secret = bytes(keys_of([acme])[acme.pk].secret)
    files = tmp_path / "files"
    for name in ("llama", "other"):
        Driver.objects.create(name=f"of-{name}", model={**MODEL, "name": name})
    llama, other = (namespace_of(driver) for driver in Driver.objects.order_by("name"))
    if is_removed:
        gone = Driver.objects.get(name="of-llama")
        Removed.of(gone).save()
        gone.delete()
    left = files / other / isolation_tag("acme", secret).hex() / "00" / f"{'00' * 16}.full.0"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(4096))
    with agent(tmp_path / "agent", "--name", "ax-1") as there:
        there.tell(
            document(1, spec("s", 20, EACH * C, part="full.0", namespace=llama), tier2=tier2(files))
        )
        kept = {**org("acme", ACME, tiers="dram+tier2"), "secret": base64.b64encode(secret).decode()}
        with contextlib.ExitStack() as stack:
            driver = Daemon(tmp_path / "driver")
            stack.callback(driver.kill)
            driver.control("desired", told([there], orgs=[kept])).raise_for_status()
            wait_until("it is ready", driver.is_ready)
            for adapter in ("", "lora"):
                driver.store(ACME, TOKENS, kv(len(TOKENS)), adapter=adapter)
                driver.ask(ACME, "load", tokens=TOKENS, adapter=adapter).raise_for_status()
            wait_until("tier 2 has all", lambda: len(list((files / llama).rglob("*.full.0"))) == 4)

        node_of(there)
        with transaction.atomic():
            held = orgs.for_change(admin, "acme")
            operation = purges.purge(admin, held, model="llama", reason="an experiment is over")
        assert finished(operation).state == "succeeded", operation.error
    assert [path for path in files.rglob("*") if path.is_file()] == [left]
    receipt = PurgeReceipt.objects.get()
    assert (receipt.files, receipt.data_key_destroyed_at) == (4, None)


def namespace_of(driver: Driver) -> str:
    spec: ModelSpec = msgspec.convert(driver.model, ModelSpec)
    return spec.namespace().digest().hex()


@pytest.mark.slow
def test_a_purge_waits_for_an_agent_whose_tier_2_cannot_be_opened(
    tmp_path: Path, people: People
) -> None:
    """It can't tell what lies there: that it has no tier 2 would be a lie on a receipt."""
    (tmp_path / "files").write_text("no directory")
    admin = people.principal("org_admin")
    with agent(tmp_path / "agent", "--name", "ax-1") as there:
        there.tell(document(1, tier2=tier2(tmp_path / "files")))
        node_of(there)
        with transaction.atomic():
            operation = purges.purge(admin, orgs.for_change(admin, "acme"), reason="ended")

        def waits_for_it() -> bool:
            operations.advance(operation.pk)
            operation.refresh_from_db()
            return operation.message.startswith("ax-1: ")

        wait_until("it is waited for", waits_for_it)
        assert "Tier 2 is not open" in operation.message
        assert not operation.done
        there.tell(document(2))
        assert finished(operation).state == "succeeded", operation.error


def test_only_models_that_somebody_serves_are_purged(
    people: People, api_of: Callable[..., Client]
) -> None:
    """Which those are is not an org's to know: its own people are told by the receipt only."""

    def begin(person: User) -> Any:
        return api_of(person).post(
            "/api/v1/orgs/acme/purge",
            {"reason": "x", "model": "nobody's"},
            content_type="application/json",
            headers={"Idempotency-Key": "k"},
        )

    refused = begin(people.platform_admin)
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == "/body/model"
    begun = begin(people.org_admin)
    assert begun.status_code == 202
    assert finished(Operation.objects.get(pk=begun.json()["id"])).state == "succeeded"
    receipt = PurgeReceipt.objects.get()
    assert (receipt.columns, receipt.files, receipt.epoch) == (0, 0, None), "nothing was begun"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("statement", ["UPDATE %s SET columns = 0", "DELETE FROM %s"])
def test_the_database_refuses_to_change_a_receipt(statement: str, db: None) -> None:
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


def test_who_may_not_know_names_is_told_how_many_have_confirmed() -> None:
    at = "2026-11-22T18:29:24+00:00"
    done = {"done": True, "confirmed_at": at, "columns": 1, "tier2_files": 2}
    places: dict[str, Any] = {
        "drivers": {"job7": done, confirmations.NOT_OWN: {"done": True, "drivers": 2, "columns": 3}},
        "nodes": {"ax-1": done, "ax-2": done, "ax-3": {"done": False, "problem": "It does not answer."}},
    }
    seen = [
        (one.name, one.done, one.problem)
        for one in standings.standings_of(places, {"job7"}, is_staff=False)
    ]
    assert seen == [
        ("a node of the fleet", False, ""),
        ("2 drivers of other sessions", True, ""),
        ("2 nodes of the fleet", True, ""),
        ("driver job7", True, ""),
    ]
    [_, _, nodes, _] = standings.standings_of(places, {"job7"}, is_staff=False)
    assert (nodes.counts["columns"], nodes.counts["tier2_files"]) == (2, 4)
    staff = [(one.name, one.problem) for one in standings.standings_of(places, set(), is_staff=True)]
    assert staff[0] == ("node ax-3", "It does not answer.")
    assert len(staff) == 5


def test_the_number_of_queries_does_not_grow_with_receipts(
    people: People, api_of: Callable[..., Client]
) -> None:
    client = api_of(people.platform_on_call)
    client.get("/api/v1/orgs/acme/purges")  # makes the key that signs
    counts = []
    for receipts in (1, 10):
        while PurgeReceipt.objects.count() < receipts:
            made = PurgeReceipt.objects.create(
                org_slug="acme",
                operation_id=uuid4(),
                asked_by="ada",
                asked_at=timezone.now(),
                reason="ended",
                columns=0,
                bytes=0,
                files=0,
                file_bytes=0,
            )
            PurgeConfirmation.objects.create(
                operation_id=made.operation_id,
                identity=f"driver:job{receipts}",
                payload=msgspec.json.encode({"of": str(made.operation_id)}),
                signature=b"s",
            )
        with CaptureQueriesContext(connection) as asked:
            found = client.get("/api/v1/orgs/acme/purges").json()["items"]
        counts.append(len(asked))
        assert len(found) == receipts
        for one in found:
            [signed] = one["confirmations"].values()
            assert signed["statement"] == {"of": one["operation"]}
    assert counts[0] == counts[1]
