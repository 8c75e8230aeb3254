"""Personal API tokens and JWTs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import jwt
import pytest
from django.test import Client
from django.utils import timezone

from console.accounts import tokens
from console.accounts.models import ApiToken, User
from console.accounts.principal import Refused
from console.environment import JwtAlgorithm
from tests.conftest import People

pytestmark = pytest.mark.django_db


def me(text: str) -> Any:
    return Client().get("/api/v1/me", headers={"authorization": f"Bearer {text}"})


def test_only_a_hash_of_the_secret_is_kept(people: People, token_of: Callable[..., str]) -> None:
    text = token_of(people.viewer)
    secret = text.split("_", 2)[2]
    row = ApiToken.objects.values().get()
    assert secret not in repr(row)
    assert me(text).json()["username"] == "vic"


def test_the_prefix_shows_the_kind(people: People, token_of: Callable[..., str]) -> None:
    assert token_of(people.viewer, read_only=True).startswith("tgr_")
    assert token_of(people.viewer).startswith("tgw_")


def test_a_token_can_not_be_turned_into_one_that_writes(
    people: People, token_of: Callable[..., str]
) -> None:
    text = token_of(people.viewer, read_only=True)
    assert me(text.replace("tgr_", "tgw_")).status_code == 401


@pytest.mark.parametrize(
    "text", ["tgr_", "tgr_x", "tgw_0123456789ab_" + "x" * 43, "tgr_\u00e9", "x" * 5000, ""]
)
def test_nonsense_is_401_with_a_challenge(text: str, people: People) -> None:
    response = me(text)
    assert response.status_code == 401
    assert response["WWW-Authenticate"].startswith("Bearer")


def test_a_revoked_token_opens_nothing_at_once(
    people: People, api_of: Callable[..., Client], token_of: Callable[..., str]
) -> None:
    text = token_of(people.viewer)
    public_id = text.split("_")[1]
    assert api_of(people.viewer).delete(f"/api/v1/tokens/{public_id}").status_code == 204
    assert me(text).status_code == 401
    assert api_of(people.viewer).delete(f"/api/v1/tokens/{public_id}").status_code == 204


def test_nobody_revokes_the_token_of_somebody_else(
    people: People, api_of: Callable[..., Client], token_of: Callable[..., str]
) -> None:
    text = token_of(people.viewer)
    client = api_of(people.stranger)
    assert client.delete(f"/api/v1/tokens/{text.split('_')[1]}").status_code == 404
    assert me(text).status_code == 200


def test_an_expired_token_opens_nothing(people: People, token_of: Callable[..., str]) -> None:
    text = token_of(people.viewer)
    ApiToken.objects.update(expires_at=timezone.now())
    assert me(text).status_code == 401


def test_a_deactivated_user_has_no_tokens_that_work(
    people: People, token_of: Callable[..., str]
) -> None:
    text = token_of(people.viewer)
    User.objects.filter(username="vic").update(is_active=False)
    assert me(text).status_code == 401


def test_last_use_is_noted_but_not_at_every_call(
    people: People, token_of: Callable[..., str], django_assert_num_queries: Any
) -> None:
    text = token_of(people.viewer)
    me(text)
    first = ApiToken.objects.get().last_used_at
    assert first is not None
    me(text)
    assert ApiToken.objects.get().last_used_at == first


def test_a_token_makes_none_that_may_more_or_live_longer(people: People) -> None:
    admin = people.principal("platform_admin")
    ends = timezone.now() + timedelta(days=10)
    confined, _ = tokens.issue(admin, name="a", read_only=False, org=people.acme, expires_at=ends)
    by_token = replace(admin, token=confined)
    with pytest.raises(Refused, match="for one org"):
        tokens.issue(by_token, name="b", read_only=False, org=None, expires_at=ends)
    later = ends + timedelta(seconds=1)
    with pytest.raises(Refused, match="outlives"):
        tokens.issue(by_token, name="b", read_only=True, org=people.acme, expires_at=later)
    tokens.issue(by_token, name="b", read_only=True, org=people.acme, expires_at=ends)


def test_tokens_have_a_limit(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "ACTIVE_TOKENS_MAX", 1)
    principal = people.principal("viewer")
    ends = timezone.now() + timedelta(days=1)
    tokens.issue(principal, name="a", read_only=True, org=None, expires_at=ends)
    with pytest.raises(Refused, match="Revoke some first"):
        tokens.issue(principal, name="b", read_only=True, org=None, expires_at=ends)


def test_the_page_shows_a_new_token_once(people: People, browser_of: Callable[[User], Client]) -> None:
    browser = browser_of(people.viewer)
    page = browser.post("/tokens/", {"name": "bot", "scope": "read", "days": "30", "org": ""})
    text = page.content.decode().split('id="made">')[1].split("<")[0]
    assert me(text).status_code == 200
    assert text not in browser.get("/tokens/").content.decode()


KEY = "a shared secret of the issuer and the console"


@pytest.fixture
def issuer(settings: Any) -> None:
    settings.ENVIRONMENT = replace(
        settings.ENVIRONMENT,
        jwt_algorithm=JwtAlgorithm.HS256,
        jwt_key=KEY,
        jwt_issuer="https://id.example",
        jwt_audience="tidegate",
    )


def claims(**changed: Any) -> dict[str, Any]:
    now = int(time.time())
    good = {
        "sub": "vic",
        "iss": "https://id.example",
        "aud": "tidegate",
        "iat": now,
        "exp": now + 60,
    }
    return {name: value for name, value in {**good, **changed}.items() if value is not None}


def test_a_jwt_of_the_issuer_is_accepted(people: People, issuer: None) -> None:
    response = me(jwt.encode(claims(), KEY, algorithm="HS256"))
    assert (response.json()["username"], response.json()["means"]) == ("vic", "jwt")


@pytest.mark.parametrize(
    "changed",
    [
        {"exp": 1},
        {"exp": None},
        {"iat": None},
        {"aud": "other"},
        {"aud": None},
        {"iss": "https://evil.example"},
        {"iss": None},
        {"sub": None},
        {"sub": "nobody"},
        {"nbf": 2**33},
    ],
    ids=str,
)
def test_a_jwt_with_a_wrong_or_missing_claim_is_refused(
    changed: dict[str, Any], people: People, issuer: None
) -> None:
    assert me(jwt.encode(claims(**changed), KEY, algorithm="HS256")).status_code == 401


def test_a_jwt_can_not_choose_how_it_is_checked(people: People, issuer: None) -> None:
    assert me(jwt.encode(claims(), "", algorithm="none")).status_code == 401
    assert me(jwt.encode(claims(), KEY * 2, algorithm="HS512")).status_code == 401
    assert me(jwt.encode(claims(), "x" * 40, algorithm="HS256")).status_code == 401


def test_without_an_issuer_no_jwt_is_accepted(people: People) -> None:
    response = me(jwt.encode(claims(), KEY, algorithm="HS256"))
    assert response.status_code == 401
    assert "accepts no JWTs" in response.json()["detail"]


def test_a_header_without_a_token_is_called_so() -> None:
    """As of a script whose variable was never set."""
    response = me("")
    assert response.status_code == 401
    assert response.json()["detail"] == "The Authorization header has no token."
