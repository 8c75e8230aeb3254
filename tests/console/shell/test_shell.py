"""Health, versions, errors, headers, the first start."""

from __future__ import annotations

import html
import io
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest
from django import forms
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.migrations import AddConstraint, AddField, AddIndex, CreateModel
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.http import QueryDict
from django.template import engines
from django.test import Client, RequestFactory
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from console import urls
from console.accounts.models import User
from console.accounts.roles import Role
from console.audit.models import AuditEntry
from console.environment import MANAGE, PROJECT, STACK, bundled
from console.shell import request_context
from console.shell.context import AUDIT, HOME, ORGS, TOKENS, USERS
from console.shell.forms import LinesField
from console.shell.management.commands import prepare
from console.shell.pages import LINES_MAX, Refusing, check_version
from tests.conftest import People, make_user
from tests.prepared import database, migrated


@pytest.mark.django_db
def test_ready_when_everything_answers() -> None:
    response = Client().get("/-/health")
    assert response.status_code == 200
    assert {check["name"] for check in response.json()["checks"]} == {"postgres", "migrations", "redis"}


@pytest.mark.django_db
def test_without_its_redis_a_console_is_ready_and_says_what_is_missing(settings: Any) -> None:
    """All webs have the same one: if none were ready there would be no pages at all."""
    assert not Client().get("/-/health").json()["degraded"]
    settings.REDIS_URL = "redis://:secret@127.0.0.1:1/0"
    response = Client().get("/-/health")
    report = response.json()
    assert (response.status_code, report["ready"], report["degraded"]) == (200, True, True)
    [failed] = [check for check in report["checks"] if not check["ok"]]
    assert failed["reason"] == "Redis does not answer: ConnectionError"
    assert "secret" not in response.content.decode()


@pytest.mark.django_db
def test_not_ready_says_why() -> None:
    MigrationRecorder.Migration.objects.filter(app="saved").delete()
    response = Client().get("/-/health")
    report = response.json()
    assert (response.status_code, report["live"], report["ready"]) == (503, True, False)
    [failed] = [check for check in report["checks"] if not check["ok"]]
    assert failed["reason"].startswith("1 migration is not applied")


