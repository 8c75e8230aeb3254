"""Both kinds of loops over prompts, compiled and in Python, for tests that go on for long."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from kvss_agent import native
from swdriver_shim import loops
from swdriver_shim.loops import PYTHON, Loops

IN_PYTHON: Final = "in Python"
COMPILED: Final = "compiled"


@functools.cache
def kinds_of_loops() -> Mapping[str, Loops]:
    """Those that a driver could have here, by what they are called. Compiles them, unless that has been
    done."""
    found = loops.of(native.best(build=True))
    return {IN_PYTHON: PYTHON} if found is PYTHON else {IN_PYTHON: PYTHON, COMPILED: found}


def kind_of_seed(seed: int) -> str:
    """Of half of the seeds the compiled ones, where they can be had."""
    kinds = kinds_of_loops()
    is_compiled = random.Random(f"loops of {seed}").random() < 0.5
    return COMPILED if is_compiled and COMPILED in kinds else IN_PYTHON


@contextmanager
def loops_in_use(these: Loops) -> Iterator[None]:
    before, loops.current = loops.current, these
    try:
        yield
    finally:
        loops.current = before
