"""Workloads over REST: what is asked for, what is answered, and who may."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from console.workloads.models import Condition, Rollout, Workload
from tests.conftest import People
from tests.console.sessions.fleets import make_fleet
from tests.console.workloads.workloads import (
    TEXT,
    TRAFFIC,
    a_rollout,
    a_workload,
    an_instance,
    make_workload,
    settle,
)

SPEC: dict[str, Any] = {
    "name": "talk",
    "model": "example/chat-8b",
    "tokens_max": 32768,
    "engine": {"kind": "emulator"},
}
URL = "/api/v1/workloads"


class Api:
    def __init__(self, client: Client) -> None:
        self._client = client

    def get(self, path: str = "", status: int = 200) -> Any:
        return self._answer(self._client.get(f"{URL}{path}"), status)

    def send(self, method: str, path: str, body: Any = None, status: int = 200, match: str = "*") -> Any:
        response = self._client.generic(
            method,
            f"{URL}{path}",
            data=json.dumps({} if body is None else body),
            content_type="application/json",
            headers={"If-Match": match, "Idempotency-Key": str(uuid4())},
        )
        return self._answer(response, status)

    @staticmethod
    def _answer(response: Any, status: int) -> Any:
        assert response.status_code == status, response.content
        return response.json() if response.content else None


@pytest.fixture
def admin(people: People, api_of: Callable[..., Client]) -> Api:
    make_fleet(boxes=4)
    return Api(api_of(people.org_admin))


def test_create_get_change_and_delete(admin: Api) -> None:
    made = admin.send("POST", "", {"spec": {**SPEC, "org": "acme"}}, 201)
    assert (made["ready"], made["revision"], made["replicas"]["desired"]) == ("Unknown", 1, 1)
    settle()
    got = admin.get("/talk")
    assert got["conditions"][0]["reason"] == "PendingEvaluation"
    assert got["spec"]["engine"] == {"kind": "emulator", "start_seconds": 600}
    patch = {"patch": {"engine": {"emulator": {"domains": 2}}, "rollout": {"max_surge": 2}}}
    changed = admin.send("PATCH", "/talk", patch, match=f'"{got["version"]}"')
    assert (changed["revision"], changed["spec"]["rollout"]["max_surge"]) == (2, 2)
    admin.send("PATCH", "/talk", patch, 412, match=f'"{got["version"]}"')
    assert [one["number"] for one in admin.get("/talk/revisions")["items"]] == [2, 1]
    assert admin.get("/talk/revisions/2")["template"]["engine"]["emulator"]["domains"] == 2
    undone = admin.send("POST", "/talk/undo", {"revision": 1})
    assert undone["revision"] == 3
    assert admin.send("POST", "/talk/scale", {"replicas": 2})["replicas"]["desired"] == 2
    assert admin.send("POST", "/talk/pause")["paused"]
    assert not admin.send("POST", "/talk/resume")["paused"]
    assert admin.send("POST", "/talk/restart", {"reason": "x"})["restarts"] == 1
    assert admin.send("DELETE", "/talk", status=202)["deleting"]
    assert admin.send("POST", "/talk/restart", status=409)["reason"] == "InProgress"
    kinds = [one["kind"] for one in admin.get("/talk/events")["items"]]
    assert kinds[0] == "workload.delete"
    assert kinds[-1] == "workload.create"


def test_yaml_is_taken_and_its_problems_are_told_with_lines(admin: Api) -> None:
    admin.send("POST", "", {"yaml": f"{TEXT}org: acme\n"}, 201)
    refused = admin.send("POST", "", {"yaml": f"{TEXT}orgs: 7\nshape: x\n"}, 422)
    assert [one["pointer"] for one in refused["errors"]] == ["/body/yaml", "/body/yaml"]
    assert [one["detail"][:6] for one in refused["errors"]] == ["line 7", "line 8"]
    refused = admin.send("POST", "", {"spec": {**SPEC, "rollout": {"max_surge": -1}}}, 422)
    assert [one["pointer"] for one in refused["errors"]] == ["/body/spec/rollout/max_surge"]
    admin.send("POST", "", {}, 422)
    admin.send("POST", "", {"spec": SPEC, "yaml": TEXT}, 422)


def test_a_dry_run_answers_with_the_plan_and_its_token_is_applied(admin: Api) -> None:
    body = {"spec": {**SPEC, "org": "acme", "replicas": 2}}
    plan = admin.send("POST", "?validate_only=true", body)
    assert (plan["boxes"], plan["boxes_free"], plan["makes_revision"]) == (2, 2, True)
    assert [one["job"] for one in plan["placement"]["worth"]] == ["talk-0", "talk-1"]
    assert not Workload.objects.exists()
    admin.send("POST", "", {**body, "plan_token": "0" * 32}, 412)
    admin.send("POST", "", {**body, "plan_token": plan["plan_token"]}, 201)
    settle()
    plan = admin.send("POST", "/talk/scale?validate_only=true", {"replicas": 3})
    assert (plan["boxes_before"], plan["boxes"], plan["makes_revision"]) == (2, 3, False)
    assert plan["differences"] == [{"field": "replicas", "before": 2, "after": 3, "rollout": False}]
    assert Workload.objects.get().replicas == 2


@pytest.mark.parametrize(
    ("more", "reason", "status"),
    [
        ({"replicas": 5}, "ExceedsClusterCapacity", 422),
        ({"tokenizer": {"folder": "/etc"}}, "Forbidden", 403),
        ({"org": "globex"}, "NotFound", 404),
        ({"org": None}, "Forbidden", 403),
    ],
)
def test_refusals_say_why(admin: Api, more: dict[str, Any], reason: str, status: int) -> None:
    found = admin.send("POST", "", {"spec": {**SPEC, "org": "acme", **more}}, status)
    assert found["reason"] == reason


def test_what_cannot_be_had_now_says_how_much_is_missing(
    admin: Api, people: People, api_of: Callable[..., Client]
) -> None:
    make_workload(people.principal("platform_admin"), name="big", model="big", replicas=3)
    body = {"spec": {**SPEC, "org": "acme", "replicas": 3}}
    refused = admin.send("POST", "", body, 409)
    assert refused["reason"] == "WaitingForCapacity"
    assert "3 more boxes are needed and 1 is free" in refused["detail"]
    admin.send("POST", "", {**body, "wait_seconds": 60}, 201)


def test_the_same_key_takes_effect_once(people: People, api_of: Callable[..., Client]) -> None:
    make_fleet(boxes=4)
    client = api_of(people.platform_admin)
    headers = {"Idempotency-Key": "k"}
    for replayed in (None, "true"):
        response = client.post(URL, {"spec": SPEC}, content_type="application/json", headers=headers)
        assert response.status_code == 201, response.content
        assert response.headers.get("Idempotency-Replayed") == replayed
    assert Workload.objects.count() == 1


def test_on_call_rolls_back_and_pauses_and_viewers_look(
    people: People, api_of: Callable[..., Client]
) -> None:
    make_fleet(boxes=4)
    workload = a_workload(people.acme)
    viewer, on_call = Api(api_of(people.viewer)), Api(api_of(people.on_call))
    assert viewer.get("/talk")["name"] == workload.name
    viewer.send("POST", "/talk/pause", status=403)
    assert on_call.send("POST", "/talk/pause")["paused"]
    on_call.send("POST", "/talk/restart")
    on_call.send("POST", "/talk/scale", {"replicas": 2}, 403)
    Api(api_of(people.stranger)).get("/talk", 404)


def test_variables_of_engines_are_for_those_who_set_them(
    people: People, api_of: Callable[..., Client]
) -> None:
    make_fleet(boxes=4)
    make_workload(org="acme", engine={"environment": {"TOKEN": "hush"}})
    for person, shown in ((people.viewer, "(masked)"), (people.org_admin, "hush")):
        api = Api(api_of(person))
        assert api.get("/talk")["spec"]["engine"]["environment"] == {"TOKEN": shown}
        template = api.get("/talk/revisions/1")["template"]
        assert template["engine"]["environment"] == {"TOKEN": shown}


def test_what_a_viewer_was_shown_is_not_applied(people: People, api_of: Callable[..., Client]) -> None:
    """Each variable would be set to what stands in its place."""
    make_fleet(boxes=4)
    make_workload(org="acme", engine={"environment": {"TOKEN": "hush"}})
    shown = Api(api_of(people.viewer)).get("/talk")["spec"]
    admin = Api(api_of(people.platform_admin))
    engine = {"engine": shown["engine"]}
    for method, body in (
        ("PUT", {"spec": shown}),
        ("PUT", {"yaml": json.dumps(shown)}),
        ("PATCH", {"patch": engine}),  # as tidegatectl applies it
    ):
        refused = admin.send(method, "/talk", body, 422)
        assert "engine.environment.TOKEN: This is a masked value" in refused["detail"]
    assert admin.get("/talk")["spec"]["engine"]["environment"] == {"TOKEN": "hush"}


def test_instances_and_rollouts_are_listed(people: People, api_of: Callable[..., Client]) -> None:
    workload = a_workload(people.acme)
    an_instance(workload, 0, state="ready", serving=True, url="http://10.0.0.1:8000", cache="attached")
    an_instance(workload, 1, state="loading", progress_done=1, progress_total=4, progress_unit="bytes")
    an_instance(workload, 1, ended_at=workload.created_at, end_reason="It failed.", state="gone")
    a_rollout(workload, switched=1)
    api = Api(api_of(people.viewer))
    live = api.get("/talk/instances?ended=false")["items"]
    assert [(one["replica"], one["state"], one["serving"]) for one in live] == [
        ("talk-1", "loading", False),
        ("talk-0", "ready", True),
    ]
    assert live[0]["progress"] == {"done": 1, "total": 4, "unit": "bytes", "seconds": 0.0}
    assert live[1]["progress"] is None
    assert len(api.get("/talk/instances")["items"]) == 3
    [rollout] = api.get("/talk/rollouts")["items"]
    assert (rollout["switched"], rollout["total"], rollout["phase"]) == (1, 2, "running")
    got = api.get("/talk")
    assert got["rollout"] == rollout
    assert rollout["traffic"] is None
    Rollout.objects.update(traffic=TRAFFIC)
    assert api.get("/talk")["rollout"]["traffic"] == TRAFFIC
    assert got["replicas"] == {"desired": 2, "ready": 1, "instances": 2}


def test_the_list_takes_as_many_queries_for_many_as_for_one(
    people: People, api_of: Callable[..., Client]
) -> None:
    api = Api(api_of(people.platform_admin))

    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            api.get("?limit=200")
        return len(captured)

    def add(number: int) -> None:
        workload = a_workload(people.acme, f"w{number}")
        an_instance(workload)
        a_rollout(workload)

    add(0)
    queries()  # the first one also notes that the token was used
    one = queries()
    for number in range(1, 6):
        add(number)
    assert queries() == one
    assert len(api.get()["items"]) == 6


def test_the_list_shows_what_a_workload_shows(people: People, api_of: Callable[..., Client]) -> None:
    """It is not made by the schema, which would take as long as everything else."""
    workload = a_workload(people.acme, "talk")
    an_instance(workload)
    a_rollout(workload)
    Rollout.objects.update(traffic=TRAFFIC)
    a_workload(None, "bare")
    api = Api(api_of(people.platform_admin))
    found = api.get()["items"]
    assert [one["name"] for one in found] == ["bare", "talk"]
    assert found == [api.get(f"/{one['name']}") for one in found]
    assert found[1]["rollout"]
    assert found[1]["conditions"]


def test_the_list_is_filtered(people: People, api_of: Callable[..., Client]) -> None:
    a_workload(people.acme, "talk")
    code = a_workload(people.globex, "code")
    Condition.objects.filter(workload=code).update(status="True")
    api = Api(api_of(people.platform_admin))

    def names(query: str) -> list[str]:
        return [one["name"] for one in api.get(query)["items"]]

    assert names("") == ["code", "talk"]
    assert names("?org=acme") == names("?q=tal") == names("?ready=false") == ["talk"]
    assert names("?ready=true") == names("?q=example/code") == ["code"]
