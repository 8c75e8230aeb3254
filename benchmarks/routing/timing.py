"""How long an engine takes: the steps of a continuous batch, as vLLM makes them.

Each step computes one token of every running request, and prompts in the order of arrival, as many
tokens as a step has room for. A long prompt takes several steps. A request has its first token at the
end of the step that computes the last token of its prompt. So a step takes

    each step + each prompt token + each pair of tokens in its attention + each running request
    + each token of running requests' contexts

`engine.json` has these constants, measured by `python -m benchmarks.routing.calibrate`; a test compares
what this model says with what a real vLLM does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

CONSTANTS: Final = Path(__file__).parent / "engine.json"
WIDER: Final = 32  # 8,192 where the measured model has 256
ROUNDING: Final = 1e-9


class Timing(msgspec.Struct, frozen=True):
    """Seconds of each, and the limits of a step. `request`: from a request's arrival until the engine
    has it, and from its first token until the client has it."""

    step: float
    token: float
    pair: float
    running: float
    context: float
    request: float
    cached_token: float
    step_tokens: int
    running_max: int
    about: str = ""


def constants() -> Timing:
    """Of the engine that was measured."""
    return msgspec.json.decode(CONSTANTS.read_bytes(), type=Timing)


def served() -> Timing:
    """Of one whose model is `WIDER` times as wide. What a token costs in all other layers grows with the
    square of the width, what it costs in attention with the width. Times are in the measured one's
    seconds for a token, so that prompts of these traces take seconds and not days."""
    measured = constants()
    return msgspec.structs.replace(
        measured, pair=measured.pair / WIDER, context=measured.context / WIDER, running_max=256
    )


@dataclass(slots=True, eq=False)
class Work:
    """A request in an engine. `cached`: how much of its prompt need not be computed, known once it is
    begun."""

    tokens: int
    output: int
    arrived: float
    ready: float = 0.0  # when what is cached has come; until then others are computed first
    cached: int = 0
    done: int = 0  # of the prompt
    left: int = 0  # of the output
    first: float = 0.0  # when its first token came
    begun: bool = False
    tag: object = None


Found = Callable[[Work, float], int]
Told = Callable[[Work, float], None]


class Engine:
    """One engine. Time is passed in: `advance` to `due`, which is when a step ends.

    `find` is asked how much of a prompt is cached when its turn comes; `first` and `last` are told of
    first and last tokens.
    """

    def __init__(self, timing: Timing, find: Found, first: Told, last: Told) -> None:
        self._timing = timing
        self._find, self._first, self._last = find, first, last
        self._waiting: deque[Work] = deque()
        self._prompts: list[Work] = []  # that are being computed, the oldest first
        self._running: list[Work] = []
        self._chunks: list[tuple[Work, int]] = []  # of the step that goes on
        self._began = 0.0
        self._steps = 0  # that go on without a prompt, all at once
        self._step_seconds = 0.0
        self.due = math.inf
        self.prompt_seconds = 0.0  # that it has computed prompts for

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._prompts)

    @property
    def running(self) -> int:
        return len(self._running)

    def computed(self) -> list[tuple[Work, int]]:
        """The prompts that are being computed, and how many of their tokens are after this step."""
        chunks = {id(work): tokens for work, tokens in self._chunks}
        return [(work, work.done + chunks.get(id(work), 0)) for work in self._prompts]

    def arrive(self, work: Work, now: float) -> None:
        self._waiting.append(work)
        if not self._chunks and not self._running:
            self._step(now)
        elif not self._chunks and self._steps > 1:  # of many steps only the one that goes on is ended
            steps = max(1, math.ceil((now - self._began) / self._step_seconds - ROUNDING))
            self._steps = min(self._steps, steps)
            self.due = self._began + self._steps * self._step_seconds

    def advance(self) -> None:
        """A step ends, or several in which nothing but decoding is done."""
        now = self.due
        if self._chunks:
            self.prompt_seconds += now - self._began
        for work, tokens in self._chunks:
            work.done += tokens
        decoded = self._running
        self._running = []
        for work in decoded:
            work.left -= self._steps
            work.done += self._steps
            if work.left <= 0:
                self._last(work, now)
            else:
                self._running.append(work)
        for work, _ in self._chunks:
            if work.done >= work.tokens:
                self._prompts.remove(work)
                work.left = work.output - 1
                work.first = now
                self._first(work, now)
                if work.left > 0:
                    self._running.append(work)
                else:
                    self._last(work, now)
        self._step(now)

    def _step(self, now: float) -> None:
        """Begin a step, if there is something to do."""
        timing = self._timing
        budget = timing.step_tokens - len(self._running)
        chunks = self._chunks = []
        seconds = 0.0
        for work in self._prompts:
            if budget <= 0:
                break
            seconds += self._chunk(work, budget)
            budget -= chunks[-1][1]
        while budget > 0 and len(self._running) + len(self._prompts) < timing.running_max:
            is_next = next((one for one in self._waiting if one.ready <= now), None)
            if is_next is None:
                break
            work = is_next
            self._waiting.remove(work)
            work.cached = work.done = min(self._find(work, now), work.tokens - 1)
            work.begun = True
            seconds += timing.cached_token * work.cached
            self._prompts.append(work)
            seconds += self._chunk(work, budget)
            budget -= chunks[-1][1]
        running = len(self._running)
        next_ready = min((one.ready for one in self._waiting), default=math.inf)
        if not chunks and not running:
            self.due = next_ready
            return
        contexts = sum(work.done for work in self._running) if running else 0
        seconds += timing.step + timing.running * running + timing.context * contexts
        self._steps = 1
        if not chunks:
            self._steps = min(work.left for work in self._running)
            if next_ready < math.inf:  # which ends a step: not one of many that go on
                self._steps = min(self._steps, max(1, math.ceil((next_ready - now) / seconds)))
            # Contexts grow by a token a step: their mean over all of them.
            seconds += timing.context * running * (self._steps - 1) / 2
        self._began, self._step_seconds = now, seconds
        self.due = now + self._steps * seconds

    def _chunk(self, work: Work, budget: int) -> float:
        tokens = min(budget, work.tokens - work.done)
        self._chunks.append((work, tokens))
        pairs = tokens * (work.done + (tokens + 1) / 2)
        return self._timing.token * tokens + self._timing.pair * pairs
