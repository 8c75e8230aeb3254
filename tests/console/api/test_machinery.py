"""The reusable pieces: problems, request ids, ETags, idempotency, cursors."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.utils import timezone
from ninja import Schema

from console.accounts.models import ApiToken, User
from console.accounts.roles import Role
from console.api import idempotency, problems
from console.api.models import StoredAnswer, drop_old_answers
from console.api.problems import KINDS
from console.api.routes import Answer
from console.audit.models import AuditEntry
from console.orgs.models import Membership, Org
from console.placement.rules import Cause
from console.policies.models import Caller
from console.sessions.models import Session
from tests.conftest import People

KEYS = "/api/v1/orgs/acme/callers"
ORG = {"slug": "initech", "name": "Initech"}


@pytest.fixture
def admin(people: People, api_of: Callable[..., Client]) -> Client:
    return api_of(people.platform_admin)


def make(client: Client, body: dict[str, Any] = ORG, key: str | None = "k-1", query: str = "") -> Any:
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(f"/api/v1/orgs{query}", body, content_type="application/json", headers=headers)


def rename(client: Client, name: str, if_match: str | None) -> Any:
    headers = {} if if_match is None else {"If-Match": if_match}
    return client.patch(
        "/api/v1/orgs/acme", {"name": name}, content_type="application/json", headers=headers
    )


@pytest.mark.parametrize(
    ("method", "path", "body", "reason"),
    [
        ("GET", "/api/v1/nope", "", "NotFound"),
        ("GET", "/api/v1/orgs/nope", "", "NotFound"),
        ("DELETE", "/api/v1/me", "", "MethodNotAllowed"),
        ("POST", "/api/v1/tokens", "{", "MalformedRequest"),
        ("POST", "/api/v1/tokens", "[]", "InvalidRequest"),
        ("POST", "/api/v1/tokens", '{"name": "\\u0000"}', "InvalidRequest"),
        ("GET", "/api/v1/orgs?limit=0", "", "InvalidRequest"),
        ("GET", "/api/v1/orgs?cursor=made-up", "", "MalformedRequest"),
        ("GET", "/api/v1/orgs/UPPER", "", "InvalidRequest"),
        ("GET", "/api/v1/audit/0", "", "InvalidRequest"),
        ("GET", "/api/v1/audit?since=yesterday", "", "InvalidRequest"),
        ("GET", "/api/v1/audit?q=%00", "", "InvalidRequest"),
    ],
)
def test_every_error_is_a_problem_document(
    method: str, path: str, body: str, reason: str, admin: Client
) -> None:
    response = admin.generic(method, path, body, content_type="application/json")
    problem = response.json()
    assert response["Content-Type"] == "application/problem+json"
    assert problem["reason"] == reason
    assert problem["status"] == response.status_code == KINDS[reason][0]
    assert problem["type"] == f"urn:tidegate:problem:{reason}"
    assert problem["request_id"] == response["X-Request-ID"]
    assert problem["detail"].endswith(".")


@pytest.mark.parametrize(
    ("since", "status"),
    [
        ("2026-11-21T03:00:00Z", 200),
        ("0547-10-19T08:24:57-20:01", 200),
        ("0001-01-01T00:00:00+23:59", 422),
        ("9999-12-31T23:59:59-23:59", 422),
        ("2026-11-21T03:00:00", 422),
        ("1700000000", 422),
    ],
)
def test_times_are_taken_with_any_offset_but_never_without(
    since: str, status: int, admin: Client
) -> None:
    assert admin.get("/api/v1/audit", {"since": since}).status_code == status


@pytest.mark.parametrize("path", ["/api/v1/orgs", "/api/v1/nodes", "/api/v1/orgs/acme", "/api/v1/me"])
def test_a_parameter_that_is_not_known_is_refused_by_its_name(
    path: str, people: People, admin: Client
) -> None:
    assert admin.get(path).status_code == 200
    refused = admin.get(f"{path}?bogus=1")
    assert refused.status_code == 422
    [error] = refused.json()["errors"]
    assert error["pointer"] == "/query/bogus"
    assert error["detail"].startswith("There is no such parameter")


def test_a_parameter_that_is_not_known_stops_a_change(people: People, admin: Client) -> None:
    body = {"slug": "new", "name": "New"}
    refused = make(admin, body, query="?validate-only=true")
    assert refused.status_code == 422
    assert "there are validate_only" in refused.json()["detail"]
    assert admin.get("/api/v1/orgs/new").status_code == 404


def test_an_error_points_at_the_field(admin: Client) -> None:
    problem = make(admin, {"slug": "Not A Slug", "name": ""}).json()
    assert {error["pointer"] for error in problem["errors"]} == {"/body/slug", "/body/name"}


@pytest.mark.parametrize("uses", [True, "1", 1.5])
def test_a_number_is_written_as_a_number(admin: Client, uses: object) -> None:
    token = {"kind": "node", "uses": uses}
    answer = admin.post("/api/v1/join-tokens", token, content_type="application/json")
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == ["/body/uses"]


def test_a_taken_name_points_at_its_field(people: People, admin: Client) -> None:
    problem = make(admin, {"slug": "acme", "name": "Again"})
    assert problem.status_code == 422
    assert problem.json()["errors"][0]["pointer"] == "/body/slug"


def test_a_405_names_what_is_allowed(admin: Client) -> None:
    assert "GET" in admin.delete("/api/v1/me")["Allow"]


@pytest.mark.parametrize(("given", "kept"), [("abc.D_1-2", True), ("x" * 65, False), ("a b", False)])
def test_a_request_id_is_echoed_if_it_is_well_formed(given: str, kept: bool) -> None:  # noqa: FBT001
    response = Client().get("/-/health/live", headers={"X-Request-ID": given})
    assert (response["X-Request-ID"] == given) is kept
    assert response["X-Request-ID"]


def test_browsers_need_their_csrf_token_on_the_api(people: People) -> None:
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(people.platform_admin)
    assert browser.get("/api/v1/me").status_code == 200
    assert make(browser).status_code == 403


# ETags


def test_a_change_needs_the_version_that_was_read(people: People, admin: Client) -> None:
    missing = rename(admin, "x", None)
    assert (missing.status_code, missing.json()["reason"]) == (428, "PreconditionRequired")
    stale = rename(admin, "x", '"99"')
    assert (stale.status_code, stale["ETag"]) == (412, '"1"')
    done = rename(admin, "Acme Ltd", admin.get("/api/v1/orgs/acme")["ETag"])
    assert (done.status_code, done["ETag"]) == (200, '"2"')


@pytest.mark.parametrize("if_match", ['"1"', 'W/"1"', '"7", "1"', "*"])
def test_if_match_takes_every_form_of_the_standard(if_match: str, people: People, admin: Client) -> None:
    assert rename(admin, "Acme Ltd", if_match).status_code == 200


def test_validate_only_checks_all_and_changes_nothing(people: People, admin: Client) -> None:
    dry = make(admin, query="?validate_only=true")
    assert (dry.status_code, "Location" in dry) == (201, False)
    assert not Org.objects.filter(slug="initech").exists()
    assert AuditEntry.objects.filter(action="org.create").count() == 0
    assert make(admin, {"slug": "acme", "name": "x"}, query="?validate_only=true").status_code == 422
    made = make(admin)
    assert (made.status_code, made["Location"]) == (201, "/api/v1/orgs/initech")


# Errors


def test_every_cause_of_a_refusal_is_a_kind_of_problem_that_says_whether_waiting_helps() -> None:
    for cause in Cause:
        assert problems.problem(cause.value, "x").status == (422 if cause.is_never else 409), cause


# Idempotency


def test_a_key_is_required(admin: Client) -> None:
    refused = make(admin, key=None)
    assert (refused.status_code, refused.json()["reason"]) == (400, "IdempotencyKeyMissing")


def test_the_same_request_again_takes_effect_once_and_gets_the_same_answer(admin: Client) -> None:
    first, again = make(admin), make(admin)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert again["Location"] == first["Location"] == "/api/v1/orgs/initech"
    assert again["Idempotency-Replayed"] == "true"
    assert "Idempotency-Replayed" not in first
    assert AuditEntry.objects.filter(action="org.create").count() == 1


def test_a_key_with_another_body_is_refused(admin: Client) -> None:
    make(admin)
    refused = make(admin, {**ORG, "name": "Other"})
    assert (refused.status_code, refused.json()["reason"]) == (422, "IdempotencyKeyReused")


def test_what_failed_may_be_tried_again_with_the_same_key(people: People, admin: Client) -> None:
    assert make(admin, {"slug": "acme", "name": "x"}).status_code == 422
    Org.objects.filter(slug="acme").delete()
    assert make(admin, {"slug": "acme", "name": "x"}).status_code == 201


def test_keys_of_different_people_do_not_meet(
    people: People, admin: Client, api_of: Callable[..., Client]
) -> None:
    make(admin)
    other = User.objects.create(username="zoe", platform_role=4)
    assert make(api_of(other)).status_code == 422  # its own attempt: the slug is taken


def test_keys_of_different_tokens_of_one_person_do_not_meet(
    people: People, api_of: Callable[..., Client]
) -> None:
    """Finding 11: a confined token that may only read got what an admin's token was answered with."""
    first = make(api_of(people.platform_admin))
    assert first.status_code == 201
    weaker = make(api_of(people.platform_admin, read_only=True, org=people.acme))
    assert weaker.status_code == 403
    assert "Idempotency-Replayed" not in weaker
    other = make(api_of(people.platform_admin))
    assert other.status_code == 422, "its own attempt: the slug is taken"


