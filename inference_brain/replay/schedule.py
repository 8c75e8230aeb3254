"""When the requests of a trace are due. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from swdriver_shim.replay.traces import Request


class Due(NamedTuple):
    """A request, when it is due in seconds from the beginning, and its number in the trace."""

    at: float
    number: int
    request: Request


def by_trace(requests: Iterable[Request], speed: float) -> Iterator[Due]:
    """As in the trace, so many times as fast."""
    began: float | None = None
    for number, request in enumerate(requests):
        began = request.at_s if began is None else began
        yield Due((request.at_s - began) / speed, number, request)


def by_rate(requests: Iterable[Request], rate: float, seed: int) -> Iterator[Due]:
    """So many a second on average, at times that do not depend on each other."""
    source = random.Random(seed)  # noqa: S311  the same each time
    at = 0.0
    for number, request in enumerate(requests):
        yield Due(at, number, request)
        at += source.expovariate(rate)


def at_once(requests: Iterable[Request]) -> Iterator[Due]:
    """As soon as one of those that are allowed at a time has ended."""
    return (Due(0.0, number, request) for number, request in enumerate(requests))
