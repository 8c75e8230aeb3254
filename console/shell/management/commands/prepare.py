"""`manage.py prepare`: bring a database and the static files up to date, once per start."""

from __future__ import annotations

import io
import json
import time
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor

from console.accounts.models import User
from console.accounts.principal import SYSTEM
from console.accounts.roles import Role
from console.accounts.services import create_user
from console.shell import static_files

FIRST_ADMIN = "admin"
MIGRATION_LOCK = 0x7469646567617465  # "tidegate": several may start at the same time


class Command(BaseCommand):
    help = (
        "Migrate the database, collect static files, and create a first platform admin where there "
        "are no users. Prints one JSON object a stage; the admin's password appears there once and "
        "nowhere else. Safe to run again and by several at once."
    )

    def handle(self, *_args: Any, **_options: Any) -> None:
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

    def _migrate(self) -> None:
        executor = MigrationExecutor(connection)
        if executor.migration_plan(executor.loader.graph.leaf_nodes()):
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