def test_an_answer_is_not_repeated_to_who_could_not_get_it_any_more(
    people: People, api_of: Callable[..., Client]
) -> None:
    client = api_of(people.org_admin)

    def note() -> Any:
        body = {"org": "acme", "text": "what only acme may read"}
        headers = {"Idempotency-Key": "k-9"}
        return client.post("/api/v1/hand-over/notes", body, "application/json", headers=headers)

    assert note().status_code == 201
    assert note()["Idempotency-Replayed"] == "true"
    membership = Membership.objects.filter(user=people.org_admin)
    membership.update(role=Role.VIEWER)
    assert note().status_code == 403
    membership.delete()
    refused = note()
    assert refused.status_code == 404
    assert b"what only acme" not in refused.content


def test_the_query_is_part_of_what_a_key_was_used_for(people: People, admin: Client) -> None:
    assert make(admin).status_code == 201
    assert make(admin, query="?validate_only=false").json()["reason"] == "IdempotencyKeyReused"


def test_an_answer_without_its_authority_can_not_be_made() -> None:
    with pytest.raises(ValueError, match="authority"):
        idempotency.Answer(200, [])


def post(client: Client, path: str, body: dict[str, str], key: str | None = "k-1") -> Any:
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(path, body, content_type="application/json", headers=headers)


