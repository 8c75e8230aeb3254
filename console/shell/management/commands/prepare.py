"""`manage.py prepare`: bring a database and the static files up to date, once per start."""

from __future__ import annotations

import io
import json
from argparse import ArgumentParser
from time import monotonic, sleep
from typing import Any, Final

import psycopg
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.core.management.commands import migrate
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
# Who wants a table waits behind a migration that waits for it: not for long, then it is their turn.
LOCK_SECONDS: Final = 3.0
LOCKED_SECONDS_MAX: Final = 300.0
HOLDERS_MAX: Final = 3
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
            self._take_turn()
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
        started = monotonic()
        run()
        self._say({"stage": name, "seconds": round(monotonic() - started, 3)})

    def _wait(self, seconds: float) -> None:
        """For a server that is not there yet, too. Raises CommandError."""
        deadline, why = monotonic() + seconds, ""
        while True:
            try:
                if not _pending():
                    return
                why = "nobody has migrated the database"
            except DatabaseError as error:
                why = str(error).strip()
                connection.close()
            if monotonic() > deadline:
                raise CommandError(f"not within {units.duration(seconds)}: {why}")
            sleep(LOOK_SECONDS)

    def _take_turn(self) -> None:
        """Wait for another `prepare`, however long its migrations take.

        By asking again and again: a statement that waits has a snapshot, and an index that the other one
        builds concurrently would wait for that in turn."""
        is_told = False
        while not _is_locked():
            if not is_told:
                self.stderr.write("Another `prepare` is running: this one waits for it.")
                is_told = True
            sleep(LOOK_SECONDS)

    def _migrate(self) -> None:
        """Raises CommandError if others use a table for longer than this can wait, such as a backup."""
        deadline = monotonic() + LOCKED_SECONDS_MAX
        while _pending():
            try:
                call_command(_Migrate(), interactive=False, verbosity=0, stdout=io.StringIO())
            except DatabaseError as error:
                if not isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                    raise
                why = f"a table that is to be migrated is in use by {_who_holds_tables()}"
                if monotonic() > deadline:
                    raise CommandError(f"can't prepare: {why}. Let it end, and run this again") from None
                self.stderr.write(f"Waiting: {why}.")
                sleep(LOOK_SECONDS)
        with connection.cursor() as cursor:
            cursor.execute("RESET lock_timeout")

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


class _Migrate(migrate.Command):
    """Waits for no lock longer than LOCK_SECONDS. A migration that has waited so long is undone.

    Except those without a transaction, which nothing would undo: they build indices concurrently, and
    nobody waits behind these."""

    def migration_progress_callback(self, action: str, migration: Any = None, *more: Any) -> None:
        if action == "apply_start":
            seconds = LOCK_SECONDS if migration.atomic else 0
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT set_config('lock_timeout', %s, false)", [f"{seconds * 1000:.0f}ms"]
                )
        super().migration_progress_callback(action, migration, *more)


def _is_locked() -> bool:
    """Whether this session has the lock of migrations now."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [MIGRATION_LOCK])
        return bool(cursor.fetchone()[0])


def _who_holds_tables() -> str:
    """Sessions that have had tables for as long as a migration waits, the oldest first. Of sessions of
    other roles we may not know since when."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT DISTINCT pid, usename, application_name, xact_start FROM pg_stat_activity "
            "JOIN pg_locks USING (pid) "
            "WHERE locktype = 'relation' AND granted AND pid <> pg_backend_pid() "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND (xact_start IS NULL OR xact_start < now() - make_interval(secs => %s)) "
            "ORDER BY xact_start LIMIT %s",
            [LOCK_SECONDS, HOLDERS_MAX],
        )
        found = [
            f"PostgreSQL's process {pid} ({', '.join(filter(None, (user, program)))})"
            for pid, user, program, _ in cursor.fetchall()
        ]
    return ", ".join(found) or "others, who have just left it"


def _pending() -> bool:
    """Whether a migration of this version has not been applied.

    Raises DatabaseError, and CommandError for a database in the midst of migrations that are gone:
    Django would take it for migrated."""
    executor = MigrationExecutor(connection)
    loader = executor.loader
    if left_out := sorted(set(loader.replacements) - set(loader.graph.nodes)):
        raise CommandError(f"{TOO_OLD} Partly migrated: {', '.join(app for app, _ in left_out)}.")
    return bool(executor.migration_plan(loader.graph.leaf_nodes()))