@pytest.mark.django_db
def test_versions_are_for_those_who_are_known(people: People, api_of: Callable[..., Client]) -> None:
    assert Client().get("/-/versions").status_code == 401
    assert Client(headers={"authorization": "Bearer tgr_x"}).get("/-/versions").status_code == 401
    versions = api_of(people.viewer).get("/-/versions").json()
    assert versions["django"].startswith("5.2")
    assert versions["postgresql"][0].isdigit()
    assert versions["redis server"][0].isdigit()


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/log-in/", "/nope", "/api/v1/me", "/-/health"])
def test_every_answer_has_its_security_headers(path: str) -> None:
    response = Client().get(path)
    policy = response["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response["X-Content-Type-Options"] == "nosniff"
    assert response["X-Frame-Options"] == "DENY"
    assert response["Referrer-Policy"] == "same-origin"
    assert response["Cache-Control"]
    assert response["X-Request-ID"]


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/nope", "/orgs/nope/", "/audit/99/"])
def test_a_404_helps(path: str, browser_of: Callable[[User], Client]) -> None:
    page = browser_of(make_user("ada", Role.PLATFORM_ADMIN)).get(path)
    assert page.status_code == 404
    assert "Not found" in page.content.decode()
    assert page["X-Request-ID"] in page.content.decode()


@pytest.mark.django_db
def test_the_address_of_a_form_that_is_opened_as_a_page_says_so(
    browser_of: Callable[[User], Client],
) -> None:
    page = browser_of(make_user("ada", Role.PLATFORM_ADMIN)).get("/tokens/x/revoke/")
    assert (page.status_code, page["Allow"]) == (405, "POST")
    assert "Nothing was changed." in page.content.decode()


@pytest.mark.django_db
def test_a_fault_of_ours_is_a_page_with_the_request_id(
    browser_of: Callable[[User], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("console.shell.presence.presence", fail)
    browser = browser_of(make_user("ada"))
    browser.raise_request_exception = False
    page = browser.get("/")
    assert page.status_code == 500
    assert "Internal error" in page.content.decode()
    assert "a bug" not in page.content.decode()
    assert page["X-Request-ID"] in page.content.decode()


@pytest.mark.parametrize(
    ("proxies", "forwarded", "address"),
    [
        (0, "6.6.6.6", "10.0.0.9"),
        (1, "6.6.6.6, 1.2.3.4", "1.2.3.4"),
        (2, "1.2.3.4, 10.0.0.1", "1.2.3.4"),
        (2, "1.2.3.4", "10.0.0.9"),
        (1, "", "10.0.0.9"),
        (1, "1.2.3.4:5678", "1.2.3.4"),
        (1, "[2001:db8::7]:443", "2001:db8::7"),
        (1, "2001:db8::7", "2001:db8::7"),
        (1, "unknown", None),
    ],
)
def test_only_as_many_proxies_as_there_are_are_believed(
    proxies: int, forwarded: str, address: str | None, settings: Any, rf: Any
) -> None:
    from dataclasses import replace

    settings.ENVIRONMENT = replace(settings.ENVIRONMENT, trusted_proxies=proxies)
    request = rf.get("/", REMOTE_ADDR="10.0.0.9", headers={"X-Forwarded-For": forwarded})
    assert request_context.client_address(request) == address


@pytest.mark.django_db
def test_preparing_makes_the_first_admin_and_tells_the_password_once() -> None:
    def prepared() -> list[dict[str, Any]]:
        out = io.StringIO()
        call_command("prepare", stdout=out)
        return [json.loads(line) for line in out.getvalue().splitlines()]

    [admin] = [fact["admin"] for fact in prepared() if "admin" in fact]
    user = User.objects.get(username=admin["username"])
    assert user.platform_role == Role.PLATFORM_ADMIN
    assert user.check_password(admin["password"])
    assert admin["password"] not in user.password
    entry = AuditEntry.objects.get()
    assert (entry.actor_name, entry.action) == ("system", "user.create")
    assert not any("admin" in fact for fact in prepared())


@pytest.mark.django_db
def test_who_may_not_migrate_waits_until_somebody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    call_command("prepare", wait="0s", stdout=io.StringIO())
    assert not User.objects.exists(), "only what is not in the database is prepared"
    applied = MigrationRecorder.Migration.objects.filter(app="saved")
    rows = list(applied)
    applied.delete()
    with pytest.raises(CommandError, match="not within 0 s: nobody has migrated the database"):
        call_command("prepare", wait="0s", stdout=io.StringIO())
    monkeypatch.setattr(prepare, "sleep", lambda _: applied.bulk_create(rows))  # somebody migrates
    call_command("prepare", wait="1m", stdout=io.StringIO())
    with pytest.raises(CommandError, match="--wait: "):
        call_command("prepare", wait="soon", stdout=io.StringIO())


# The first process of a container, which gets a signal when it begins to wait.
WAITING = """
import os, runpy, sys, time
from telemetry import stop

_, number, *sys.argv[1:] = sys.argv
stop.FIRST = os.getpid()
time.sleep = lambda _: os.kill(os.getpid(), int(number))
runpy.run_module("console.manage", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_who_waits_ends_when_it_is_told_to(number: signal.Signals) -> None:
    """Also as the first process of a container, and without a traceback. Nobody migrates the database
    that the tests' servers begin with."""
    done = subprocess.run(
        [sys.executable, "-c", WAITING, str(int(number)), "prepare", "--wait=1h"],
        cwd=PROJECT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


@pytest.fixture
def copied(django_db_blocker: Any) -> Iterator[str]:
    """The URL of a migrated database of one's own, which `connection` is connected to."""

    def leave() -> None:
        connection.close()
        connection.close_pool()  # type: ignore[attr-defined]

    with database(migrated()) as url, django_db_blocker.unblock(), pytest.MonkeyPatch.context() as patch:
        leave()
        patch.setitem(connection.settings_dict, "NAME", conninfo_to_dict(url)["dbname"])
        yield url
        leave()


@pytest.fixture
def behind(copied: str) -> str:
    """A database that lacks the last migration of policies."""
    loader = MigrationExecutor(connection).loader
    [leaf] = loader.graph.leaf_nodes("policies")
    [before] = [one for one in loader.disk_migrations[leaf].dependencies if one[0] == "policies"]
    call_command("migrate", *before, verbosity=0)
    return copied


@pytest.mark.slow
def test_nobody_waits_behind_a_migration_that_waits_for_a_table(
    behind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As beside a backup, which has all tables until it ends."""
    monkeypatch.setattr(prepare, "LOCK_SECONDS", 0.2)
    with psycopg.connect(behind, application_name="a backup") as backup:
        backup.execute("SET idle_in_transaction_session_timeout = '20s'")  # so long, if it is waited for
        tables = [
            name
            for [name] in backup.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        ]
        for table in tables:
            backup.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(sql.Identifier(table)))
        waits = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 1:
                with psycopg.connect(behind) as web:
                    web.execute("SET statement_timeout = '2s'")
                    for table in tables:
                        web.execute(sql.SQL("SELECT FROM {} LIMIT 1").format(sql.Identifier(table)))
            else:
                backup.rollback()

        monkeypatch.setattr(prepare, "sleep", sleep)
        call_command("prepare", stdout=io.StringIO())
        assert len(waits) == 2
        assert f"in use by PostgreSQL's process {backup.info.backend_pid} (" in capfd.readouterr().err
    assert not prepare._pending()


@pytest.mark.slow
def test_a_table_that_is_in_use_for_too_long_is_a_reason_not_to_migrate(
    behind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(prepare, "LOCKED_SECONDS_MAX", 0.0)
    with psycopg.connect(behind, application_name="a backup") as backup:
        backup.execute("SET idle_in_transaction_session_timeout = '20s'")
        for [table] in backup.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        ).fetchall():
            backup.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(sql.Identifier(table)))
        with pytest.raises(CommandError, match=r"in use by PostgreSQL's process \d+ \(.*a backup\)"):
            call_command("prepare", stdout=io.StringIO())
    assert prepare._pending(), "all of it or nothing"


@pytest.mark.slow
def test_who_waits_for_another_prepare_has_no_snapshot(
    copied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that the other one builds concurrently waits for all who have one."""
    with psycopg.connect(copied, autocommit=True) as other:
        other.execute("SET idle_session_timeout = '20s'")
        other.execute("SELECT pg_advisory_lock(%s)", [prepare.MIGRATION_LOCK])
        waits = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            other.execute("CREATE INDEX CONCURRENTLY by_name ON orgs_org (id)")
            other.execute("SELECT pg_advisory_unlock(%s)", [prepare.MIGRATION_LOCK])

        monkeypatch.setattr(prepare, "sleep", sleep)
        call_command("prepare", stdout=io.StringIO(), stderr=io.StringIO())
    assert len(waits) == 1


@pytest.mark.django_db
def test_a_database_that_no_migrations_lead_from_is_refused_in_words() -> None:
    applied = MigrationRecorder.Migration.objects.filter(app="fleet")
    applied.delete()
    MigrationRecorder.Migration.objects.create(app="fleet", name="0001_release_0_1")
    with pytest.raises(CommandError, match=r"made by a development version .* Partly migrated: fleet"):
        call_command("prepare", stdout=io.StringIO())


@pytest.mark.django_db
def test_the_navigation_shows_what_one_may_use(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    keys = [item.key for item in (HOME, ORGS, AUDIT, TOKENS, USERS)]
    assert len(set(keys)) == len(keys)
    assert "/users/" in browser_of(people.platform_admin).get("/").content.decode()
    assert "/users/" not in browser_of(people.org_admin).get("/").content.decode()


@pytest.mark.django_db
def test_every_page_of_a_section_is_marked_in_the_navigation(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    admin = browser_of(people.platform_admin)
    pages = [route.pattern for route in urls.urlpatterns]
    plain = [str(one) for one in pages if re.fullmatch(r"(new-)?[a-z-]+/", str(one))]
    without = set()
    for path in plain:
        page = admin.get(f"/{path}")
        if page.status_code == 200 and 'aria-current="page"' not in page.content.decode():
            without.add(path)
    assert without == {"account/", "dead-letters/", "search/", "views/"}  # of no section


def test_no_migration_is_missing(db: None) -> None:
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


def test_a_new_table_is_made_with_its_constraints_and_indices() -> None:
    """What is added later makes Django render all related models anew: a third of what all migrations
    take. A table that gets a field later, for another that refers to it, gets them after that."""
    added = []
    for (app, name), migration in MigrationLoader(None).disk_migrations.items():
        made = {one.name_lower for one in migration.operations if isinstance(one, CreateModel)}
        grown = {one.model_name_lower for one in migration.operations if isinstance(one, AddField)}
        added += [
            f"{app}.{name}: {one.describe()}"
            for one in migration.operations
            if isinstance(one, (AddConstraint, AddIndex)) and one.model_name_lower in made - grown
        ]
    assert added == []


@pytest.mark.django_db
def test_a_command_is_shown_where_it_works(
    people: People, browser_of: Callable[[User], Client], settings: Any
) -> None:
    """Where something else supervises the processes, the stack's command knows nothing of their logs."""

    def shown() -> str:
        return " ".join(browser_of(people.platform_admin).get("/?org=acme").content.decode().split())

    settings.EMBEDDED = True
    assert f"<code>{STACK} logs ingest</code> shows" in shown()
    settings.EMBEDDED = False
    assert "The log of ingest shows" in shown()


@pytest.mark.django_db
def test_the_way_back_in_is_a_command_of_this_installation() -> None:
    assert f"<code>{MANAGE}" in Client().get("/log-in/").content.decode()


@pytest.mark.django_db
def test_a_form_without_a_page_of_its_own_names_its_fields_as_people_see_them(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    admin = browser_of(people.org_admin)
    page = admin.post("/orgs/acme/members/", {"username": "", "role": ""}, follow=True)
    assert "User name: This field is required." in page.content.decode()


def test_a_cell_without_anything_to_see_is_empty_so_that_cards_leave_it_out() -> None:
    source = """{% table "Name" "Reason" "Spine" label="Things" %}<tr><td>a </td>
        <td>
        </td><td><span> </span> </td></tr>{% endtable %}"""
    shown = engines["django"].from_string(source).render()
    assert '<td data-label="Name">a </td>' in shown
    assert '<td data-label="Reason"></td><td data-label="Spine"></td>' in shown


def test_cells_are_those_of_their_columns() -> None:
    """On narrow screens tables are cards, and each value has its label beside it."""
    source = """{% table "Name" "#Size" "~Delete" label="Things" %}{% for one in "ab" %}
        <tr class="x"><th scope="row">{{ one }}</th><td>1</td><td>Delete</td></tr>{% endfor %}
        <tr><td colspan="2">none</td></tr><tr><td data-label="Own">b</td><td>2</td></tr>{% endtable %}"""
    shown = engines["django"].from_string(source).render()
    rows = re.findall("<tr.*?</tr>", shown.partition("<tbody>")[2], re.DOTALL)
    assert rows == [
        *(
            f'<tr class="x"><th scope="row" data-label="Name">{one}</th>'
            '<td data-label="Size" class="number">1</td><td>Delete</td></tr>'
            for one in "ab"
        ),
        '<tr><td colspan="2">none</td></tr>',
        '<tr><td data-label="Own">b</td><td data-label="Size" class="number">2</td></tr>',
    ]


def test_what_is_beside_the_heading_of_a_panel_is_of_that_panel_alone() -> None:
    source = """{% panel "a" "First" %}{% beside %}<a href="/">All</a>{% endbeside %}one{% endpanel %}
        {% panel "b" "Second" %}two{% endpanel %}"""
    shown = engines["django"].from_string(source).render()
    headers = re.findall("<header>(.*?)</header>", shown)
    assert headers == ['<h2 id="a">First</h2><a href="/">All</a>', '<h2 id="b">Second</h2>']


def test_columns_are_named_one_by_one_or_with_bars_between() -> None:
    one_by_one = """{% table "Name" "#Size" "~Delete" label="Things" %}{% endtable %}"""
    with_bars = """{% table "Name|#Size" no|yesno:"~Drop," "~Delete" label="Things" %}{% endtable %}"""
    shown = [engines["django"].from_string(source).render() for source in (one_by_one, with_bars)]
    assert shown[0] == shown[1]
    assert shown[0].count("<th ") == 3


@pytest.mark.parametrize(
    "value", ["ax-7", "it's", "$(touch x) `touch x` $HOME", 'a"b\\', "a; touch x\n& <b>&amp;</b>"]
)
def test_what_people_and_peers_name_is_data_in_a_command(value: str) -> None:
    source = """{% api_command %}
        POST /orgs?q={{ value|urlencode:"" }}
        If-Match: "{{ value|cut:newline }}"
        Idempotency-Key: $(date +%s%N)

        {{ body }}
    {% endapi_command %}"""
    request = RequestFactory().get("/")
    context = {"value": value, "body": json.dumps({"name": value}), "newline": "\n"}
    shown = html.unescape(engines["django"].from_string(source).render(context, request))
    assert '-H "Authorization: Bearer $TIDEGATE_TOKEN"' in shown
    assert '-H "Idempotency-Key: $(date +%s%N)"' in shown
    command = shlex.split(shown.partition(">")[2].rpartition("<")[0])
    assert command[:4] == ["curl", "-X", "POST", f"http://testserver/api/v1/orgs?q={quote(value, '')}"]
    [if_match] = [word for word in command if word.startswith("If-Match")]
    assert if_match == f'If-Match: "{value.replace(chr(10), "")}"'
    assert json.loads(command[-1]) == {"name": value}
    quoted = shown.replace('"Authorization: Bearer $TIDEGATE_TOKEN"', "").replace("$(date +%s%N)", "")
    assert "$" not in re.sub(r"'[^']*'", "", quoted)


def test_a_question_before_a_button_is_text_whoever_wrote_what_it_names() -> None:
    source = """{% post_button "Revoke" "token-revoke" "abc" look="danger" %}
        Revoke {{ name }}?
        Its clients stop.
    {% endpost_button %}"""
    name = '"><script>'
    shown = engines["django"].from_string(source).render({"name": name}, RequestFactory().get("/"))
    assert 'action="/tokens/abc/revoke/"' in shown
    assert 'class="button button--danger"' in shown
    assert 'name="csrfmiddlewaretoken"' in shown
    [question] = re.findall(r'data-confirm="([^"]*)"', shown)
    assert html.unescape(question) == f"Revoke {name}? Its clients stop."
    assert "<script>" not in shown


def test_a_chart_with_a_panel_of_its_own_is_in_no_other_panel() -> None:
    panels = r"(?s)<section class=\"panel\b.*?</section>|{% panel .*?{% endpanel %}"
    found = []
    for path in sorted(bundled("templates").rglob("*.html")):
        found += [path.name for shown in re.findall(panels, path.read_text()) if "{% chart " in shown]
    assert found == []


# Forms of what others may have changed


class AForm(forms.Form):
    text = LinesField(required=False)
    kind = forms.ChoiceField(choices=[("a", "the first"), ("b", "the second")])
    version = forms.IntegerField(widget=forms.HiddenInput)


def refused(text: str, now: str, *, shown: int = 2) -> AForm:
    """A form of version 1, on a page that shows version `shown` of what has version 3 by now."""
    data = QueryDict(urlencode({"text": text, "kind": "b", "version": 1}))
    form = AForm(data, initial={"text": now, "kind": "a", "version": shown})
    assert form.is_valid()
    with Refusing(form, ValidationError):
        check_version(form, 3)
    assert "It has changed since" in str(form.non_field_errors())
    return form


def test_a_refused_form_shows_what_is_in_force_and_sends_the_version_of_that() -> None:
    form = refused("x: 1\r\ny: 2\r\n", "x: 1\ny: 3\nz: 4\n")
    assert form.errors["text"] == ["Now: without “y: 2”, with “y: 3”, with “z: 4”."]
    assert form.errors["kind"] == ["Now: the first."]
    assert form["version"].value() == "2", "nobody has seen the third version"


@pytest.mark.parametrize(
    ("text", "now", "sentence"),
    [
        ("args:\r\n- a\r\n- b", "args:\n- b\n- a\n", "Now: with “- b”, without “- b”."),
        ("a:\r\n  b:\r\n  c: 1", "a:\n  b:\n    c: 1\n", "Now: without “  c: 1”, with “    c: 1”."),
    ],
)
def test_a_refused_form_shows_lines_that_only_have_another_place(
    text: str, now: str, sentence: str
) -> None:
    assert refused(text, now).errors["text"] == [sentence]


def test_a_refused_form_shows_only_so_much_of_what_differs() -> None:
    assert "text" not in refused("x: 1\r\ny: 2", "x: 1\ny: 2\n").errors, "as people read it"
    many = "\n".join(map(str, range(LINES_MAX + 7)))
    sentence = str(refused("", many).errors["text"][0])
    assert sentence.count("with “") == LINES_MAX
    assert sentence.endswith("and 7 more lines.")
