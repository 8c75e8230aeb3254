"""What a preview says of routing: the part of what brains expected in caches that the replay loses."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from django.test import Client
from django.utils import timezone

from console.accounts.models import User
from console.policies.preview import estimates
from console.policies.preview.estimates import Foretold, Known
from console.policies.preview.routed import SECONDS, RoutedHits, routed_hits
from swdriver_shim.cache.reuse.preview import Confidence, Effect, Preview
from swdriver_shim.policy import OrgPolicies, Policy
from telemetry.ingest.folder import Row, bucket_of
from telemetry.metrics import Kind
from telemetry.shapes import Series, Shape
from telemetry.store.rollup import RollUp
from telemetry.store.storage import FRESH, Names, copy_in, day_of
from tests.conftest import People
from tests.console.routing.brains import a_driver, a_model, a_replica
from tests.html import compact

pytestmark = pytest.mark.django_db
NOTHING = OrgPolicies(policy=Policy())
SHORT = OrgPolicies(policy=Policy(ttl_last_use_seconds=60))


def foretold(before: float | None, after: float | None, error: float = 0.01) -> Foretold:
    def effect(rate: float | None) -> Effect:
        return Effect(hit_rate=rate, tier2_hit_rate=0.0, bytes=1, error=error)

    found = Preview(
        now=effect(before),
        proposed=effect(after),
        measured_hit_rate=before,
        freed_bytes=0,
        expiring_columns=0,
        expiring_bytes=0,
        by_ttl=(),
        by_bytes=(),
        confidence=Confidence(
            requests=9, references=9, share=1.0, reaches_back_seconds=60, idle_seconds=1
        ),
    )
    return Foretold(found, Known(timezone.now(), (), 1, 1, 0), 1)


def brains_expected(tokens: dict[str, int], org: str = "acme") -> None:
    now = time.time()
    RollUp().tend_days(now)
    series = {
        Series(Kind.COUNTER, "brain_predicted_hit_tokens_total", (("model", model),)): count
        for model, count in tokens.items()
    }
    shape = Shape(list(series))
    rows = [Row(f"org:{org}", bucket_of(now) - 600, shape, shape.cells(series))]
    copy_in(FRESH, Names().stored(rows, day_of(now)))


def a_served(name: str, runs: str) -> None:
    model = a_model(name, model=f"acme/{name}")
    layout = {"name": runs, "groups": [{"name": "full", "bytes_per_token": [192]}]}
    a_replica(model, driver=a_driver(f"job-{name}", model=layout))


def test_the_part_that_hits_lose_is_taken_of_what_brains_expected(people: People) -> None:
    a_served("chat", "llama")
    brains_expected({"acme/chat": 8_000, "not/ours": 500})
    found = routed_hits(people.acme, foretold(0.8, 0.6), NOTHING, SHORT)
    assert found == RoutedHits(SECONDS, 8_000, 2_000, 100)
    more = routed_hits(people.acme, foretold(0.4, 0.5), NOTHING, SHORT)
    assert more
    assert more.absent_tokens == -2_000
    assert routed_hits(people.globex, foretold(0.8, 0.6), NOTHING, SHORT) is None


def test_nothing_is_said_without_hits_or_traffic(people: People) -> None:
    a_served("chat", "llama")
    assert routed_hits(people.acme, foretold(0.8, 0.6), NOTHING, SHORT) is None
    brains_expected({"acme/chat": 8_000})
    assert routed_hits(people.acme, foretold(None, None), NOTHING, SHORT) is None
    assert routed_hits(people.acme, foretold(0.0, 0.0), NOTHING, SHORT) is None


def test_a_model_with_a_policy_of_its_own_counts_for_itself(people: People) -> None:
    a_served("chat", "llama")
    a_served("code", "qwen")
    brains_expected({"acme/chat": 8_000, "acme/code": 1_000})
    own = OrgPolicies(policy=Policy(), models={"qwen": Policy(ttl_last_use_seconds=60)})
    told = foretold(0.8, 0.6)

    def expected(model: str) -> int:
        found = routed_hits(people.acme, told, NOTHING, own, model)
        return found.expected_tokens if found else 0

    assert (expected(""), expected("qwen"), expected("llama")) == (8_000, 1_000, 8_000)


def test_page_and_api_say_it(
    people: People,
    browser_of: Callable[[User], Client],
    api_of: Callable[[User], Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a_served("chat", "llama")
    brains_expected({"acme/chat": 8_000})
    monkeypatch.setattr(estimates, "foretell", lambda *_: foretold(0.8, 0.6))
    page = compact(browser_of(people.org_admin).get("/orgs/acme/policy/"))
    assert '<dt>Routed hits lost</dt><dd class="figure">2,000</dd>' in page
    assert "of 8,000 tokens in the last 1 h, ± 100" in page
    assert "is not predicted" in page
    told = api_of(people.org_admin).post(
        "/api/v1/orgs/acme/policy:preview",
        {"policy": {"ttl_last_use_seconds": 60}},
        content_type="application/json",
    )
    assert told.json()["routed_hits"] == {
        "seconds": SECONDS,
        "expected_tokens": 8_000,
        "absent_tokens": 2_000,
        "error_tokens": 100,
    }
