"""People, an org and ways to ask, for every test that wants them."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.db import connection, transaction
from django.template import Template
from django.test import Client, TransactionTestCase, override_settings
from django.test import utils as django_tests
from django.utils import timezone
from pytest_django import DjangoDbBlocker

from console.accounts import tokens
from console.accounts.models import User
from console.accounts.principal import Means, Principal
from console.accounts.roles import Role
from console.accounts.services import principal_for
from console.orgs.models import Membership, Org
from console.shell import request_context
from tests.prepared import collect_static_files, migrated
from tests.rows import Rows

PASSWORD = "correct horse battery staple"


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings: None) -> None:
    """Let the database of each worker be a copy of one that is migrated."""
    connection.settings_dict["TEST"]["TEMPLATE"] = migrated()


@pytest.fixture(scope="session")
def django_db_keepdb() -> bool:
    """Leave each worker's database to the end of its server, which takes it along."""
    return True


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> None:
    """Let a test of transactions leave what the migrations have made, at once. Django would truncate
    every table, and then make content types and permissions again."""
    with django_db_blocker.unblock():
        rows = Rows.of_now()
    TransactionTestCase._fixture_teardown = lambda _: rows.restore()  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def static_files() -> None:
    """Pages name static files by their hash, so those have to be collected."""
    collect_static_files()


@pytest.fixture
def take_picture(pytestconfig: pytest.Config) -> Callable[[Any, str], None]:
    """Save a picture of a browser's page under a name, if `--pictures` says where."""
    directory: Path | None = pytestconfig.getoption("pictures")

    def take(page: Any, name: str) -> None:
        if directory:
            directory.mkdir(parents=True, exist_ok=True)
            page.evaluate("scrollTo(0, 0)")  # the menu stays at the top of what is seen
            page.screenshot(path=directory / f"{name}.png", full_page=True)

    return take


@pytest.fixture(scope="session", autouse=True)
def _fast_passwords() -> Iterator[None]:
    """Argon2 is slow on purpose; its own test asks for it."""
    with override_settings(PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"]):
        yield


@pytest.fixture(scope="session", autouse=True)
def _authorities_read_once() -> Iterator[None]:
    """httpx would read the system's authorities for each client, and for each request without one: 23 ms
    of a processor, though nearly all of them go to addresses without TLS."""
    of_system = httpx.create_ssl_context()

    def create(**asked: Any) -> ssl.SSLContext:
        if asked["verify"] is True and asked["cert"] is None:
            return of_system
        return httpx.create_ssl_context(**asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", create)
        yield


@pytest.fixture(scope="session", autouse=True)
def _plain_templates(django_test_environment: None) -> None:
    """Django would remember each template of a page, with a copy of all that it was given, for tests
    that ask. Few of ours do; the others look at what the page says."""
    Template._render = lambda self, context: self.nodelist.render(context)  # type: ignore[attr-defined]


@pytest.fixture
def contexts_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages remember what their templates were given: `answer.context`."""
    monkeypatch.setattr(Template, "_render", django_tests.instrumented_test_render)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def rows_of_module(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """Let fixtures of a module make rows that all its tests find and none of them changes for another:
    each test has a savepoint, and after the last of them all is rolled back."""
    around = transaction.atomic()
    with django_db_blocker.unblock():
        around.__enter__()
    yield
    with django_db_blocker.unblock():
        transaction.set_rollback(True)
        around.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def _no_request() -> Iterator[None]:
    request_context.enter(None)
    yield
    request_context.enter(None)


def make_user(username: str, platform_role: Role | None = None, **more: Any) -> User:
    user = user_of(username, platform_role, **more)
    user.save()
    return user


def user_of(username: str, platform_role: Role | None = None, **more: Any) -> User:
    """A user who is not saved yet."""
    user = User(username=username, platform_role=platform_role, **more)
    user.set_password(PASSWORD)
    return user


@dataclass(frozen=True)
class People:
    """One of each kind. `acme` has a viewer, an on-call and an admin; `globex` has its own admin."""

    platform_admin: User
    platform_on_call: User
    platform_viewer: User
    org_admin: User
    on_call: User
    viewer: User
    stranger: User  # the admin of another org
    acme: Org
    globex: Org

    def principal(self, name: str) -> Principal:
        user: User = getattr(self, name)
        return principal_for(User.objects.get(pk=user.pk), Means.BROWSER)


@pytest.fixture
def people(db: None) -> People:
    return make_people()


def make_people() -> People:
    acme, globex = Org.objects.bulk_create(
        [Org(slug="acme", name="Acme"), Org(slug="globex", name="Globex")]
    )
    made = People(
        platform_admin=user_of("ada", Role.PLATFORM_ADMIN),
        platform_on_call=user_of("otto", Role.ON_CALL),
        platform_viewer=user_of("vera", Role.VIEWER),
        org_admin=user_of("olga"),
        on_call=user_of("carl"),
        viewer=user_of("vic"),
        stranger=user_of("sam"),
        acme=acme,
        globex=globex,
    )
    User.objects.bulk_create(value for value in vars(made).values() if isinstance(value, User))
    Membership.objects.bulk_create(
        Membership(user=user, org=org, role=role)
        for user, org, role in (
            (made.org_admin, acme, Role.ORG_ADMIN),
            (made.on_call, acme, Role.ON_CALL),
            (made.viewer, acme, Role.VIEWER),
            (made.stranger, globex, Role.ORG_ADMIN),
        )
    )
    return made


@pytest.fixture
def browser_of() -> Callable[[User], Client]:
    """A logged-in browser."""

    def log_in(user: User) -> Client:
        client = Client()
        client.force_login(user)
        return client

    return log_in


@pytest.fixture
def token_of() -> Callable[..., str]:
    """The text of a new API token."""

    return issue_token


def issue_token(user: User, *, read_only: bool = False, org: Org | None = None) -> str:
    _, text = tokens.issue(
        principal_for(user, Means.BROWSER),
        name="test",
        read_only=read_only,
        org=org,
        expires_at=timezone.now() + timedelta(days=366),
    )
    return text


@pytest.fixture
def api_of(token_of: Callable[..., str]) -> Callable[..., Client]:
    """A client of the API with a token of its own."""

    def client(user: User, **kind: Any) -> Client:
        return Client(headers={"authorization": f"Bearer {token_of(user, **kind)}"})

    return client


@pytest.fixture
def rows_of_audit() -> Callable[[], int]:
    def count() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM audit_auditentry")
            return int(cursor.fetchone()[0])

    return count


@pytest.fixture(scope="session")
def kubernetes_bed() -> Iterator[Any]:
    """A control plane of Kubernetes with two nodes: see `tests.kubernetes.bed`."""
    from tests.kubernetes import bed  # most runs do without it

    if reason := bed.why_not():
        pytest.skip(reason)
    with bed.bed() as made:
        boxes = ("box-chat-0-a", "box-chat-1-b", "box-chat-0-c", "box-1")
        for number, name in enumerate(("node-a", "node-b")):
            made.add_node(name, {f"box.tidegate.dev/{box}": "" for box in boxes[number::2]})
        yield made
