"""`manage.py backup FILE`: all that PostgreSQL has, and the uploaded tokenizers, in one file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.shell import backup
from console.shell.backup_file import CannotBackUp
from telemetry.stop import ends_clean
from telemetry.units import exact_size


class Command(BaseCommand):
    requires_system_checks = ()  # `prepare` has done them; they load every page, which takes a second
    help = (
        "Back up the database and the uploaded tokenizers into one file, as they are at one moment, "
        "while everything runs. Secrets in it stay sealed; keep TIDEGATE_SECRET_KEY in another place."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", type=Path, help="a file that does not exist yet")
        parser.add_argument(
            "--without-numbers",
            action="store_true",
            help="leave out telemetry, which is most of the bytes",
        )
        parser.add_argument(
            "--without-tokenizers",
            action="store_true",
            help="leave out uploaded tokenizers, where their folder can't be read",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        file: Path = options["file"]
        try:
            with ends_clean():
                made = backup.back_up(
                    file.absolute(),
                    has_numbers=not options["without_numbers"],
                    has_tokenizers=not options["without_tokenizers"],
                )
        except CannotBackUp as error:
            raise CommandError(str(error)) from None
        rows = sum(made.rows.values())
        size = exact_size(file.stat().st_size)
        self.stdout.write(
            f"{file}: {rows} rows of {len(made.rows)} tables, {made.tokenizer_count} tokenizers, {size}"
        )
