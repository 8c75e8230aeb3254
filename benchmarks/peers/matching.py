"""Peers that look up prefixes: what their runners speak, and the prompts that both sides ask for.

In a runner, in the manner of `protocol`:

    {"op": "fill", "prompts": 100, "tokens": 32768}   -> {"variants": {"": null, "keys": "no compiler"}}
    {"op": "match", "variant": "", "first": 0, "n": 20, "more": 1024}
                           -> {"cold": [0.0016, …], "continued": [0.0004, …], "packed": [0.0001, …]}

`fill` says which variants of the peer there are, or why one can't be had. Every prompt that is asked for
is there, and one more token is asked for than that, since an engine computes the last token anyhow.
"""

from __future__ import annotations

import abc
import gc
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.protocol import Part, run_with

VOCABULARY = 128_000
COLD, CONTINUED, PACKED = "cold", "continued", "packed"
KINDS = (COLD, CONTINUED, PACKED)


def prompt(number: int, tokens: int) -> list[int]:
    """The so-manieth prompt, and how it goes on: any more tokens."""
    return random.Random(number).choices(range(VOCABULARY), k=tokens)


class Matcher(Part):
    """Finds prefixes. Only `cold`, `continued` and `packed` are timed."""

    @abc.abstractmethod
    def fill(self, prompts: int, tokens: int) -> dict[str, str | None]:
        """Have these prompts in every variant's cache. Of each variant why it can't be had, or None."""

    @abc.abstractmethod
    def use(self, variant: str) -> None:
        """This one from now on."""

    @abc.abstractmethod
    def cold(self, tokens: list[int]) -> int:
        """A new request of these tokens: how many of them are there. Holds what it found."""

    @abc.abstractmethod
    def continued(self, more: list[int]) -> int:
        """The latest request goes on with these."""

    def pack(self, tokens: list[int]) -> Any:  # noqa: ARG002
        """Before the clock runs: the tokens as the peer likes them best; None if that is a list."""
        return None

    def packed(self, tokens: Any) -> int:
        """`cold`, from what `pack` made."""
        raise NotImplementedError

    @abc.abstractmethod
    def release(self) -> None:
        """After the clock has stopped: let go of what the latest call holds."""


class MatchRunner:
    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.tokens = 0

    def on_fill(self, prompts: int, tokens: int) -> dict[str, Any]:
        self.tokens = tokens
        return {"variants": self.matcher.fill(prompts, tokens)}

    def on_match(self, variant: str, first: int, n: int, more: int) -> dict[str, list[float]]:
        self.matcher.use(variant)
        return match_round(self.matcher, range(first, first + n), self.tokens, more)


def match_round(
    matcher: Matcher, numbers: Sequence[int], tokens: int, more: int
) -> dict[str, list[float]]:
    """Ask for these prompts, of so many tokens that are there: the seconds of each, by kind."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    clock = time.perf_counter

    def done(kind: str, began: float, found: int) -> None:
        seconds[kind].append(clock() - began)
        matcher.release()
        if found != tokens:
            raise RuntimeError(f"{found} tokens were found, {tokens} are there")

    with _no_garbage():
        for number in numbers:
            asked = prompt(number, tokens + 1)
            goes_on = prompt(-1 - number, more)
            began = clock()
            done(COLD, began, matcher.cold(asked))
            began = clock()
            done(CONTINUED, began, matcher.continued(goes_on))
            packed = matcher.pack(asked)
            if packed is not None:
                began = clock()
                done(PACKED, began, matcher.packed(packed))
    return seconds


@contextmanager
def _no_garbage() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run(kind: type[Matcher]) -> None:
    """The main program of a runner: `python -m benchmarks.peers.run_NAME SCRATCH`."""
    run_with(kind, MatchRunner)
