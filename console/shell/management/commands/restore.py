"""`manage.py restore FILE`: fill an empty database from a backup."""

from __future__ import annotations

import argparse
import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from console.shell import backup
from console.shell.backup_file import CannotBackUp
from telemetry.stop import ends_clean
from telemetry.units import counted


class Command(BaseCommand):
    requires_system_checks = ()  # there is nothing yet that could be checked
    help = (
        "Fill the empty database that DATABASE_URL names from a backup, and migrate it to this version. "
        "Stop all processes before, and start them afterwards."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", type=Path, help="what `backup` has written")
        parser.add_argument(
            "--unverified",
            action="store_true",
            help="also what nobody has signed with TIDEGATE_SECRET_KEY or one of its fallbacks. Whoever "
            "wrote such a file runs SQL as the owner of the database.",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            with ends_clean():
                found = backup.restore(
                    options["file"].absolute(), must_be_signed=not options["unverified"]
                )
        except CannotBackUp as error:
            raise CommandError(str(error)) from None
        call_command("migrate", interactive=False, verbosity=0, stdout=io.StringIO())
        at = datetime.fromtimestamp(found.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        rows = sum(found.rows.values())
        self.stdout.write(f"Restored {rows} rows of {len(found.rows)} tables, as they were at {at}.")
        if missing := backup.missing_tokenizers():
            tokenizers = counted(
                missing, "tokenizer of the database is", "tokenizers of the database are"
            )
            self.stderr.write(
                f"{tokenizers} not in {settings.TOKENIZERS}, or damaged: copy what is missing there, or "
                "upload it again."
            )
        if sealed := backup.sealed_with_another_key():
            raise CommandError(
                f"{sealed} rows have secrets that can't be opened: they were sealed with another "
                "TIDEGATE_SECRET_KEY. Put that one into TIDEGATE_SECRET_KEY_FALLBACKS."
            )
