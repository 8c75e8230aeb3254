"""People, an org and ways to ask, for every test that wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.db.backends.postgresql.operations import DatabaseOperations
from django.test import Client
from django.utils import timezone

from console.accounts import tokens
from console.accounts.models import User
from console.accounts.principal import Means, Principal
from console.accounts.roles import Role
from console.accounts.services import principal_for
from console.orgs.models import Membership, Org
from console.shell import request_context
from tests.prepared import collect_static_files, migrated

PASSWORD = "correct horse battery staple"


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings: None) -> None:
    """Let the database of each worker be a copy of one that is migrated."""
    connection.settings_dict["TEST"]["TEMPLATE"] = migrated()


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None) -> None:
    """Let the tests' clean-up truncate the audit trail, which the database refuses everybody else."""
    flush = DatabaseOperations.execute_sql_flush

    def as_replica(self: Any, sql_list: list[str]) -> None:
        flush(self, ["SET LOCAL session_replication_role = replica;", *sql_list])

    DatabaseOperations.execute_sql_flush = as_replica  # type: ignore[method-assign, assignment]


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


@pytest.fixture(autouse=True)
def _fast_passwords(settings: Any) -> None:
    """Argon2 is slow on purpose; its own test asks for it."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture(autouse=True)
def _no_request() -> Iterator[None]:
    request_context.enter(None)
    yield
    request_context.enter(None)


def make_user(username: str, platform_role: Role | None = None, **more: Any) -> User:
    user = User(username=username, platform_role=platform_role, **more)
    user.set_password(PASSWORD)
    user.save()
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
    acme = Org.objects.create(slug="acme", name="Acme")
    globex = Org.objects.create(slug="globex", name="Globex")
    made = People(
        platform_admin=make_user("ada", Role.PLATFORM_ADMIN),
        platform_on_call=make_user("otto", Role.ON_CALL),
        platform_viewer=make_user("vera", Role.VIEWER),
        org_admin=make_user("olga"),
        on_call=make_user("carl"),
        viewer=make_user("vic"),
        stranger=make_user("sam"),
        acme=acme,
        globex=globex,
    )
    for user, org, role in (
        (made.org_admin, acme, Role.ORG_ADMIN),
        (made.on_call, acme, Role.ON_CALL),
        (made.viewer, acme, Role.VIEWER),
        (made.stranger, globex, Role.ORG_ADMIN),
    ):
        Membership.objects.create(user=user, org=org, role=role)
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

    def issue(user: User, *, read_only: bool = False, org: Org | None = None) -> str:
        _, text = tokens.issue(
            principal_for(user, Means.BROWSER),
            name="test",
            read_only=read_only,
            org=org,
            expires_at=timezone.now() + timedelta(days=366),
        )
        return text

    return issue


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
