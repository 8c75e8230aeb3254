"""Why a prompt was hit or missed: asked of real drivers, and told to members of its org only."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.test import Client

from console.accounts.models import User
from console.control import rounds
from console.control import services as control
from console.explain.services import OF_OTHERS, Column, Question, runs
from console.explain.templatetags.explain import REASONS, TIERS, body_of, expiry
from console.explain.views import ExplainForm
from console.orgs import services as orgs
from console.policies import callers
from swdriver_shim.cache.reasons import Reason
from tests.conftest import People
from tests.console.control.drivers import DriverFleet, drivers, join
from tests.console.everything import driver_that_answers
from tests.html import compact
from tests.live import wait_until
from tests.swdriver_shim.daemons import C, kv

__all__ = ["drivers"]
TOKENS = list(range(3 * C + 5))


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_request_is_explained_by_who_served_it_and_the_others_are_named_or_counted(
    drivers: DriverFleet,
    people: People,
    api_of: Callable[..., Client],
    browser_of: Callable[[User], Client],
) -> None:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        token = callers.add_caller(people.principal("org_admin"), org, name="engine")[1]
    rounds.push([control.ALL_DRIVERS])
    one = drivers.daemons["one"]
    wait_until("it is ready", one.is_ready)
    one.store(token, TOKENS[: 2 * C], kv(2 * C))
    assert one.ask(token, "load", tokens=TOKENS, request="r-7").status_code == 200

    member, browser = api_of(people.viewer), browser_of(people.viewer)

    def explained(**body: object) -> dict[str, Any]:
        answer = member.post("/api/v1/orgs/acme/explain", body, content_type="application/json")
        assert answer.status_code == 200, answer.content
        found: dict[str, Any] = answer.json()
        return found

    told = explained(request="r-7")
    [answer] = told["answers"]
    assert (answer["driver"], answer["model"], answer["homes"]) == ("", "", []), "none of their sessions"
    assert told["unmatched"] == 0, "which other drivers there are is not theirs to know"
    body = {"request": "r-7"}
    all_told = api_of(people.platform_viewer).post(
        "/api/v1/orgs/acme/explain", body, content_type="application/json"
    )
    [named] = all_told.json()["answers"]
    assert (named["driver"], named["model"]) == ("one", "llama")
    assert all_told.json()["unmatched"] == 1
    result, groups = answer["result"], answer["groups"]
    assert result["columns"] == [
        {"outcome": "dram", "columns": 2},
        {"outcome": "never_stored", "columns": 1},
    ]
    assert [(run["first"], run["last"], run["state"]) for run in groups["full"]] == [
        (0, 1, "ready"),
        (2, 2, "never_stored"),
    ]
    by_tokens = explained(tokens=TOKENS)["answers"]
    assert [found["driver"] for found in by_tokens] == ["", ""], "each says what it would do"
    [newest] = member.get("/api/v1/orgs/acme/requests").json()["requests"]
    assert (newest["request"], newest["hit_tokens"]) == ("r-7", 2 * C)

    def found(user: User, text: str) -> Any:
        return api_of(user).get(f"/api/v1/search?q={text}&far=true").json()

    for user, detail in ((people.viewer, "acme"), (people.platform_viewer, "acme, on one")):
        there = {"name": "r-7", "detail": detail, "address": "/orgs/acme/explain/?request=r-7"}
        assert found(user, "r-7") == [{"kind": "prompts", "found": [there], "are_more": False}]
    assert found(people.stranger, "r-7") == found(people.viewer, "r-8") == []
    typed = browser.get("/search/?q=r-7", headers={"HX-Request": "true"}).content.decode()
    assert "No results for" in typed, "drivers are not asked at every letter"
    assert "<kbd>Enter</kbd> asks the drivers" in typed
    for headers in ({}, {"HX-Request": "true"}):
        shown = browser.get("/search/?q=r-7&far=", headers=headers).content.decode()
        assert 'href="/orgs/acme/explain/?request=r-7"' in shown
        assert "No results for “r-7”." not in shown, "there is one, at a driver"
        assert "asks the drivers" not in shown

    listed = browser.get("/orgs/acme/explain/").content.decode()
    assert '<a href="/orgs/acme/explain/?request=r-7">' in listed
    sent = browser.post("/orgs/acme/explain/", {"asked": " r-7 "})
    assert sent["Location"] == "/orgs/acme/explain/?request=r-7"
    page = " ".join(browser.get(sent["Location"]).content.decode().split())
    assert "128 of 197 tokens hit (65.0 %)" in page
    assert "missed: never stored</span> 1 column <span" in page
    assert "no such request" not in page
    seen = " ".join(browser_of(people.platform_viewer).get(sent["Location"]).content.decode().split())
    assert "1 other driver has no such request" in seen
    pasted = browser.post("/orgs/acme/explain/", {"asked": str(TOKENS)}).content.decode()
    assert pasted.count("<h3>Now</h3>") == 2
    assert "Served" not in pasted, "nobody has asked for it"

    outsider = api_of(people.stranger)
    answer_of = outsider.post("/api/v1/orgs/acme/explain", body, content_type="application/json")
    assert answer_of.status_code == 404
    of_globex = api_of(people.platform_admin).post(
        "/api/v1/orgs/globex/explain", body, content_type="application/json"
    )
    assert of_globex.json()["answers"] == [], "it is another org's"

    drivers.kill("one")
    lost = explained(request="r-7")
    assert lost["answers"] == []
    [unreachable] = lost["unreachable"]
    assert unreachable["driver"] == "", "which drivers there are is not an org's to know"
    assert unreachable["reason"] == OF_OTHERS, "addresses and causes are for who runs it"
    page = browser.get("/orgs/acme/explain/?request=r-7").content.decode()
    assert "Some drivers did not answer" in page
    assert "No driver has this request" in page
    named = browser_of(people.platform_admin).get("/orgs/acme/explain/").content.decode()
    assert "one: It does not answer" in named


@pytest.mark.django_db
@pytest.mark.parametrize("lie", [{"asked_tokens": 0, "hit_tokens": 5}, {"hit_tokens": -1}], ids=str)
def test_a_driver_with_more_hits_than_tokens_did_not_answer(
    lie: dict[str, int], people: People, browser_of: Callable[[User], Client]
) -> None:
    browser = browser_of(people.platform_viewer)
    with driver_that_answers("ax-1", "leaf-1/spine-1", **lie) as url:
        join("job7", url)
        for path in ("?request=r-7", ""):
            page = browser.get(f"/orgs/acme/explain/{path}").content.decode()
            assert "job7: Its answer is not valid" in page


@pytest.mark.django_db
def test_a_node_that_can_have_no_page_is_named_without_a_link(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    with driver_that_answers("Node/A B", "leaf-1/spine-1") as url:
        join("job7", url)
        page = compact(browser_of(people.platform_viewer).get("/orgs/acme/explain/?request=r-7"))
    assert '<td data-label="Node">Node/A B</td>' in page


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("cmpl-7f3a", Question(request="cmpl-7f3a")),
        ("42", Question(request="42")),
        ("[1, 2,\n3]", Question(tokens=[1, 2, 3])),
        ("1 2 4294967295", Question(tokens=[1, 2, 4294967295])),
        ("0" * 32, Question(keys=["0" * 32])),
        (f"{'ab' * 16}\n{'01' * 16}", Question(keys=["ab" * 16, "01" * 16])),
    ],
)
def test_what_is_pasted_is_told_by_its_looks(text: str, question: Question) -> None:
    form = ExplainForm({"asked": text})
    assert form.is_valid(), form.errors
    assert form.cleaned_data["asked"] == question


@pytest.mark.parametrize(
    "text", ["two words", "1 2 x", "1 4294967296", "1 " + "9" * 5000, "", "x" * 201, "[,;]"]
)
def test_what_is_none_of_them_is_refused(text: str) -> None:
    assert not ExplainForm({"asked": text}).is_valid()


def test_columns_that_are_alike_are_one_run() -> None:
    ready = [
        Column(
            depth, C, "ready", expires_in_seconds=60.0 + depth, uses=depth, priority=35, slot=9 - depth
        )
        for depth in range(3)
    ]
    alike = [
        *ready,
        Column(3, C, "expired"),
        Column(4, C, "expired", tier2=True),
        Column(5, 7, "expired"),
    ]
    found = runs(alike)
    assert [(run.first, run.last, run.tokens, run.state, run.tier2) for run in found] == [
        (0, 2, 3 * C, "ready", False),
        (3, 3, C, "expired", False),
        (4, 4, C, "expired", True),
        (5, 5, 7, "expired", False),
    ]
    assert (found[0].slots, found[0].expires_in_seconds, found[0].uses_max) == ((7, 9), (60.0, 62.0), 2)
    assert runs([]) == []
    kept = Column(3, C, "ready", priority=35)
    assert [run.expires_in_seconds for run in runs([*ready, kept])] == [(60.0, 62.0), None], "never"


@pytest.mark.parametrize(
    ("question", "session", "body"),
    [
        (None, "", {"request": "…"}),
        (Question(request="it's"), "chat", {"request": "it's", "session": "chat"}),
        (
            Question(tokens=range(9), adapter="poems"),
            "",
            {"tokens": [0, 1, 2, 3, "…"], "adapter": "poems"},
        ),
        (Question(keys=["ab" * 16]), "", {"keys": ["ab" * 16]}),
    ],
)
def test_the_call_that_asks_the_same_is_shown(
    question: Question | None, session: str, body: dict[str, object]
) -> None:
    assert json.loads(body_of(question, session)) == body


def test_every_reason_is_said_in_words() -> None:
    assert {reason.value for reason in Reason} == REASONS.keys()
    assert not TIERS.keys() & REASONS.keys()
    assert expiry((65.0, 7500.0)) == "in 1 min 5 s to 2 h 5 min"
    assert expiry((59.6, 60.1)) == "in 1 min"


@pytest.mark.django_db
@pytest.mark.parametrize(
    "body",
    [{}, {"request": "r", "tokens": [1]}, {"keys": ["x"]}, {"tokens": [-1]}, {"session": "No/"}],
    ids=str,
)
def test_a_question_that_is_none_is_refused(
    body: dict[str, object], people: People, api_of: Callable[..., Client]
) -> None:
    answer = api_of(people.viewer).post(
        "/api/v1/orgs/acme/explain", body, content_type="application/json"
    )
    assert answer.status_code == 422
