"""Why this replica: by request id, on the page and over REST; and what others may know of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from django.test import Client
from msgspec import structs

from console.accounts.models import User
from console.explain import routes
from console.fleet.models import Brain
from inference_brain.choice import Regret
from inference_brain.decisions import CandidateEstimate, Outcome, RequestRecord
from kvss_agent.http.answers import Budget
from tests.conftest import People
from tests.console.routing.brains import FakeBrain
from tests.html import compact

pytestmark = pytest.mark.django_db
RECORD = RequestRecord(
    id="r-1",
    at=time.time(),
    org="acme",
    model="acme/chat",
    prompt_tokens=2048,
    chosen="chat-1",
    why="chat-1 has 1,920 of 2,048 tokens in memory.",
    candidates=(
        CandidateEstimate(
            "chat-2", 1280, 0, 0.01, 0.0, 0.4, sibling_tokens=1280, sibling="chat-1-driver"
        ),
        CandidateEstimate("chat-1", 1920, 640, 0.02, 0.01, 0.03, path="spine"),
        CandidateEstimate("chat-3", excluded="ejected after 3 failures"),
    ),
    decision_seconds=0.0001,
    outcome=Outcome(
        "chat-1",
        "ok",
        first_token_seconds=0.08,
        total_seconds=1.5,
        hit_tokens=1920,
        completion_tokens=50,
    ),
    regret={"expired": 128},
)


@pytest.fixture
def known(people: People, brain: FakeBrain) -> FakeBrain:
    brain.records["r-1"] = RECORD
    return brain


def test_the_platform_sees_candidates_beside_what_happened(
    people: People, known: FakeBrain, api_of: Callable[..., Client]
) -> None:
    answer = api_of(people.platform_viewer).post(
        "/api/v1/orgs/acme/explain", {"request": "r-1"}, content_type="application/json"
    )
    route = answer.json()["route"]
    assert (route["brain"], route["chosen"], route["prompt_tokens"]) == ("east", "chat-1", 2048)
    assert [one["replica"] for one in route["candidates"]] == ["chat-1", "chat-2", "chat-3"]
    first, second, excluded = route["candidates"]
    assert (first["chosen"], round(first["seconds"], 3), first["tier2_tokens"]) == (True, 0.06, 640)
    assert (excluded["seconds"], excluded["excluded"]) == (None, "ejected after 3 failures")
    assert first["path"] == "spine"
    assert (first["sibling_tokens"], first["sibling"]) == (0, "")
    assert (second["sibling_tokens"], second["sibling"]) == (1280, "chat-1-driver")
    assert round(route["error_seconds"], 3) == 0.02
    assert (route["outcome"]["hit_tokens"], route["regret"]) == (1920, {"expired": 128})


def test_all_brains_are_asked_however_many(
    people: People,
    known: FakeBrain,
    api_of: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "BUDGET", Budget(60.0, 1 << 20))
    east = Brain.objects.get()
    Brain.objects.bulk_create(
        Brain(
            name=f"a-{number}",
            control_url="http://127.0.0.1:1",
            control_token=f"{number:040}",
            joined_at=east.joined_at,
            last_heartbeat_at=east.joined_at,
            heartbeat_sha256=number.to_bytes(32, "big"),
        )
        for number in range(100)
    )
    answer = api_of(people.platform_viewer).post(
        "/api/v1/orgs/acme/explain", {"request": "r-1"}, content_type="application/json"
    )
    assert answer.json()["route"]["brain"] == "east"


def test_the_page_says_why(
    people: People, known: FakeBrain, browser_of: Callable[[User], Client]
) -> None:
    page = compact(browser_of(people.platform_admin).get("/orgs/acme/explain/?request=r-1"))
    for text in (
        "Why this replica",
        "chat-1 has 1,920 of 2,048 tokens in memory.",
        "ejected after 3 failures",
        "expected 1,920",
        "from chat-1-driver",
        "computed: their TTL was over",
    ):
        assert text in page, text
    assert set(routes.REGRETS) == set(Regret)


def test_an_org_sees_its_request_and_no_names_of_replicas_or_brains(
    people: People, known: FakeBrain, api_of: Callable[..., Client], browser_of: Callable[[User], Client]
) -> None:
    answer = api_of(people.viewer).post(
        "/api/v1/orgs/acme/explain", {"request": "r-1"}, content_type="application/json"
    )
    route = answer.json()["route"]
    assert [one["replica"] for one in route["candidates"]] == ["replica 1", "replica 2", "replica 3"]
    assert [one["sibling_tokens"] for one in route["candidates"]] == [0, 1280, 0]
    assert (route["chosen"], route["outcome"]["replica"], route["brain"]) == (
        "replica 1",
        "replica 1",
        "",
    )
    page = compact(browser_of(people.viewer).get("/orgs/acme/explain/?request=r-1"))
    assert "Why this replica" in page
    for text in (answer.content.decode(), page):
        assert "chat-" not in text
        assert "east" not in text
        assert "spine" not in text


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ("chat-1", "Sent to replica 1, where the first token was expected soonest."),
        ("chat-2", "Sent to replica 2."),
    ],
)
def test_an_org_is_told_that_a_replica_was_the_soonest_only_if_it_was(
    people: People, brain: FakeBrain, browser_of: Callable[[User], Client], chosen: str, told: str
) -> None:
    brain.records["r-1"] = structs.replace(
        RECORD, chosen=chosen, why=f"Little is known of {chosen} yet, so it was tried."
    )
    page = compact(browser_of(people.viewer).get("/orgs/acme/explain/?request=r-1"))
    assert told in page


def test_nobody_learns_of_a_request_of_another_org(
    people: People, known: FakeBrain, api_of: Callable[..., Client]
) -> None:
    answer = api_of(people.stranger).post(
        "/api/v1/orgs/globex/explain", {"request": "r-1"}, content_type="application/json"
    )
    assert answer.json()["route"] is None


def test_a_brain_that_does_not_answer_is_told_without_its_address_to_orgs(
    people: People, brain: FakeBrain, api_of: Callable[..., Client], browser_of: Callable[[User], Client]
) -> None:
    Brain.objects.update(control_url="http://127.0.0.1:1")
    path = "/orgs/acme/explain/?request=r-1"
    assert "A brain does not answer." in compact(browser_of(people.viewer).get(path))
    assert "east: It does not answer" in compact(browser_of(people.platform_admin).get(path))
    for user, brain_name, reason in (
        (people.viewer, "", "A brain does not answer."),
        (people.platform_viewer, "east", "It does not answer"),
    ):
        answer = api_of(user).post(
            "/api/v1/orgs/acme/explain", {"request": "r-1"}, content_type="application/json"
        )
        [told] = answer.json()["silent_brains"]
        assert told["brain"] == brain_name
        assert told["reason"].startswith(reason)
