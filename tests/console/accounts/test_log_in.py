"""Log-in, its throttle, log-out, passwords."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.conf import settings
from django.contrib.sessions.models import Session
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client
from django.utils import timezone

from console.accounts import hashing, throttle
from console.accounts.models import FailedLogin, User
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from tests.conftest import PASSWORD, People, make_user

pytestmark = pytest.mark.django_db
ARGON2 = "console.accounts.hashing.BoundedArgon2"


def log_in(client: Client, username: str = "ada", password: str = PASSWORD, **more: str) -> Any:
    return client.post("/log-in/", {"username": username, "password": password, **more})


def test_right_name_and_password_lead_to_the_page_that_was_wanted() -> None:
    make_user("ada")
    response = log_in(Client(), next="/audit/?q=x")
    assert response.status_code == 302
    assert response["Location"] == "/audit/?q=x"


def test_capitals_and_blanks_in_the_name_do_not_matter() -> None:
    make_user("ada")
    assert log_in(Client(), username=" Ada ").status_code == 302


@pytest.mark.parametrize(
    "target",
    [
        "https://evil.example/",
        "//evil.example/x",
        "//testserver//evil.example/x",
        "//testserver//\u2100/x",
        "javascript:alert(1)",
        "\\\\evil.example",
    ],
)
def test_log_in_never_leads_elsewhere(target: str) -> None:
    make_user("ada")
    assert log_in(Client(), next=target)["Location"] == "/"


def test_the_answer_does_not_tell_whether_the_name_exists() -> None:
    make_user("ada")
    known = log_in(Client(), password="wrong")
    unknown = log_in(Client(), username="nobody", password="wrong")
    assert known.status_code == unknown.status_code == 401
    sentence = b"Wrong user name or password."
    assert sentence in known.content
    assert sentence in unknown.content


def test_a_deactivated_user_can_neither_log_in_nor_go_on(browser_of: Callable[[User], Client]) -> None:
    user = make_user("ada")
    browser = browser_of(user)
    assert browser.get("/").status_code == 200
    User.objects.update(is_active=False)
    assert log_in(Client()).status_code == 401
    assert browser.get("/").status_code == 302


def test_too_many_failures_make_even_the_right_password_wait(settings: Any) -> None:
    make_user("ada")
    for _ in range(settings.ENVIRONMENT.login_attempts_max):
        assert log_in(Client(), password="wrong").status_code == 401
    response = log_in(Client())
    assert response.status_code == 429
    assert 0 < int(response["Retry-After"]) <= settings.ENVIRONMENT.login_window_seconds
    assert b"Try again in" in response.content


def test_the_wait_ends_with_its_window(settings: Any) -> None:
    make_user("ada")
    for _ in range(settings.ENVIRONMENT.login_attempts_max):
        assert throttle.count_attempt("ada", None) == 0
    assert throttle.count_attempt("ada", None) > 0
    FailedLogin.objects.update(window_ends_at=timezone.now())
    assert throttle.count_attempt("ada", None) == 0
    assert FailedLogin.objects.get().count == 1


@pytest.mark.django_db(transaction=True)
def test_attempts_at_the_same_time_do_not_outrun_the_limit(settings: Any) -> None:
    """The promise of the limit, under threads that all begin at once."""
    limit = settings.ENVIRONMENT.login_attempts_max
    barrier = threading.Barrier(limit * 2)
    looked_at: list[bool] = []

    def attempt() -> None:
        barrier.wait()
        try:
            looked_at.append(throttle.count_attempt("ada", None) == 0)
        finally:
            connection.close()

    threads = [threading.Thread(target=attempt) for _ in range(limit * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert looked_at.count(True) == limit


def test_one_name_that_waits_does_not_make_others_wait(settings: Any) -> None:
    make_user("ada")
    make_user("bob")
    for _ in range(settings.ENVIRONMENT.login_attempts_max):
        log_in(Client(), password="wrong")
    assert log_in(Client(), username="bob").status_code == 302


def test_an_address_that_guesses_many_names_waits(settings: Any) -> None:
    make_user("ada")
    for number in range(settings.ENVIRONMENT.login_attempts_max * throttle.PER_ADDRESS_FACTOR):
        throttle.count_attempt(f"name-{number}", "127.0.0.1")
    assert log_in(Client()).status_code == 429


def test_an_address_that_waits_makes_no_rows_for_further_names(settings: Any) -> None:
    for number in range(settings.ENVIRONMENT.login_attempts_max * throttle.PER_ADDRESS_FACTOR):
        throttle.count_attempt(f"name-{number}", "127.0.0.1")
    before = FailedLogin.objects.count()
    assert throttle.count_attempt("one-more", "127.0.0.1") > 0
    assert FailedLogin.objects.count() == before


def test_addresses_of_one_ipv6_network_wait_together(settings: Any) -> None:
    make_user("ada")
    for number in range(settings.ENVIRONMENT.login_attempts_max * throttle.PER_ADDRESS_FACTOR):
        throttle.count_attempt(f"name-{number}", f"2001:db8::{number:x}")
    assert throttle.count_attempt("ada", "2001:db8::ffff:1") > 0
    assert throttle.count_attempt("bob", "2001:db8:0:1::1") == 0


def test_the_throttle_is_asked_before_anything_is_hashed(settings: Any) -> None:
    settings.PASSWORD_HASHERS = [ARGON2]
    make_user("ada")
    for _ in range(settings.ENVIRONMENT.login_attempts_max):
        throttle.count_attempt("ada", None)
    with contextlib.ExitStack() as stack:
        for _ in range(hashing.AT_ONCE):  # whoever hashed now would have to wait
            stack.enter_context(hashing.SHARE.held("others", seconds=0))
        assert log_in(Client()).status_code == 429
    assert hashing.SHARE.waiting == 0


def test_who_gets_no_turn_to_be_hashed_is_told_when_to_come_again(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.PASSWORD_HASHERS = [ARGON2]
    make_user("ada")
    monkeypatch.setattr(hashing, "WAIT_SECONDS", 0.05)
    with contextlib.ExitStack() as stack:
        for _ in range(hashing.AT_ONCE):
            stack.enter_context(hashing.SHARE.held("others", seconds=0))
        response = log_in(Client())
    assert response.status_code == 503
    assert response["Retry-After"] == str(hashing.RETRY_SECONDS)
    assert b"Too many people are logging in" in response.content
    assert not FailedLogin.objects.filter(count__gt=0).exists(), "nobody has looked at it"
    assert log_in(Client()).status_code == 302


def test_success_forgets_the_failures_of_the_name() -> None:
    make_user("ada")
    for _ in range(3):
        log_in(Client(), password="wrong")
    log_in(Client())
    counts = FailedLogin.objects.values_list("count", flat=True)
    assert list(counts) == [3]  # the address's


def test_names_are_not_kept_in_the_clear() -> None:
    throttle.count_attempt("a-password-typed-here", "10.0.0.1")
    assert all(b"password" not in bytes(row.key_sha256) for row in FailedLogin.objects.all())


def test_log_out_ends_the_session(browser_of: Callable[[User], Client]) -> None:
    browser = browser_of(make_user("ada"))
    assert browser.get("/log-out/").status_code == 405
    assert browser.post("/log-out/").status_code == 302
    assert browser.get("/").status_code == 302


def test_a_session_whose_time_is_over_opens_nothing(browser_of: Callable[[User], Client]) -> None:
    browser = browser_of(make_user("ada"))
    assert browser.get("/tokens/").status_code == 200
    Session.objects.update(expire_date=timezone.now())
    assert browser.get("/tokens/").status_code == 302


def test_what_the_database_has_of_a_session_opens_none(browser_of: Callable[[User], Client]) -> None:
    browser = browser_of(make_user("vic"))
    assert browser.get("/tokens/").status_code == 200  # found again by its cookie
    name = settings.SESSION_COOKIE_NAME
    key = browser.cookies[name].value
    with connection.cursor() as cursor:
        cursor.execute("SELECT s::text, session_key FROM django_session s")
        [(row, stored)] = cursor.fetchall()
    assert key not in row
    thief = Client()
    thief.cookies[name] = stored
    assert thief.get("/tokens/").status_code == 302
    browser.post("/log-out/")
    thief.cookies[name] = key
    assert thief.get("/tokens/").status_code == 302


def test_forms_without_their_csrf_token_are_refused_with_a_page_that_helps() -> None:
    make_user("ada")
    client = Client(enforce_csrf_checks=True)
    response = log_in(client)
    assert response.status_code == 403
    assert b"This form has expired" in response.content


def test_whoever_has_a_generated_password_must_change_it_first(
    browser_of: Callable[[User], Client],
) -> None:
    user = make_user("ada", must_change_password=True)
    browser = browser_of(user)
    assert browser.get("/audit/")["Location"] == "/account/password/"
    assert browser.get("/api/v1/me").status_code == 403
    changed = browser.post(
        "/account/password/",
        {"current": PASSWORD, "new": "another-long-passphrase", "again": "another-long-passphrase"},
    )
    assert changed.status_code == 302
    assert browser.get("/audit/").status_code == 200


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"current": "wrong"}, "That is not your current password."),
        ({"new": PASSWORD, "again": PASSWORD}, "That is your current password."),
        ({"again": "something-else-entirely"}, "The two passwords are not the same."),
        ({"new": "short", "again": "short"}, "too short"),
        ({"new": "123456789012", "again": "123456789012"}, "entirely numeric"),
    ],
)
def test_a_bad_new_password_is_refused_with_its_reason(
    values: dict[str, str], sentence: str, browser_of: Callable[[User], Client]
) -> None:
    good = {"current": PASSWORD, "new": "another-long-passphrase", "again": "another-long-passphrase"}
    user = make_user("ada")
    response = browser_of(user).post("/account/password/", {**good, **values})
    assert response.status_code == 200
    assert sentence in response.content.decode()
    user.refresh_from_db()
    assert user.check_password(PASSWORD)


def test_the_current_password_is_not_guessed_without_a_wait(
    settings: Any, browser_of: Callable[[User], Client]
) -> None:
    user, new = make_user("ada"), "another-long-passphrase"
    browser = browser_of(user)

    def change(current: str) -> Any:
        return browser.post("/account/password/", {"current": current, "new": new, "again": new})

    for _ in range(settings.ENVIRONMENT.login_attempts_max):
        assert change("wrong").status_code == 200
    refused = change(PASSWORD)
    assert refused.status_code == 429
    assert int(refused["Retry-After"]) > 0
    assert b"Too many failed attempts" in refused.content
    throttle.forgive("ada", None)
    assert change(PASSWORD).status_code == 302


def test_a_password_that_is_reset_on_the_machine_ends_all_credentials_and_leaves_a_trace(
    browser_of: Callable[[User], Client], capsys: pytest.CaptureFixture[str]
) -> None:
    user = make_user("ada")
    browser = browser_of(user)
    page = browser.post("/tokens/", {"name": "bot", "scope": "read", "days": "30", "org": ""})
    token = page.content.decode().split('id="made">')[1].split("<")[0]
    call_command("changepassword", "Ada")
    password = capsys.readouterr().out.split()[-1]
    headers = {"authorization": f"Bearer {token}"}
    assert Client().get("/api/v1/me", headers=headers).status_code == 401
    assert browser.get("/").status_code == 302
    assert log_in(Client(), password=password).status_code == 302
    actions = AuditEntry.objects.values_list("action", flat=True)
    assert "user.reset_password" in actions
    with pytest.raises(CommandError, match="no user 'eve'"):
        call_command("changepassword", "eve")


def test_changing_the_password_logs_other_browsers_out(browser_of: Callable[[User], Client]) -> None:
    user = make_user("ada")
    here, elsewhere = browser_of(user), browser_of(user)
    new = "another-long-passphrase"
    here.post("/account/password/", {"current": PASSWORD, "new": new, "again": new})
    assert here.get("/").status_code == 200
    assert elsewhere.get("/").status_code == 302


def test_passwords_are_kept_as_argon2_only(settings: Any) -> None:
    settings.PASSWORD_HASHERS = [ARGON2]
    assert make_user("ada").password.startswith("argon2$argon2id$")


def test_a_new_user_gets_a_password_that_is_shown_once(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    browser = browser_of(people.platform_admin)
    page = browser.post("/new-user/", {"username": "newt", "platform_role": Role.VIEWER.value})
    generated = page.content.decode().split('id="generated">')[1].split("<")[0]
    assert log_in(Client(), username="newt", password=generated).status_code == 302
    assert generated not in browser.get("/users/newt/").content.decode()
    assert User.objects.get(username="newt").must_change_password


def test_the_last_platform_admin_stays(people: People, browser_of: Callable[[User], Client]) -> None:
    browser = browser_of(people.platform_admin)
    refused = browser.post("/users/ada/", {"platform_role": "", "is_active": "on"})
    assert refused.status_code == 403
    assert "last platform admin" in refused.content.decode()
    make_user("zoe", Role.PLATFORM_ADMIN)
    assert browser.post("/users/ada/", {"platform_role": "", "is_active": "on"}).status_code == 302