def test_a_retry_of_what_answers_with_a_secret_gets_that_secret_and_makes_no_second_one(
    people: People, admin: Client, api_of: Callable[..., Client]
) -> None:
    for path, body in (
        (KEYS, {"name": "engine"}),
        ("/api/v1/tokens", {"name": "bot"}),
        ("/api/v1/join-tokens", {"kind": "node"}),
    ):
        first, again = (post(admin, path, body) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 201), path
        assert first.json() == again.json()
        assert ("Idempotency-Replayed" in first, again["Idempotency-Replayed"]) == (False, "true")
        [stored] = StoredAnswer.objects.order_by("-created_at")[:1]
        assert stored.body == ""
        with connection.cursor() as cursor:
            cursor.execute("SELECT secret_body FROM api_storedanswer ORDER BY created_at DESC LIMIT 1")
            [sealed] = cursor.fetchone()
        assert first.json()["token"] not in sealed
    assert Caller.objects.count() == 1
    assert post(admin, KEYS, {"name": "other"}).json()["reason"] == "IdempotencyKeyReused"
    another = post(api_of(people.platform_admin), KEYS, {"name": "engine"})
    assert another.status_code == 422, "keys are of a credential, and the name is taken"
    assert Caller.objects.count() == 1


def test_without_a_key_each_request_takes_effect(admin: Client) -> None:
    made = [post(admin, "/api/v1/tokens", {"name": "bot"}, key=None).json()["token"] for _ in range(2)]
    assert made[0] != made[1]
    assert StoredAnswer.objects.count() == 0


def test_answers_are_kept_for_a_day(admin: Client) -> None:
    make(admin)
    now = timezone.now()
    assert drop_old_answers(now + timedelta(hours=23)) == 0
    assert drop_old_answers(now + timedelta(hours=25)) == 1


@pytest.mark.django_db(transaction=True)
def test_two_at_the_same_time_do_it_once(people: People, token_of: Callable[..., str]) -> None:
    token = token_of(people.platform_admin)
    barrier = threading.Barrier(8)
    answers: list[Any] = []

    def send() -> None:
        client = Client(headers={"authorization": f"Bearer {token}"})
        barrier.wait()
        try:
            answers.append(make(client))
        finally:
            connection.close()

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert sum(a.status_code == 201 and "Idempotency-Replayed" not in a for a in answers) == 1
    assert all(
        answer.json()["reason"] == "StillRunning" for answer in answers if answer.status_code == 409
    )
    assert Org.objects.filter(slug="initech").count() == 1
    assert AuditEntry.objects.filter(action="org.create").count() == 1


