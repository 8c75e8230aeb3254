"""A credential never makes a stronger or a longer one, and all of them can be ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import jwt
import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone

from console.accounts import services, tokens
from console.accounts.models import ApiToken, User
from console.accounts.principal import Refused
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from console.environment import JwtAlgorithm
from console.orgs import services as orgs
from console.orgs.models import Membership, Org
from tests.conftest import PASSWORD, People

pytestmark = pytest.mark.django_db

KEY = "a shared secret of the issuer and the console"


@pytest.fixture(autouse=True)
def issuer(settings: Any) -> None:
    settings.ENVIRONMENT = replace(
        settings.ENVIRONMENT,
        jwt_algorithm=JwtAlgorithm.HS256,
        jwt_key=KEY,
        jwt_issuer="https://id.example",
        jwt_audience="tidegate",
    )


def jwt_of(user: User, *, ago: float = 0, seconds: float = 300, **changed: Any) -> str:
    now = time.time() - ago
    claims = {"sub": user.username, "iss": "https://id.example", "aud": "tidegate"}
    times = {"iat": int(now), "exp": int(now + seconds)}
    return jwt.encode({**claims, **times, **changed}, KEY, algorithm="HS256")


def client_with(text: str) -> Client:
    return Client(headers={"authorization": f"Bearer {text}"})


def works(text: str) -> bool:
    return client_with(text).get("/api/v1/me").status_code == 200


def make(client: Client, **body: Any) -> Any:
    return client.post("/api/v1/tokens", {"name": "made", **body}, content_type="application/json")


def public_id(text: str) -> str:
    return text.split("_")[1]


# Neither stronger nor longer


def test_a_jwt_makes_no_token_that_outlives_it(people: People) -> None:
    client = client_with(jwt_of(people.platform_admin, seconds=300))
    refused = make(client, days=1)
    assert (refused.status_code, refused.json()["reason"]) == (403, "Forbidden")
    assert "outlives" in refused.json()["detail"]
    assert not ApiToken.objects.exists()
    soon = (timezone.now() + timedelta(seconds=100)).isoformat()
    assert make(client, expires_at=soon).status_code == 201


def test_a_join_token_that_a_short_jwt_makes_ends_with_it(people: People) -> None:
    """As infrastructure as code makes one: with a JWT of minutes, for nodes that come up at once."""
    text = jwt_of(people.platform_admin, seconds=300)
    made = client_with(text).post(
        "/api/v1/join-tokens", {"kind": "node"}, content_type="application/json"
    )
    assert made.status_code == 201, made.content
    ends = datetime.fromisoformat(made.json()["expires_at"])
    assert ends <= timezone.now() + timedelta(seconds=300)
    assert ends > timezone.now()


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("confined", [True, False])
@pytest.mark.parametrize("days", [1, 30])
@pytest.mark.parametrize("maker", ["writes", "writes in acme", "reads", "reads in acme"])
def test_no_token_makes_one_that_is_more_than_itself(
    maker: str,
    days: int,
    confined: bool,  # noqa: FBT001
    read_only: bool,  # noqa: FBT001
    people: People,
) -> None:
    made, text = tokens.issue(
        people.principal("platform_admin"),
        name=maker,
        read_only="reads" in maker,
        org=people.acme if "acme" in maker else None,
        expires_at=timezone.now() + timedelta(days=10),
    )
    body = {"read_only": read_only, "org": "acme" if confined else None, "days": days}
    answer = make(client_with(text), **body)
    may = not made.read_only and days < 10 and (confined or made.org is None)
    assert answer.status_code == (201 if may else 403), answer.content


@pytest.mark.parametrize("days", [0, 367])
def test_a_browser_makes_tokens_within_the_longest_lifetime(days: int, people: People) -> None:
    ends = timezone.now() + timedelta(days=days, minutes=2)
    if days == 0:
        ends = timezone.now() - timedelta(seconds=1)
    body = {"expires_at": ends.isoformat()}
    browser = Client()
    browser.force_login(people.viewer)
    assert make(browser, **body).status_code == 422


def test_revoking_a_token_revokes_what_it_made(
    people: People, token_of: Callable[..., str], browser_of: Callable[..., Client]
) -> None:
    parent = token_of(people.viewer)
    child = make(client_with(parent), days=90, read_only=False).json()["token"]
    grandchild = make(client_with(child), days=30).json()["token"]
    other = token_of(people.viewer)
    browser_of(people.viewer).post(f"/tokens/{public_id(parent)}/revoke/")
    assert [works(one) for one in (parent, child, grandchild, other)] == [False, False, False, True]
    assert AuditEntry.objects.filter(action="token.revoke").count() == 3


def test_a_token_that_is_revoked_meanwhile_makes_none(people: People) -> None:
    admin = people.principal("platform_admin")
    ends = timezone.now() + timedelta(days=2)
    token, _ = tokens.issue(admin, name="a", read_only=False, org=None, expires_at=ends)
    by_token = replace(admin, token=token)
    tokens.revoke(admin, token.public_id)
    with pytest.raises(Refused, match="revoked meanwhile"):
        tokens.issue(by_token, name="b", read_only=True, org=None, expires_at=ends)


def test_who_was_removed_meanwhile_makes_no_token_for_that_org(people: People) -> None:
    viewer = people.principal("viewer")
    Membership.objects.filter(user=people.viewer).delete()
    ends = timezone.now() + timedelta(days=2)
    with pytest.raises(Exception, match="no such org"):
        tokens.issue(viewer, name="b", read_only=True, org=people.acme, expires_at=ends)


# Admins


def test_a_platform_admin_lists_and_revokes_the_tokens_of_all(
    people: People, token_of: Callable[..., str], api_of: Callable[..., Client]
) -> None:
    text = token_of(people.viewer)
    admin = api_of(people.platform_admin)
    listed = admin.get("/api/v1/tokens?whose=administered&user=vic").json()["items"]
    assert [(one["user"], one["public_id"]) for one in listed] == [("vic", public_id(text))]
    assert admin.delete(f"/api/v1/tokens/{public_id(text)}").status_code == 204
    assert not works(text)
    entry = AuditEntry.objects.get(action="token.revoke")
    assert entry.actor_id == people.platform_admin.pk
    assert entry.before is not None
    assert entry.before["user"] == "vic"


def test_an_org_admin_administers_what_can_do_nothing_elsewhere(
    people: People, token_of: Callable[..., str], browser_of: Callable[..., Client]
) -> None:
    both = User.objects.create(username="both")
    for org in (people.acme, people.globex):
        Membership.objects.create(org=org, user=both, role=Role.VIEWER)
    texts = {
        "of a member": token_of(people.viewer),
        "of a member of two, confined": token_of(both, org=people.acme),
        "of a member of two": token_of(both),
        "of a member of two, confined elsewhere": token_of(both, org=people.globex),
        "of an admin of the platform, confined": token_of(people.platform_admin, org=people.acme),
        "of an admin of the platform": token_of(people.platform_admin),
        "of another org": token_of(people.stranger),
    }
    browser = browser_of(people.org_admin)
    page = browser.get("/tokens/administered/").content.decode()
    assert {what for what, text in texts.items() if public_id(text) in page} == {
        "of a member",
        "of a member of two, confined",
        "of an admin of the platform, confined",
    }
    for text in texts.values():
        browser.post(f"/tokens/{public_id(text)}/revoke/")
    assert [what for what, text in texts.items() if works(text)] == [
        "of a member of two",
        "of a member of two, confined elsewhere",
        "of an admin of the platform",
        "of another org",
    ]


def test_a_confined_token_of_an_org_admin_administers_what_is_confined_likewise(
    people: People, token_of: Callable[..., str], api_of: Callable[..., Client]
) -> None:
    confined, free = token_of(people.viewer, org=people.acme), token_of(people.viewer)
    admin = api_of(people.org_admin, org=people.acme)
    listed = {one["public_id"] for one in admin.get("/api/v1/tokens?whose=administered").json()["items"]}
    assert public_id(confined) in listed
    assert public_id(free) not in listed
    reader = api_of(people.org_admin, read_only=True)
    assert reader.delete(f"/api/v1/tokens/{public_id(confined)}").status_code == 403


def test_all_credentials_of_a_user_are_revoked_at_once(
    people: People,
    token_of: Callable[..., str],
    browser_of: Callable[..., Client],
    api_of: Callable[..., Client],
) -> None:
    text, claims, browser = (
        token_of(people.viewer),
        jwt_of(people.viewer, ago=2),
        browser_of(people.viewer),
    )
    assert works(text)
    assert works(claims)
    answer = api_of(people.platform_admin).delete("/api/v1/users/vic/credentials")
    assert answer.json() == {"tokens": 1}
    assert not works(text)
    assert not works(claims)
    assert browser.get("/account/").status_code == 302
    assert works(jwt_of(people.viewer, ago=-2)), "a new one is another credential"


# Passwords and roles


def test_a_new_password_by_an_admin_leaves_no_older_credential(
    people: People, token_of: Callable[..., str], browser_of: Callable[..., Client]
) -> None:
    text, claims, browser = (
        token_of(people.viewer),
        jwt_of(people.viewer, ago=2),
        browser_of(people.viewer),
    )
    browser_of(people.platform_admin).post("/users/vic/reset-password/")
    assert [works(text), works(claims)] == [False, False]
    assert browser.get("/account/").status_code == 302


@pytest.mark.parametrize("revoke", [True, False])
def test_who_changes_their_password_says_whether_tokens_go(
    revoke: bool,  # noqa: FBT001
    people: People,
    token_of: Callable[..., str],
    browser_of: Callable[..., Client],
) -> None:
    text, claims = token_of(people.viewer), jwt_of(people.viewer, ago=2)
    browser, other = browser_of(people.viewer), browser_of(people.viewer)
    new = "another correct horse battery"
    form = {"current": PASSWORD, "new": new, "again": new, **({"revoke": "on"} if revoke else {})}
    assert browser.post("/account/password/", form).status_code == 302
    assert browser.get("/account/").status_code == 200
    assert other.get("/account/").status_code == 302
    assert [works(text), works(claims)] == [not revoke, not revoke]


def test_who_is_deactivated_finds_no_token_that_works_when_they_are_back(
    people: People, token_of: Callable[..., str]
) -> None:
    text = token_of(people.viewer)
    admin = people.principal("platform_admin")
    for is_active in (False, True):
        services.update_user(
            admin,
            people.viewer,
            full_name="",
            email="",
            platform_role=None,
            is_active=is_active,
        )
    assert not works(text)


@pytest.mark.parametrize(
    ("after", "left"),
    [
        (None, {"everywhere"}),
        (Role.VIEWER, {"everywhere"}),
    ],
)
def test_a_membership_that_becomes_less_revokes_the_tokens_of_that_org(
    after: Role | None, left: set[str], people: People, token_of: Callable[..., str]
) -> None:
    texts = {
        "everywhere": token_of(people.on_call),
        "in acme": token_of(people.on_call, org=people.acme),
    }
    admin = people.principal("org_admin")
    with transaction.atomic():
        org = orgs.for_change(admin, "acme")
        if after is None:
            orgs.remove_member(admin, org, "carl")
        else:
            orgs.set_member(admin, org, "carl", after)
    assert {what for what, text in texts.items() if works(text)} == left
    with transaction.atomic():
        orgs.set_member(admin, orgs.for_change(admin, "acme"), "carl", Role.ON_CALL)
    assert {what for what, text in texts.items() if works(text)} == left, "what is revoked stays so"


def test_a_higher_role_revokes_nothing(people: People, token_of: Callable[..., str]) -> None:
    text, admin = token_of(people.on_call, org=people.acme), people.principal("org_admin")
    with transaction.atomic():
        orgs.set_member(admin, orgs.for_change(admin, "acme"), "carl", Role.ORG_ADMIN)
    assert works(text)


@pytest.mark.parametrize(
    ("after", "left"),
    [
        (None, {"in acme"}),
        (Role.VIEWER, {"in acme"}),
        (Role.PLATFORM_ADMIN, {"everywhere", "in acme", "in globex"}),
    ],
)
def test_a_role_on_the_platform_that_becomes_less_revokes_what_relied_on_it(
    after: Role | None, left: set[str], people: People, token_of: Callable[..., str]
) -> None:
    user = people.platform_on_call
    Membership.objects.create(org=people.acme, user=user, role=Role.ORG_ADMIN)
    texts = {
        "everywhere": token_of(user),
        "in acme": token_of(user, org=people.acme),
        "in globex": token_of(user, org=people.globex),
    }
    services.update_user(
        people.principal("platform_admin"),
        user,
        full_name="",
        email="",
        platform_role=after,
        is_active=True,
    )
    assert {what for what, text in texts.items() if works(text)} == left


# JWTs


@pytest.mark.parametrize(
    "changed", [{"iat": "1"}, {"exp": 1e300}, {"iat": -(10**15)}, {"sub": "v\x00c"}]
)
def test_strange_claims_are_refused_and_break_nothing(changed: dict[str, Any], people: People) -> None:
    people.viewer.credentials_since = timezone.now()
    people.viewer.save()
    answer = client_with(jwt_of(people.viewer, **changed)).get("/api/v1/me")
    assert answer.status_code == 401


def test_a_deleted_org_takes_its_tokens_along(people: People, token_of: Callable[..., str]) -> None:
    text = token_of(people.platform_admin, org=people.globex)
    Org.objects.filter(pk=people.globex.pk).delete()
    assert not works(text)
