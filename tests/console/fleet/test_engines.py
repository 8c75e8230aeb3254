"""Engines in the fleet: what they report, and what signs the claims of their requests."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.test import Client, override_settings

from console.audit.models import AuditEntry
from console.control import rounds
from console.control import services as control
from console.control.models import Change, Target
from console.fleet.membership import joins
from console.fleet.models import Driver
from console.orgs.models import Org
from kvss_agent.process.membership import credential
from swdriver_shim.adapters.claims import Claim, ClaimVerifier
from swdriver_shim.policy import Rules, Tier2Rule
from tests.conftest import People
from tests.console.fleet.worlds import CONTROL_TOKEN, DRIVER_FACTS, new_token

SHOWN = credential(CONTROL_TOKEN, "driver:vllm-7")
RULES = {"store_tokens_max": 64, "tier2": "never"}


def model(layout: str = "vllm.1:a") -> dict[str, Any]:
    return {"name": "llama", "layout": layout, "groups": [{"name": "full", "bytes_per_token": [64]}]}


ENGINE = replace(DRIVER_FACTS, engine="vllm 0.32.0", model=model())


@pytest.fixture
def engine(db: None) -> Driver:
    return joins.join_driver(new_token("driver"), "vllm-7", CONTROL_TOKEN, ENGINE, model())


def test_an_engine_reports_its_model_with_each_heartbeat(engine: Driver) -> None:
    assert (engine.engine, engine.model) == ("vllm 0.32.0", model())
    version = engine.version
    assert joins.beats("vllm-7", SHOWN, ENGINE)
    engine.refresh_from_db()
    assert engine.version == version, "nothing is new"
    assert joins.beats("vllm-7", SHOWN, replace(ENGINE, engine="vllm 0.33.0", model=model("b")))
    engine.refresh_from_db()
    assert (engine.engine, engine.model) == ("vllm 0.33.0", model("b"))


@pytest.mark.parametrize(
    "lie",
    [
        model("a\0b"),
        model("\ud800"),
        {**model(), "name": "a\0b"},
        {**model(), "groups": [{"name": "full", "bytes_per_token": [10**400]}]},
        {**model(), "groups": [{"name": "full", "bytes_per_token": [64], "window": 10**400}]},
    ],
    ids=["NUL", "surrogate", "name", "bytes", "window"],
)
def test_a_model_that_no_database_takes_is_refused(
    engine: Driver, client: Client, lie: dict[str, Any]
) -> None:
    told = {
        "control_url": "http://127.0.0.1:1",
        "software_version": ENGINE.software_version,
        "engine": ENGINE.engine,
        "model": lie,
    }
    answer = client.post(
        "/api/v1/drivers/vllm-7/heartbeat",
        data=json.dumps(told),
        content_type="application/json",
        headers={"authorization": f"Bearer {SHOWN}"},
    )
    assert answer.status_code in (400, 422)
    engine.refresh_from_db()
    assert engine.model == model()


def test_a_daemon_keeps_the_model_that_it_joined_with(db: None) -> None:
    driver = joins.join_driver(new_token("driver"), "vllm-7", CONTROL_TOKEN, DRIVER_FACTS, model())
    assert joins.beats("vllm-7", SHOWN, DRIVER_FACTS)
    driver.refresh_from_db()
    assert (driver.engine, driver.model) == ("", model())


def test_only_engines_are_told_a_key_for_claims(engine: Driver) -> None:
    daemon = joins.join_driver(new_token("driver"), "job-8", CONTROL_TOKEN, DRIVER_FACTS, model())
    targets = [Target.objects.create(kind="driver", name=one.name) for one in (engine, daemon)]
    bases = rounds._bases("driver", targets)
    assert bases["vllm-7"]["claims_key"] == targets[0].claims_key
    assert "claims_key" not in bases["job-8"], "its callers have tokens, and older ones refuse it"
    assert targets[0].claims_key != targets[1].claims_key
    assert targets[0].claims_key != targets[0].secret


def test_a_gateway_gets_the_key_and_each_reading_is_recorded(
    engine: Driver, people: People, api_of: Callable[..., Client]
) -> None:
    admin = api_of(people.platform_admin)
    told = admin.get("/api/v1/drivers/vllm-7/claims-key").json()
    key = base64.b64decode(told["claims_key"])
    assert key == control.claims_key_of("vllm-7")
    assert AuditEntry.objects.filter(action="driver.claims-key.read", object_id="vllm-7").count() == 1
    made = admin.post(
        "/api/v1/drivers/vllm-7/claims",
        json.dumps({"org": "acme", "seconds": 90, "rules": RULES, "reason": "to try it"}),
        content_type="application/json",
    )
    assert made.status_code == 201, made.content
    claim = ClaimVerifier(key, "vllm-7").verify(made.json()["claim"])
    assert claim == Claim("acme", Rules(store_tokens_max=64, tier2=Tier2Rule.NEVER))
    entry = AuditEntry.objects.get(action="driver.claim")
    assert (entry.reason, entry.org_id) == ("to try it", Org.objects.get(slug="acme").pk)
    assert entry.after == {"org": "acme", "seconds": 90, "rules": RULES}


@pytest.mark.parametrize("who", ["viewer", "org_admin", "platform_viewer"])
def test_nobody_else_gets_a_key_or_a_claim(
    engine: Driver, people: People, api_of: Callable[..., Client], who: str
) -> None:
    theirs = api_of(getattr(people, who))
    for answer in (
        theirs.get("/api/v1/drivers/vllm-7/claims-key"),
        theirs.post("/api/v1/drivers/vllm-7/claims", '{"org": "acme"}', content_type="application/json"),
    ):
        assert answer.status_code in (403, 404)
        assert b"claims_key" not in answer.content


def test_a_daemon_has_no_claims_and_bad_rules_are_refused(
    engine: Driver, people: People, api_of: Callable[..., Client]
) -> None:
    joins.join_driver(new_token("driver"), "job-8", CONTROL_TOKEN, DRIVER_FACTS, model())
    admin = api_of(people.platform_admin)
    refused = admin.get("/api/v1/drivers/job-8/claims-key")
    assert refused.status_code == 409
    assert "is a daemon" in refused.json()["detail"]
    for wrong in ({"org": "acme", "rules": {"ttl": 1}}, {"org": "acme", "seconds": 0}, {}):
        answer = admin.post(
            "/api/v1/drivers/vllm-7/claims", json.dumps(wrong), content_type="application/json"
        )
        assert answer.status_code == 422, answer.content
    unknown = admin.post(
        "/api/v1/drivers/vllm-7/claims", '{"org": "nobody"}', content_type="application/json"
    )
    assert unknown.status_code == 404


def test_heartbeats_are_answered_with_where_telemetry_goes(engine: Driver, client: Any) -> None:
    facts = {"control_url": "http://10.0.0.9:8420", "software_version": "0.1.0"}

    def beat() -> dict[str, Any]:
        answer = client.post(
            "/api/v1/drivers/vllm-7/heartbeat",
            json.dumps({**facts, "engine": "vllm 0.32.0", "model": model()}),
            content_type="application/json",
            headers={"Authorization": f"Bearer {SHOWN}"},
        )
        assert answer.status_code == 200, answer.content
        found: dict[str, Any] = answer.json()
        return found

    with override_settings(OWN_TELEMETRY_URL=None):
        assert beat()["telemetry_url"] == ""
    with override_settings(OWN_TELEMETRY_URL="rediss://own@redis.example.org:6379/0"):
        assert beat()["telemetry_url"] == "rediss://own@redis.example.org:6379/0"


def test_a_page_shows_the_key_once_and_signs_claims(
    engine: Driver, people: People, client: Client
) -> None:
    client.force_login(people.platform_admin)
    address = "/fleet/drivers/vllm-7/claims/"
    key = base64.b64encode(control.claims_key_of("vllm-7")).decode()
    assert address in client.get("/fleet/drivers/vllm-7/").content.decode()
    assert key not in client.get(address).content.decode()
    assert key in client.post(address, {"key": "show"}).content.decode()
    page = client.post(address, {"org": "acme", "seconds": "60", "reason": ""}).content.decode()
    found = re.search(r'id="made-claim">([^<]+)<', page)
    assert found
    assert ClaimVerifier(base64.b64decode(key), "vllm-7").verify(found[1]) == Claim("acme")
    assert "made-claim" not in client.post(address, {"org": "nobody", "seconds": "60"}).content.decode()
    actions = AuditEntry.objects.filter(object_id="vllm-7").values_list("action", flat=True)
    assert sorted(actions) == ["driver.claim", "driver.claims-key.read", "driver.join"]


def test_a_key_that_has_leaked_is_rotated(
    engine: Driver, people: People, api_of: Callable[..., Client], client: Client
) -> None:
    before = control.claims_key_of("vllm-7")
    answer = api_of(people.platform_admin).post(
        "/api/v1/drivers/vllm-7/claims-key/rotate",
        '{"reason": "a gateway was stolen"}',
        content_type="application/json",
    )
    assert answer.status_code == 200, answer.content
    key = base64.b64decode(answer.json()["claims_key"])
    assert before != key == control.claims_key_of("vllm-7")
    change = Change.objects.latest("pk")
    assert change.concerns("driver", "vllm-7"), "the engine is told at once"
    entry = AuditEntry.objects.get(action="driver.claims-key.rotate")
    assert entry.reason == "a gateway was stolen"
    assert answer.json()["claims_key"] not in str(entry.after)
    client.force_login(people.platform_admin)
    page = client.post("/fleet/drivers/vllm-7/claims/", {"key": "rotate"}).content.decode()
    assert base64.b64encode(control.claims_key_of("vllm-7")).decode() in page
    assert control.claims_key_of("vllm-7") not in (before, key)
