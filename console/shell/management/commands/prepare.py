"""`manage.py prepare`: bring a database and the static files up to date, once per start."""

from __future__ import annotations

import io
import json
import time
from argparse import ArgumentParser
from typing import Any, Final

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor

from console.accounts.models import User
from console.accounts.principal import SYSTEM
from console.accounts.roles import Role
from console.accounts.services import create_user
from console.shell import static_files
from telemetry import units

FIRST_ADMIN = "admin"
MIGRATION_LOCK = 0x7469646567617465  # "tidegate": several may start at the same time
LOOK_SECONDS: Final = 1.0
TOO_OLD: Final = (
    "The database was made by a development version before 0.1.0, whose migrations are gone. "
    "Start over with an empty one (`make clean DATA=1`)."
)


class Command(BaseCommand):
    help = (
        "Migrate the database, collect static files, and create a first platform admin where there "
        "are no users. Prints one JSON object a stage; the admin's password appears there once and "
        "nowhere else. Safe to run again and by several at once."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--wait",
            metavar="TIME",
            help="change nothing in the database: wait so long until another `prepare` has migrated it, "
            "and collect static files. For processes whose role in the database may not migrate it.",
        )

    def handle(self, *_args: Any, wait: str | None = None, **_options: Any) -> None:
        if wait is not None:
            try:
                seconds = units.parse_duration(wait)
            except units.Unreadable as error:
                raise CommandError(f"--wait: {error}") from None
            self._stage("wait", lambda: self._wait(seconds))
            self._stage("static files", static_files.collect)
            return
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
            try:
                self._stage("migrate", self._migrate)
                self._stage("static files", static_files.collect)
                self._stage("first admin", self._first_admin)
            finally:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT pg_advisory_unlock(%s)", [MIGRATION_LOCK])
        except (DatabaseError, OSError) as error:
            raise CommandError(f"can't prepare: {error}".strip()) from error

    def _stage(self, name: str, run: Any) -> None:
        started = time.monotonic()
        run()
        self._say({"stage": name, "seconds": round(time.monotonic() - started, 3)})

    def _wait(self, seconds: float) -> None:
        """For a server that is not there yet, too. Raises CommandError."""
        deadline, why = time.monotonic() + seconds, ""
        while True:
            try:
                if not _pending():
                    return
                why = "nobody has migrated the database"
            except DatabaseError as error:
                why = str(error).strip()
                connection.close()
            if time.monotonic() > deadline:
                raise CommandError(f"not within {units.duration(seconds)}: {why}")
            time.sleep(LOOK_SECONDS)

    def _migrate(self) -> None:
        if _pending():
            call_command("migrate", interactive=False, verbosity=0, stdout=io.StringIO())

    def _first_admin(self) -> None:
        if User.objects.exists():
            return
        user, password = create_user(
            SYSTEM,
            username=FIRST_ADMIN,
            full_name="First admin",
            platform_role=Role.PLATFORM_ADMIN,
            reason="the first start",
            must_change_password=False,
        )
        self._say({"admin": {"username": user.username, "password": password}})

    def _say(self, fact: dict[str, Any]) -> None:
        self.stdout.write(json.dumps(fact))
        self.stdout.flush()


def _pending() -> bool:
    """Whether a migration of this version has not been applied.

    Raises DatabaseError, and CommandError for a database in the midst of migrations that are gone:
    Django would take it for migrated."""
    executor = MigrationExecutor(connection)
    loader = executor.loader
    if left_out := sorted(set(loader.replacements) - set(loader.graph.nodes)):
        raise CommandError(f"{TOO_OLD} Partly migrated: {', '.join(app for app, _ in left_out)}.")
    return bool(executor.migration_plan(loader.graph.leaf_nodes()))
