"""Every allowed change can be recorded: no name is too long for the trail or for another column."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.apps import apps
from django.db import models, transaction
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from console.accounts.models import ApiToken, User
from console.accounts.principal import SYSTEM
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from console.audit.services import Subject, cut, record
from console.orgs.models import Membership, Org
from tests.conftest import make_user

AUTHORS = {"actor_name", "author", "author_name", "created_by", "asked_by", "acknowledged_by"}


def longest(model: type[models.Model], field: str) -> int:
    found = model._meta.get_field(field)
    assert isinstance(found, models.CharField)
    assert found.max_length is not None
    return int(found.max_length)


def test_whatever_stores_an_author_has_room_for_the_longest() -> None:
    by_token = longest(User, "username") + len(" by token ") + longest(ApiToken, "name")
    short = {
        f"{model.__name__}.{field.name}": field.max_length
        for model in apps.get_models()
        for field in model._meta.get_fields()
        if isinstance(field, models.CharField)
        and field.name in AUTHORS
        and (field.max_length or 0) < by_token
    }
    assert short == {}


@pytest.mark.django_db
def test_a_member_with_the_longest_name_of_an_org_with_the_longest_is_recorded(
    token_of: Callable[..., str],
) -> None:
    org = Org.objects.create(slug="o" * longest(Org, "slug"), name="O" * longest(Org, "name"))
    admin = make_user("a" * longest(User, "username"))
    Membership.objects.create(org=org, user=admin, role=Role.ORG_ADMIN)
    make_user("m" * longest(User, "username"))
    client = Client(headers={"authorization": f"Bearer {token_of(admin)}"})
    ApiToken.objects.update(name="t" * longest(ApiToken, "name"))
    answer = client.put(
        f"/api/v1/orgs/{org.slug}/members/{'m' * 63}",
        {"role": "viewer", "reason": "r" * 500},
        content_type="application/json",
    )
    assert answer.status_code == 200, answer.content
    entry = AuditEntry.objects.get(action="org.member")
    assert entry.object_id == f"{org.slug}/{'m' * 63}"
    assert entry.actor_name == f"{'a' * 63} by token {'t' * 120}"


@pytest.mark.django_db
def test_a_sentence_that_stands_for_a_name_is_cut_and_says_so() -> None:
    with transaction.atomic():
        entry = record(SYSTEM, "tests.long", Subject("test", 1, "n" * 400), reason="r" * 600)
    entry.refresh_from_db()
    assert entry.object_name == "n" * 159 + "…"
    assert entry.reason == "r" * 499 + "…"


@given(text=st.text(max_size=50), most=st.integers(1, 50))
def test_what_is_cut_fits_and_what_fits_is_not_cut(text: str, most: int) -> None:
    found = cut(text, most)
    assert len(found) <= most
    assert (found == text) == (len(text) <= most) or found == text
