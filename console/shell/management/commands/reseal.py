"""`manage.py reseal`: seal stored secrets with the secret key of now, so that a former one can go."""

from __future__ import annotations

from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError
from django.db import models, transaction

from console.shell.sealed import CannotUnseal, sealed_rows

AT_ONCE: Final = 500


class Command(BaseCommand):
    requires_system_checks = ()  # `prepare` has done them; they load every page, which takes a second
    help = (
        "Seal all stored secrets anew, after TIDEGATE_SECRET_KEY was changed and the former key was put "
        "into TIDEGATE_SECRET_KEY_FALLBACKS. Afterwards the former one may be dropped. Safe to run "
        "again, and while everything runs."
    )

    def handle(self, *_args: Any, **_options: Any) -> None:
        for rows, names in sealed_rows():
            name = rows.model.__name__
            self.stdout.write(f"{name}: {self._reseal(rows, names)} rows sealed anew")

    def _reseal(self, rows: models.QuerySet[Any], names: list[str]) -> int:
        """A few rows at a time, each locked while it is read and written."""
        last, count = None, 0
        while True:
            with transaction.atomic():
                batch = rows.select_for_update(no_key=True).only("pk", *names)
                try:
                    found = list((batch.filter(pk__gt=last) if last is not None else batch)[:AT_ONCE])
                except CannotUnseal as error:
                    raise CommandError(f"{rows.model.__name__}: {error}") from None
                for row in found:
                    row.save(update_fields=names)
            if not found:
                return count
            last, count = found[-1].pk, count + len(found)
