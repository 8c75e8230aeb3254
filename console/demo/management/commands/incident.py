"""`manage.py incident ADDRESS`: stage an incident on the running demo, for `make incident`."""

from __future__ import annotations

import signal
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from console.demo.incident import CannotStage, Incident
from console.operations.services import Busy


class Command(BaseCommand):
    help = "Stage an incident on the running demo, from a slow spine to a resolved alert."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("address", help="address of the console, as printed by `make up`")

    def handle(self, *_args: Any, address: str, **_options: Any) -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # undoes the incident, like Ctrl-C
        try:
            Incident(address.rstrip("/")).run()
        except (CannotStage, Busy) as error:
            raise CommandError(str(error)) from error
        except (KeyboardInterrupt, EOFError):  # Ctrl-C, or Ctrl-D where Enter is asked for
            self.stdout.write("Stopped.")