@pytest.mark.django_db(transaction=True)
def test_while_the_first_is_running_the_second_is_told_so(people: People, admin: Client) -> None:
    user, token = people.platform_admin, ApiToken.objects.get()
    parts = [str(user.pk), f"token:{token.public_id}", "POST", "/api/v1/orgs", "k-1"]
    scope = hashlib.sha256(json.dumps(parts).encode()).digest()
    number = int.from_bytes(scope[:8], "big", signed=True)
    held, release = threading.Event(), threading.Event()

    def first() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", [number])
            held.set()
            release.wait(60)
            cursor.execute("SELECT pg_advisory_unlock(%s)", [number])
        connection.close()

    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(60)
    try:
        refused = make(admin)
    finally:
        release.set()
        thread.join()
    assert (refused.status_code, refused["Retry-After"]) == (409, "1")
    assert StoredAnswer.objects.count() == 0
    assert make(admin).status_code == 201


def test_what_is_deleted_is_gone_and_deleting_it_again_by_the_same_key_spares_a_new_one(
    people: People, admin: Client
) -> None:
    headers = {"If-Match": "*", "Idempotency-Key": "k-2"}
    assert admin.delete("/api/v1/orgs/acme", headers=headers).status_code == 204
    assert admin.get("/api/v1/orgs/acme").status_code == 404
    assert admin.get("/api/v1/orgs/acme/members").status_code == 404
    make(admin, {"slug": "acme", "name": "Another"})
    again = admin.delete("/api/v1/orgs/acme", headers=headers)
    assert (again.status_code, again["Idempotency-Replayed"]) == (204, "true")
    assert admin.get("/api/v1/orgs/acme").json()["name"] == "Another"


def test_what_is_in_use_is_not_deleted_and_the_answer_names_who_uses_it(
    people: People, admin: Client
) -> None:
    Session.objects.create(name="chat", org=people.acme, boxes_desired=1, boxes_min=1, boxes_increment=1)
    headers = {"If-Match": "*", "Idempotency-Key": "k-3"}
    refused = admin.delete("/api/v1/orgs/acme", headers=headers)
    assert (refused.status_code, refused.json()["reason"]) == (409, "Conflict")
    assert "still has chat: delete that first" in refused.json()["detail"]


# Cursors


def test_pages_show_everything_once_in_a_stable_order(people: People, admin: Client) -> None:
    for number in range(7):
        Org.objects.create(slug=f"org-{number}", name="x")
    seen: list[str] = []
    address = "/api/v1/orgs?limit=4"
    cursor = None
    while True:
        page = admin.get(address + (f"&cursor={cursor}" if cursor else "")).json()
        seen += [item["slug"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        Org.objects.get_or_create(slug="aaa-added-meanwhile", name="x")
    assert seen == sorted(seen)
    assert seen == ["acme", "globex", *(f"org-{number}" for number in range(7))]


def test_a_cursor_of_another_list_is_refused(people: People, admin: Client) -> None:
    cursor = admin.get("/api/v1/orgs?limit=1").json()["next_cursor"]
    assert admin.get(f"/api/v1/audit?cursor={cursor}").status_code == 400


def test_the_number_of_queries_does_not_grow_with_the_rows(
    people: People, admin: Client, django_assert_max_num_queries: Any
) -> None:
    for number in range(50):
        Org.objects.create(slug=f"org-{number}", name="x")
    admin.get("/api/v1/me")  # the token's use is noted once
    with django_assert_max_num_queries(4):
        admin.get("/api/v1/orgs?limit=50")


def test_openapi_declares_problems_with_their_content_type(db: None) -> None:
    schema = Client().get("/api/v1/openapi.json").json()
    assert schema["openapi"] == "3.1.0"
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    assert list(answer["content"]) == ["application/problem+json"], (path, method)


def test_no_two_schemas_have_one_name() -> None:
    """The description would show one of them for both. It shows none of what is put around answers."""

    def all_below(kind: type[Schema]) -> Iterator[type[Schema]]:
        for below in kind.__subclasses__():
            yield below
            yield from all_below(below)

    import_module("console.api.v1")
    ours = {one for one in all_below(Schema) if one.__module__.startswith("console.")}
    ours -= set(all_below(Answer))
    names = Counter(one.__name__ for one in ours)
    assert [name for name, count in names.items() if count > 1] == []
