"""What one rendering of a template may use: steps, time of a processor, characters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from inference_brain.tokens.errors import TemplateTooCostly

SECONDS_MAX: Final = 2.0  # of a processor; a prompt of a million tokens takes a tenth of it
STEPS_MAX: Final = 20_000_000
CHARACTERS_MAX: Final = 256 << 20  # of everything that is made on the way
_CLOCK_STEPS: Final = 1024
_ITEM_CHARACTERS: Final = 8  # what an item of a list or dictionary counts as


class Budget:
    """What is left. `characters`: of all strings that the template makes; items of lists count too."""

    __slots__ = ("_until", "characters", "steps")

    def __init__(
        self,
        characters: int = CHARACTERS_MAX,
        seconds: float = SECONDS_MAX,
        steps: int = STEPS_MAX,
    ) -> None:
        self.characters = characters
        self.steps = steps
        self._until = time.thread_time() + seconds

    def step(self) -> None:
        """One turn of a loop, or one call. Raises TemplateTooCostly."""
        self.steps -= 1
        if self.steps & (_CLOCK_STEPS - 1) == 0:
            if self.steps <= 0:
                raise TemplateTooCostly("The chat template takes too many steps for these messages")
            self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self._until:
            raise TemplateTooCostly("The chat template takes too long for these messages")

    def spend(self, characters: int) -> None:
        """Before, or after, so many characters are made. Raises TemplateTooCostly."""
        self.characters -= characters
        if self.characters < 0:
            raise TemplateTooCostly("The chat template makes too much text of these messages")

    def spend_on(self, value: object) -> None:
        """On what `str` or JSON would make of a value, which may have one string many times."""
        if isinstance(value, str):
            self.spend(len(value))
            return
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                self.spend(len(one) + _ITEM_CHARACTERS)
            elif isinstance(one, Mapping):
                self.spend(_ITEM_CHARACTERS)
                self.step()
                waiting += one.keys()
                waiting += one.values()
            elif isinstance(one, list | tuple | set | frozenset):
                self.spend(_ITEM_CHARACTERS + len(one))
                self.step()
                waiting += one
            else:
                self.spend(_ITEM_CHARACTERS)
