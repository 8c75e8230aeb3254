"""Served models, replicas and limits over REST: what is checked, what is refused, what is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.test import Client

from console.audit import services as audit
from console.audit.models import AuditEntry
from console.control.models import Change
from console.routing import limits
from console.routing.models import OrgLimits, Replica, ServedModel
from inference_brain.desired import Limits
from tests.conftest import People
from tests.console.routing.brains import a_driver, a_model, a_replica

pytestmark = pytest.mark.django_db
CHAT = {"name": "chat", "model": "meta/llama", "tokens_max": 8192}


class Api:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.key = 0

    def __call__(self, method: str, path: str, body: Any = None, match: str = "*") -> Any:
        self.key += 1
        return getattr(self.client, method)(
            f"/api/v1/{path}",
            body,
            content_type="application/json",
            headers={"if-match": match, "idempotency-key": f"k-{self.key}"},
        )


def trail() -> list[AuditEntry]:
    """But for the token of who asks."""
    return list(AuditEntry.objects.exclude(action="token.create").order_by("pk"))


@pytest.fixture
def api(people: People, api_of: Callable[..., Client]) -> Api:
    return Api(api_of(people.platform_admin))


def test_a_model_is_served_changed_and_removed(people: People, api: Api) -> None:
    made = api("post", "models", {**CHAT, "orgs": ["acme"], "reason": "pilot"})
    assert (made.status_code, made["ETag"], made["Location"]) == (201, '"1"', "/api/v1/models/chat")
    assert made.json()["orgs"] == ["acme"]
    assert api("put", "models/chat", {"model": "meta/llama", "tokens_max": 1}, '"9"').status_code == 412
    changed = api("put", "models/chat", {"model": "meta/llama", "tokens_max": 4096}, '"1"')
    assert (changed.json()["tokens_max"], changed.json()["orgs"]) == (4096, "all")
    assert changed["ETag"] == '"2"'
    assert api("delete", "models/chat").status_code == 204
    assert not ServedModel.objects.exists()
    assert [one.action for one in trail()] == ["model.add", "model.update", "model.remove"]
    assert [change.targets for change in Change.objects.all()] == [[["brain", "*"]]] * 3


def test_a_dry_run_changes_nothing(people: People, api: Api) -> None:
    answer = api("post", "models?validate_only=true", CHAT)
    assert (answer.status_code, answer.json()["model"]) == (201, "meta/llama")
    assert not ServedModel.objects.exists()
    assert not trail()


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({**CHAT, "name": "Chat"}, "/body/name"),
        ({**CHAT, "tokens_max": 0}, "/body/tokens_max"),
        ({**CHAT, "model": "a\nb"}, "/body/model"),
        ({**CHAT, "orgs": "everybody"}, "/body/orgs"),
        ({**CHAT, "name": "other", "model": "acme/taken"}, "/body/model"),
    ],
)
def test_what_is_wrong_with_a_model_is_said_at_its_field(
    people: People, api: Api, body: dict[str, Any], pointer: str
) -> None:
    a_model("taken", model="acme/taken")
    answer = api("post", "models", body)
    assert answer.status_code == 422
    assert any(one["pointer"].startswith(pointer) for one in answer.json()["errors"])


def test_an_org_that_is_not_there_is_404(people: People, api: Api) -> None:
    assert api("post", "models", {**CHAT, "orgs": ["nobody"]}).status_code == 404


def test_a_replica_is_added_drained_and_removed_and_its_key_is_never_shown(
    people: People, api: Api
) -> None:
    a_model()
    a_driver()
    said = {"name": "chat-1", "url": "http://10.0.0.21:8000", "driver": "job7", "api_key": "sk-secret"}
    made = api("post", "models/chat/replicas", said)
    assert made.status_code == 201, made.json()
    assert made.json()["has_api_key"]
    assert not made.json()["guessed"]
    drained = api("patch", "models/chat/replicas/chat-1", {"draining": True}, '"1"')
    assert (drained.json()["draining"], drained["ETag"]) == (True, '"2"')
    assert drained.json()["driver"] == "job7", "what is not said stays"
    without = api("patch", "models/chat/replicas/chat-1", {"driver": "", "api_key": ""})
    assert (without.json()["driver"], without.json()["guessed"]) == (None, True)
    assert not without.json()["has_api_key"]
    assert api("delete", "models/chat/replicas/chat-1").status_code == 204
    assert not Replica.objects.exists()
    texts = [str((one.before, one.after)) for one in AuditEntry.objects.all()]
    assert not any("sk-secret" in text for text in texts)
    assert "sk-secret" not in str(api("get", "models").json())


def test_a_new_key_of_an_engine_is_a_change_that_the_trail_tells_without_it(
    people: People, api: Api
) -> None:
    a_replica(a_model(), api_key="old")
    assert api("patch", "models/chat/replicas/chat-1", {"api_key": "new"})["ETag"] == '"2"'
    assert (trail()[0].after or {})["api_key"] == "changed"
    assert api("patch", "models/chat/replicas/chat-1", {"api_key": "new"})["ETag"] == '"2"'
    assert len(trail()) == 1, "the same again is no change"


def test_a_driver_belongs_to_one_engine(people: People, api: Api) -> None:
    driver = a_driver()
    a_replica(a_model(), driver=driver)
    said = {"name": "chat-2", "url": "http://10.0.0.22:8000", "driver": "job7"}
    answer = api("post", "models/chat/replicas", said)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/body/driver"
    a_model("code")
    same = {**said, "url": "http://10.0.0.21:8000"}
    assert api("post", "models/code/replicas", same).status_code == 201, "one engine, two names"


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://x", "http://", "http://u@h:1", "http://h?x=1", "h:8000"),
        *("http://h:80000", "http://h:abc", "http://h:0", "http://:80", "http://[::1", "http://h\u200b"),
    ],
)
def test_a_url_that_is_none_is_refused(people: People, api: Api, url: str) -> None:
    a_model()
    assert api("post", "models/chat/replicas", {"name": "a", "url": url}).status_code == 422


def test_limits_are_set_read_and_undone(people: People, api: Api, api_of: Callable[..., Client]) -> None:
    set_ = api("put", "orgs/acme/limits", {"queued": 8, "reason": "abuse"}, '"0"')
    assert (set_.status_code, set_["ETag"]) == (200, '"1"')
    assert api("put", "orgs/acme/limits", {}, '"0"').status_code == 412
    theirs = api_of(people.viewer).get("/api/v1/orgs/acme/limits").json()
    assert (theirs["queued"], theirs["weight"], theirs["requests_per_minute"]) == (8, 100, None)
    assert theirs["applied"] == {"brains": 0, "has_it": 0, "seconds": None}
    entry = AuditEntry.objects.get(action="limits.set")
    audit.undo(people.principal("platform_admin"), entry, "a mistake")
    assert limits.active_limits(people.acme).limits == Limits()
    with pytest.raises(audit.CannotUndo):
        audit.undo(people.principal("platform_admin"), entry, "again")


@pytest.mark.parametrize(
    "body", [{"weight": 0}, {"wait_seconds": 0}, {"priority": 101}, {"concurrent": 0}, {"queued": -1}]
)
def test_limits_that_make_no_sense_are_refused_everywhere(
    people: People, api: Api, body: dict[str, Any]
) -> None:
    assert api("put", "orgs/acme/limits", body).status_code == 422
    with pytest.raises(IntegrityError), transaction.atomic():
        OrgLimits.objects.create(org=people.acme, **body)


def test_an_org_knows_the_names_of_its_models_and_no_more(
    people: People, api_of: Callable[..., Client]
) -> None:
    a_replica(a_model())
    theirs = a_model("theirs", for_all_orgs=False)
    theirs.orgs.add(people.globex)
    client = api_of(people.viewer)
    assert client.get("/api/v1/orgs/acme/models").json() == [{"model": "acme/chat"}]
    assert client.get("/api/v1/models").status_code == 404
    assert client.get("/api/v1/models/chat").status_code == 404
