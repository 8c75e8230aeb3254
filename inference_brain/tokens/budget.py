"""What one rendering of a template may use: steps, time of a processor, characters."""

from __future__ import annotations

import threading
import time
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from typing import Any, Final

from jinja2.utils import Namespace

from inference_brain.tokens.errors import TemplateTooCostly

SECONDS_MAX: Final = 1.0  # of a processor; a prompt of a million tokens takes a tenth of it
STEPS_MAX: Final = 20_000_000
CHARACTERS_MAX: Final = 256 << 20  # of everything that is made on the way
_CLOCK_STEPS: Final = 256
ITEM_CHARACTERS: Final = 8  # what an item of a list or dictionary counts as


class Budget:
    """What is left. `characters`: of all strings that the template makes; items of lists count too.
    `seconds`: of a processor, once as much time has passed; it is asked of the system only then."""

    __slots__ = ("_processor_until", "_seconds", "_until", "characters", "steps")

    def __init__(
        self,
        characters: int = CHARACTERS_MAX,
        seconds: float = SECONDS_MAX,
        steps: int = STEPS_MAX,
    ) -> None:
        self.characters = characters
        self.steps = steps
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._processor_until: float | None = None

    def step(self) -> bool:
        """One turn of a loop, or one call. True, so that a condition may begin with it. Raises
        TemplateTooCostly."""
        self.steps -= 1
        if self.steps % _CLOCK_STEPS == 0:
            if self.steps <= 0:
                raise TemplateTooCostly("The chat template takes too many steps for these messages")
            if time.monotonic() > self._until:
                self._check_processor()
        return True

    def _check_processor(self) -> None:
        """Time that passed while others had the processor does not count."""
        used = time.thread_time()
        if self._processor_until is None:
            self._processor_until = used + self._seconds
        elif used > self._processor_until:
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
        waiting: list[Any] = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                self.spend(len(one) + ITEM_CHARACTERS)
            elif isinstance(one, Mapping):
                self.spend(ITEM_CHARACTERS)
                self.step()
                waiting += one.keys()
                waiting += one.values()
            elif isinstance(one, Namespace):
                self.spend(ITEM_CHARACTERS)
                self.step()
                waiting.append(object.__getattribute__(one, "_Namespace__attrs"))
            elif isinstance(one, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
                self.spend(ITEM_CHARACTERS + len(one))
                self.step()
                waiting += one
            else:
                self.spend(ITEM_CHARACTERS)


class _Spent(threading.local):
    budget: Budget | None = None


_spent = _Spent()


def current() -> Budget:
    """Of the rendering that this thread is in."""
    # Parts of a template are evaluated while it is compiled, too.
    return _spent.budget or Budget()


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Renderings in this thread have this budget meanwhile."""
    before, _spent.budget = _spent.budget, budget
    try:
        yield
    finally:
        _spent.budget = before
