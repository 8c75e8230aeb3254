"""`manage.py fleet import FILE` and `manage.py fleet export`: the fleet as a description."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.accounts.principal import SYSTEM
from console.fleet.descriptions import changes
from console.fleet.descriptions.changes import Change, Moved
from console.fleet.descriptions.document import Wrong
from console.fleet.nodes import Impossible


class Command(BaseCommand):
    requires_system_checks = ()  # `prepare` has done them; they load every page, which takes a second
    help = "Import the fleet from a description in YAML, or export it as one. See docs/fleet.md."

    def add_arguments(self, parser: ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)
        reading = verbs.add_parser("import", help="make the fleet what a description says")
        reading.add_argument("file", help="the description; - reads standard input")
        reading.add_argument("--dry-run", action="store_true", help="only say what would change")
        reading.add_argument("--reason", default="", help="why; stands in the audit trail")
        verbs.add_parser("export", help="write the description to standard output")

    def handle(self, *_args: Any, **options: Any) -> None:
        if options["verb"] == "export":
            self.stdout.write(changes.export(SYSTEM), ending="")
            return
        try:
            text = _read(options["file"])
            if options["dry_run"]:
                found, _ = changes.preview(SYSTEM, text)
            else:
                found = changes.apply(SYSTEM, text, reason=options["reason"])
        except (OSError, UnicodeDecodeError, Wrong, Moved, Impossible) as error:
            raise CommandError(str(error)) from None
        for change in found.changes:
            self.stdout.write(_line(change))
        counts = ", ".join(f"{count} {what}" for what, count in found.counted().items() if count)
        self.stdout.write(f"{'would be: ' if options['dry_run'] else ''}{counts or 'nothing to change'}")


def _read(file: str) -> str:
    return sys.stdin.read() if file == "-" else Path(file).read_text()


def _line(change: Change) -> str:
    sign = {"added": "+", "removed": "-", "changed": "~"}[change.what]
    detail = ""
    if change.what == "changed":
        detail = ": " + ", ".join(
            f"{path} {_shown(old)} → {_shown(new)}" for path, old, new in change.differences
        )
    refused = f" REFUSED: {change.refused}" if change.refused else ""
    follows = f" ({change.follows})" if change.follows else ""
    return f"{sign} {change.kind} {change.name}{detail}{follows}{refused}"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
