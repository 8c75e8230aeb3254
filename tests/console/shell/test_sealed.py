from __future__ import annotations

import io
from typing import Any

import pytest
from django.core.exceptions import FieldError
from django.core.management import CommandError, call_command
from django.db import connection
from django.utils import timezone

from console.api.models import StoredAnswer
from console.fleet.models import Driver
from console.shell.sealed import CannotUnseal, seal, unseal

FORMER, NEW = "f" * 50, "n" * 50


def test_what_is_sealed_opens_again_and_looks_different_each_time() -> None:
    assert unseal(seal(b"\x00secret\xff")) == b"\x00secret\xff"
    assert seal(b"secret") != seal(b"secret")
    assert "secret" not in seal(b"secret")


def test_a_former_secret_key_opens_what_it_sealed_as_long_as_it_is_a_fallback(settings: Any) -> None:
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = FORMER, []
    sealed = seal(b"secret")
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = NEW, [FORMER]
    assert unseal(sealed) == b"secret"
    settings.SECRET_KEY_FALLBACKS = []
    with pytest.raises(CannotUnseal, match="TIDEGATE_SECRET_KEY_FALLBACKS"):
        unseal(sealed)


def test_what_was_altered_does_not_open() -> None:
    sealed = seal(b"secret")
    flipped = sealed[:-2] + ("A" if sealed[-2] != "A" else "B") + sealed[-1]
    with pytest.raises(CannotUnseal):
        unseal(flipped)
    with pytest.raises(CannotUnseal):
        unseal("nonsense")


def test_the_database_never_has_it_in_the_open(db: None) -> None:
    driver = Driver.objects.create(
        name="d",
        control_url="http://127.0.0.1:8420",
        control_token="a very secret token",
        heartbeat_sha256=bytes(32),
        joined_at=timezone.now(),
    )
    with connection.cursor() as cursor:
        cursor.execute("SELECT control_token FROM fleet_driver WHERE name = 'd'")
        stored = cursor.fetchone()[0]
    assert "secret" not in stored
    assert Driver.objects.get(pk=driver.pk).control_token == "a very secret token"
    with pytest.raises(FieldError, match="cannot be searched"):
        Driver.objects.filter(control_token="a very secret token").exists()


def test_no_secret_is_stored_as_none(db: None) -> None:
    assert Driver.objects.create(name="d").control_token == ""
    with connection.cursor() as cursor:
        cursor.execute("SELECT control_token FROM fleet_driver")
        assert cursor.fetchone()[0] == ""


def test_what_is_sealed_anew_needs_the_former_key_no_more(db: None, settings: Any) -> None:
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = FORMER, []
    for number in range(3):
        Driver.objects.create(name=f"d{number}", control_token=f"token {number}")
        answer = StoredAnswer(scope_sha256=bytes([number]), body_sha256=b"", status=201, headers={})
        answer.secret_body = "a secret" if number == 1 else None
        answer.save()
    settings.SECRET_KEY = NEW
    with pytest.raises(CommandError, match="TIDEGATE_SECRET_KEY_FALLBACKS"):
        call_command("reseal")
    settings.SECRET_KEY_FALLBACKS = [FORMER]
    said = io.StringIO()
    call_command("reseal", stdout=said)
    assert "Driver: 3 rows sealed anew" in said.getvalue()
    assert "StoredAnswer: 1 rows sealed anew" in said.getvalue()
    settings.SECRET_KEY_FALLBACKS = []
    tokens = [driver.control_token for driver in Driver.objects.order_by("name")]
    assert tokens == ["token 0", "token 1", "token 2"]
    answers = StoredAnswer.objects.order_by("pk").values_list("secret_body", flat=True)
    assert list(answers) == [None, "a secret", None]
