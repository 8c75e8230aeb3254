"""Sessions over REST, as automation uses them: plans, tokens, keys, versions, causes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.test import Client

from console.accounts.principal import SYSTEM
from console.fleet.models import Node
from console.operations import services as operations
from console.operations.models import Operation
from console.sessions.models import RuleSet, Session, Stream
from tests.conftest import People
from tests.console.sessions.fleets import arrive, make_across, make_driver, make_fleet
from tests.console.sessions.requests import set_rules

pytestmark = pytest.mark.django_db


class Api:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.key = 0

    def send(
        self, method: str, path: str, body: Any = None, *, key: str | None = "", **headers: str
    ) -> Any:
        self.key += 1
        sent = dict(headers)
        if key is not None:
            sent["Idempotency-Key"] = key or f"k-{self.key}"
        call = getattr(self.client, method)
        return call(f"/api/v1{path}", body, content_type="application/json", headers=sent)

    def finish(self, response: Any) -> dict[str, Any]:
        """Run the operation that was begun to its end, and say what it is then."""
        assert response.status_code == 202, response.content
        while operations.advance(response.json()["id"]):
            pass
        return dict(self.client.get(response["Location"]).json())


@pytest.fixture
def api(people: People, api_of: Callable[..., Client]) -> Api:
    make_fleet()
    return Api(api_of(people.platform_admin))


def etag(api: Api, path: str = "/sessions/chat") -> dict[str, str]:
    return {"If-Match": api.client.get(f"/api/v1{path}")["ETag"]}


CHAT = {"name": "chat", "org": "acme", "boxes": 2}


def test_made_resized_and_deleted(api: Api) -> None:
    planned = api.send("post", "/sessions?validate_only=true", CHAT)
    assert planned.status_code == 200
    plan = planned.json()
    assert (plan["added"], plan["rail"], plan["spine"], plan["is_trial"]) == (["cs1", "cs2"], 8, 0, True)
    assert plan["streams"][0]["path"] == "rail"
    assert plan["worth"][0]["tokens"] > plan["worth"][0]["tokens_equal"]
    assert not Session.objects.exists()

    made = api.finish(api.send("post", "/sessions", {**CHAT, "plan_token": plan["plan_token"]}))
    assert (made["state"], made["response"]["boxes"]) == ("succeeded", ["cs1", "cs2"])
    assert made["progress"]["percent"] == 100
    told = api.client.get("/api/v1/sessions/chat").json()
    assert told["boxes"] == {"desired": 2, "granted": 2, "actual": 2}
    assert told["org"] == "acme"

    larger = api.send("post", "/sessions/chat/resize", {"boxes": 4}, **etag(api))
    assert api.finish(larger)["response"]["boxes"] == ["cs1", "cs2", "cs3", "cs4"]
    deleted = api.send("delete", "/sessions/chat", **etag(api))
    assert api.finish(deleted)["state"] == "succeeded"
    assert api.client.get("/api/v1/sessions/chat").status_code == 404


def test_repeating_a_request_does_it_once(api: Api) -> None:
    first = api.send("post", "/sessions", CHAT, key="once")
    again = api.send("post", "/sessions", CHAT, key="once")
    assert again["Idempotency-Replayed"] == "true"
    assert first.json()["id"] == again.json()["id"]
    other = api.send("post", "/sessions", {**CHAT, "boxes": 1}, key="once")
    assert (other.status_code, other.json()["reason"]) == (422, "IdempotencyKeyReused")
    assert Session.objects.count() == 1


def test_what_is_missing_is_told(api: Api) -> None:
    assert api.send("post", "/sessions", CHAT, key=None).json()["reason"] == "IdempotencyKeyMissing"
    api.finish(api.send("post", "/sessions", CHAT))
    resize = api.send("post", "/sessions/chat/resize", {"boxes": 3})
    assert (resize.status_code, resize.json()["reason"]) == (428, "PreconditionRequired")
    stale = api.send("post", "/sessions/chat/resize", {"boxes": 3}, **{"If-Match": '"77"'})
    assert (stale.status_code, stale["ETag"]) == (412, etag(api)["If-Match"])
    taken = api.send("post", "/sessions", CHAT)
    assert (taken.status_code, taken.json()["detail"]) == (
        422,
        "/body/name: There is a session chat already.",
    )
    assert api.send("post", "/sessions", {**CHAT, "boxes": 0}).status_code == 422


def test_causes_say_never_or_not_now(
    api: Api, people: People, browser_of: Callable[..., Client]
) -> None:
    never = api.send("post", "/sessions", {**CHAT, "boxes": 9, "wait_seconds": 60})
    assert (never.status_code, never.json()["reason"]) == (422, "ExceedsClusterCapacity")
    api.finish(api.send("post", "/sessions", {**CHAT, "boxes": 3}))
    another = {"name": "another", "org": "acme", "boxes": 2}
    refused = api.send("post", "/sessions", another)
    assert (refused.status_code, refused.json()["reason"]) == (409, "WaitingForCapacity")
    waiting = api.send("post", "/sessions", {**another, "wait_seconds": 3600})
    assert waiting.status_code == 202
    first = api.client.get("/api/v1/sessions/another").json()["waiting"]
    assert (first["cause"], first["never"]) == ("PendingEvaluation", False)
    operations.advance(waiting.json()["id"])
    told = api.client.get("/api/v1/sessions/another").json()
    assert told["waiting"]["cause"] == "WaitingForCapacity"
    assert told["operation"] == waiting.json()["id"]
    listed = api.client.get("/api/v1/sessions?waiting=true").json()["items"]
    assert [one["name"] for one in listed] == ["another"]
    page = browser_of(people.platform_viewer).get("/sessions/?waiting=true").content.decode()
    assert "/sessions/another/" in page
    assert "/sessions/chat/" not in page


def test_a_job_whose_model_has_more_shards_than_its_boxes_have_domains_is_told_what_to_change(
    api: Api,
) -> None:
    api.finish(api.send("post", "/sessions", {**CHAT, "boxes": 1}))
    make_driver("job7", {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [64] * 5}]})
    refused = api.send("post", "/sessions/chat/jobs", {"name": "serve", "driver": "job7"}, **etag(api))
    assert (refused.status_code, refused.json()["reason"]) == (422, "Misconfigured")
    assert "has 5 shards" in refused.json()["detail"]
    assert "describe them with more domains" in refused.json()["detail"]


def test_a_second_operation_is_refused_with_a_link_to_the_first(api: Api) -> None:
    begun = api.send("post", "/sessions", CHAT)
    second = api.send("post", "/sessions/chat/resize", {"boxes": 3}, **etag(api))
    assert (second.status_code, second.json()["reason"]) == (409, "OperationRunning")
    assert f"/api/v1/operations/{begun.json()['id']}" in second["Link"]


def test_a_plan_token_of_another_world_is_refused(api: Api) -> None:
    plan = api.send("post", "/sessions?validate_only=true", CHAT).json()
    api.finish(api.send("post", "/sessions", {"name": "first", "org": "acme", "boxes": 1}))
    stale = api.send("post", "/sessions", {**CHAT, "plan_token": plan["plan_token"]})
    assert (stale.status_code, stale.json()["reason"]) == (412, "StalePlan")


def test_nodes_that_are_ready_are_listed_for_whom_there_is_a_fleet(
    api: Api, people: People, browser_of: Callable[..., Client]
) -> None:
    api.finish(api.send("post", "/sessions", CHAT))
    make_driver("job7")
    serve = {"name": "serve", "driver": "job7"}
    begun = api.send("post", "/sessions/chat/jobs", serve, **etag(api)).json()
    arrive(Operation.objects.get(pk=begun["id"]))
    ready = '<option value="ax1">'
    assert ready in browser_of(people.platform_on_call).get("/sessions/chat/").content.decode()
    of_acme = browser_of(people.on_call).get("/sessions/chat/").content.decode()
    assert "Move a stream to another node" in of_acme
    assert ready not in of_acme


def test_rules_of_the_cluster_and_stricter_of_an_org(api: Api) -> None:
    rules = api.client.get("/api/v1/session-rules").json()
    version = rules.pop("version")
    pair = {**rules, "boxes_min": 2, "boxes_increment": 2}
    done = api.send("put", "/session-rules", pair, **{"If-Match": f'"{version}"'})
    assert (done.status_code, done.json()["version"]) == (200, version + 1)
    stale = api.send("put", "/session-rules", rules, **{"If-Match": f'"{version}"'})
    assert stale.status_code == 412
    odd = api.send(
        "put", "/orgs/acme/session-rules", {**rules, "boxes_increment": 3}, **{"If-Match": "*"}
    )
    assert (odd.status_code, odd.json()["reason"]) == (409, "Conflict")
    refused = api.send("post", "/sessions", {**CHAT, "boxes": 3})
    assert (refused.status_code, refused.json()["reason"]) == (422, "NotMultipleOfIncrement")
    api.finish(api.send("post", "/sessions", CHAT))
    stricter = api.send("put", "/session-rules", {**pair, "boxes_min": 4}, **{"If-Match": "*"})
    assert "chat with 2 boxes" in stricter.json()["detail"]


def test_rules_that_a_session_would_break_are_refused_with_its_size(api: Api) -> None:
    rules = api.client.get("/api/v1/session-rules").json()
    del rules["version"]
    api.finish(api.send("post", "/sessions", {**CHAT, "boxes": 1}))
    refused = api.send("put", "/session-rules", {**rules, "boxes_min": 2}, **{"If-Match": "*"})
    assert "chat with 1 box. A session has at least 2 boxes" in refused.json()["detail"]


def test_lists_take_as_many_queries_for_many_as_for_one(
    api: Api, django_assert_max_num_queries: Any
) -> None:
    for number in range(4):
        api.finish(api.send("post", "/sessions", {**CHAT, "name": f"s{number}", "boxes": 1}))
    with django_assert_max_num_queries(7):
        assert len(api.client.get("/api/v1/sessions").json()["items"]) == 4


def test_another_org_sees_nothing_of_it(api: Api, people: People, api_of: Callable[..., Client]) -> None:
    api.finish(api.send("post", "/sessions", CHAT))
    api.finish(api.send("post", "/sessions", {"name": "shared", "boxes": 1}))
    stranger, viewer = api_of(people.stranger), api_of(people.viewer)
    assert stranger.get("/api/v1/sessions").json()["items"] == []
    assert stranger.get("/api/v1/sessions/chat").status_code == 404
    assert [one["name"] for one in viewer.get("/api/v1/sessions").json()["items"]] == ["chat"]
    assert viewer.get("/api/v1/sessions/shared").status_code == 404


def test_a_dry_run_of_what_is_being_changed_is_refused_as_the_change_is(
    api: Api, people: People, browser_of: Callable[..., Client]
) -> None:
    begun = api.send("post", "/sessions", CHAT).json()
    make_driver("job7")
    serve = {"name": "serve", "driver": "job7"}
    for query in ("", "?validate_only=true"):
        for what, body in (("resize", {"boxes": 3}), ("jobs", serve)):
            refused = api.send("post", f"/sessions/chat/{what}{query}", body, **etag(api))
            assert (refused.status_code, refused.json()["reason"]) == (409, "OperationRunning")
            assert begun["id"] in refused["Link"]
    browser, preview = browser_of(people.platform_admin), {"preview": "1", "wait_minutes": 0}
    for page, form in (("resize", {"boxes": 3, "version": 1}), ("new-job", serve)):
        shown = browser.post(f"/sessions/chat/{page}/", {**preview, **form}).content.decode()
        assert f"“{begun['sentence']}” is not done yet." in shown


def test_a_dry_run_that_restores_no_rails_is_refused_as_the_change_is(api: Api) -> None:
    api.finish(api.send("post", "/sessions", CHAT))
    for query in ("", "?validate_only=true"):
        refused = api.send("post", f"/sessions/chat/restore-rails{query}", {}, **etag(api))
        assert (refused.status_code, refused.json()["reason"]) == (409, "Conflict")
        assert refused.json()["detail"] == "Everything is on rails."


def test_a_dry_run_that_restores_rails_is_refused_while_the_session_changes(
    people: People, api_of: Callable[..., Client]
) -> None:
    make_across(people.acme)
    api, path = Api(api_of(people.platform_admin)), "/sessions/chat/restore-rails"
    assert api.send("post", f"{path}?validate_only=true", {}, **etag(api)).json()["moves"]
    with transaction.atomic():
        operations.start(SYSTEM, "session.resize", "session:chat", "Resize session chat", plan={})
    for query in ("", "?validate_only=true"):
        refused = api.send("post", f"{path}{query}", {}, **etag(api))
        assert (refused.status_code, refused.json()["reason"]) == (409, "OperationRunning")


def test_a_dry_run_of_a_drain_says_where_streams_would_go_and_changes_nothing(
    people: People, api_of: Callable[..., Client]
) -> None:
    make_across(people.acme)
    api, here = Api(api_of(people.platform_admin)), Stream.objects.get(index=2).node
    path = f"/nodes/{here.name}/drain"
    streams = Stream.objects.filter(node=here)
    planned = api.send("post", f"{path}?validate_only=true", {}).json()
    assert {one["stream"] for one in planned["moves"]} == {stream.name for stream in streams}
    assert {one["memory_bytes"] for one in planned["moves"]} == {one.memory_bytes for one in streams}
    assert here.name not in {one["target"] for one in planned["moves"]}
    assert (planned["staying"], planned["waits_for"]) == ([], "")
    here.refresh_from_db()
    assert (here.state, Operation.objects.count()) == ("ready", 0)
    Node.objects.exclude(pk=here.pk).update(state="cordoned")
    planned = api.send("post", f"{path}?validate_only=true", {}).json()
    assert planned["moves"] == []
    assert len(planned["staying"]) == streams.count()
    assert api.send("post", path, {}).status_code == 202
    for query in ("", "?validate_only=true"):
        refused = api.send("post", f"{path}{query}", {})
        assert (refused.status_code, refused.json()["reason"]) == (409, "OperationRunning")


def test_to_restore_rails_that_are_being_restored_has_to_wait(
    people: People, api_of: Callable[..., Client]
) -> None:
    make_across(people.acme)
    api, path = Api(api_of(people.platform_admin)), "/sessions/chat/restore-rails"
    assert api.send("post", path, {}, **etag(api)).status_code == 202
    for query in ("", "?validate_only=true"):
        refused = api.send("post", f"{path}{query}", {}, **etag(api))
        assert (refused.status_code, refused.json()["reason"]) == (409, "InProgress")
        assert refused.json()["detail"].startswith("1 stream is being moved or resized: wait")


def test_a_dry_run_of_a_purge_gives_no_address(api: Api) -> None:
    dry = api.send("post", "/orgs/acme/purge?validate_only=true", {"reason": "x"})
    assert (dry.status_code, "Location" in dry) == (202, False)
    assert not Operation.objects.exists()


def test_the_page_of_rules_overwrites_nothing_unseen(
    api: Api, people: People, browser_of: Callable[..., Client]
) -> None:
    browser = browser_of(people.platform_admin)
    for path, org in (("/session-rules/", None), ("/orgs/acme/session-rules/", people.acme)):
        page = browser.get(path).content.decode()
        seen = re.search(r'name="version" value="(\d+)"', page)
        assert seen
        set_rules(people, org, moves_percent=50)
        form = {"path": "any", "wait_for_rail_seconds": 0, "boxes_min": 1, "boxes_increment": 1}
        form |= {"grant_percent": 100, "moves_percent": 25, "borrow": "spine", "redundancy": "none"}
        form |= {"replace_lost_after_seconds": 20, "boxes_max": 40, "version": seen[1]}
        stale = browser.post(path, form).content.decode()
        assert "It has changed since you opened the form. Look again, then save." in stale
        assert "<p>Now: 50.</p>" in stale
        rules = RuleSet.objects.get(org=org)
        assert (rules.moves_percent, rules.boxes_max) == (50, None)
        assert browser.post(path, {**form, "version": rules.version}).status_code == 302
        assert RuleSet.objects.get(org=org).boxes_max == 40
