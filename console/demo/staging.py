"""What the stories of `make incident` and `make rollout` share: numbered steps at a terminal, each with
the address of the page to look at. Without a terminal no step waits."""

from __future__ import annotations

import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar

from django.core.management.base import BaseCommand, CommandError, CommandParser

from console.environment import STACK
from console.operations.services import Busy
from telemetry.units import duration

T = TypeVar("T")

LOOK_EVERY_SECONDS: Final = 0.5
PATIENCE_SECONDS: Final = 300.0


class CannotStage(Exception):
    """The reason why a story cannot be staged, and what to do."""


class Story(ABC):
    """The steps of a story, on the console at `address`."""

    steps: ClassVar[int]

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_alone = not sys.stdin.isatty()
        self._step = 0

    @abstractmethod
    def run(self) -> None:
        """Raises CannotStage."""

    def _tell(self, what: str, page: str) -> None:
        self._step += 1
        print(f"{self._step}/{self.steps}  {what}\n     {self._address}{page}", flush=True)

    def _pause(self, what: str = "Press Enter to continue, Ctrl-C to undo everything.") -> None:
        if not self._is_alone:
            input(f"     {what} ")

    def _wait(self, what: str, look: Callable[[], T | None], seconds_max: float = PATIENCE_SECONDS) -> T:
        """Poll `look` until it returns something. Raises CannotStage."""
        deadline = time.monotonic() + seconds_max
        while not (found := look()):
            if time.monotonic() > deadline:
                raise CannotStage(
                    f"Timed out after {duration(seconds_max)} waiting until {what}. "
                    f"`{STACK} status` shows which services are running."
                )
            time.sleep(LOOK_EVERY_SECONDS)
        return found


class StoryCommand(BaseCommand):
    """The command of Django that stages a story."""

    requires_system_checks = ()  # `prepare` has done them; they load every page, which takes a second
    story: ClassVar[type[Story]]
    faults: ClassVar[tuple[type[Exception], ...]] = (CannotStage, Busy)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("address", help="address of the console, as printed by `make up`")

    def handle(self, *_args: Any, address: str, **_options: Any) -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # undoes the story, like Ctrl-C
        try:
            self.story(address.rstrip("/")).run()
        except self.faults as error:
            raise CommandError(str(error)) from error
        except (KeyboardInterrupt, EOFError):  # Ctrl-C, or Ctrl-D where Enter is asked for
            self.stdout.write("Stopped.")
