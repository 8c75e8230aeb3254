"""The engine: requests side by side, their prompts one after the other, as on one box.

A request loads what the driver has of its prompt, waits until the box is free, "computes" the rest for
as long as the model would take, and then says its answer token by token at the model's speed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeVar

from swdriver_shim.adapters.wafer import Speed
from workload_manager.emulator.cache import Prompt
from workload_manager.emulator.requests import Asked, BadRequest
from workload_manager.emulator.texts import Texts
from workload_manager.spec import EmulatorSpec

THREADS: Final = 4  # that load, compare and store
CHUNK_SECONDS: Final = 0.1  # between two pieces of an answer
_WIDTH_PER_LAYER: Final = 128
# A layer has about 12 weights for the square of its width.
_PARAMETERS_PER_LAYER_CUBED: Final = 12 * _WIDTH_PER_LAYER**2
T = TypeVar("T")


class Piece(NamedTuple):
    """What there is of an answer by now. `hit`: tokens of its prompt that were cached."""

    answer: Sequence[int]
    hit: int
    is_last: bool


class KvCache(Protocol):
    """See `cache.Cache`."""

    def load(self, tokens: Sequence[int], params: object, name: str) -> Prompt: ...
    def computed(self, prompt: Prompt, seconds: float) -> None: ...
    def answered(self, prompt: Prompt, answer: Sequence[int]) -> None: ...


@dataclass(slots=True)
class Figures:
    """Since the start, but for what is now."""

    waiting: int = 0  # now: for the box, or for what the driver has of its prompt
    running: int = 0  # now: being computed, or answering
    requests: int = 0
    aborted: int = 0
    failed: int = 0  # on purpose
    prompt_tokens: int = 0
    hit_tokens: int = 0
    answer_tokens: int = 0
    wrong_bytes: int = 0  # loaded ones that are not what was stored


def speed_of(spec: EmulatorSpec) -> Speed:
    """Of a model with so many parameters, in the usual proportions of layers and width."""
    layers = max(1, round((spec.parameters / _PARAMETERS_PER_LAYER_CUBED) ** (1 / 3)))
    return Speed(
        parameters=spec.parameters,
        layers=layers,
        width=_WIDTH_PER_LAYER * layers,
        operations_per_second=spec.operations_per_second,
    )


class Engine:
    """Used from one event loop. `fail_share`: of the requests that are answered with an error."""

    def __init__(
        self, cache: KvCache, texts: Texts, spec: EmulatorSpec, *, fail_share: float = 0.0
    ) -> None:
        self.figures = Figures()
        self.is_draining = False
        self._cache, self._texts = cache, texts
        self._speed = speed_of(spec)
        self._token_seconds = 1 / spec.answer_tokens_per_second
        self._fail_share = fail_share
        self._box = asyncio.Lock()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv")

    async def idle(self) -> None:
        """Returns when no request is being answered."""
        if self._in_flight:
            await self._idle.wait()

    def close(self) -> None:
        self._threads.shutdown()

    async def answer(self, asked: Asked) -> AsyncGenerator[Piece, None]:
        """Pieces of an answer, as they are generated. When the last one is given, all of it is stored.
        Closed early, it ends the request. Raises BadRequest before the first."""
        self._check()
        figures = self.figures
        figures.requests += 1
        figures.prompt_tokens += len(asked.prompt)
        self._in_flight += 1
        self._idle.clear()
        is_done = False
        try:
            prompt = await self._admitted(asked)
            figures.running += 1
            try:
                storing = await self._compute(prompt)
                answer = self._texts.answer(asked.prompt, asked.answer_tokens)
                async for end in self._generated(len(answer)):
                    figures.answer_tokens += end.new
                    is_last = end.at == len(answer)
                    if is_last:
                        await storing
                        await self._in_thread(lambda: self._cache.answered(prompt, answer))
                        is_done = True
                    yield Piece(answer[: end.at], prompt.hit, is_last)
            finally:
                figures.running -= 1
        finally:
            figures.aborted += not is_done
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _check(self) -> None:
        if self.is_draining:
            raise BadRequest("The engine is being stopped.", 503)
        asked_before = self.figures.requests
        if int((asked_before + 1) * self._fail_share) > int(asked_before * self._fail_share):
            self.figures.requests += 1
            self.figures.failed += 1
            raise BadRequest(
                "The emulator fails this request, as it was told to (--fail-requests).", 500
            )

    async def _admitted(self, asked: Asked) -> Prompt:
        """Returns when what the driver has of its prompt is there, and the box is its own."""
        figures = self.figures
        figures.waiting += 1
        try:
            prompt = await self._in_thread(
                lambda: self._cache.load(asked.prompt, asked.kv_transfer_params, asked.id)
            )
            figures.hit_tokens += prompt.hit
            figures.wrong_bytes += prompt.wrong_bytes
            await self._box.acquire()
        finally:
            figures.waiting -= 1
        return prompt

    async def _compute(self, prompt: Prompt) -> asyncio.Future[None]:
        """Returns when its KV is there, and the box is free. What comes back: when it is stored."""
        tokens = len(prompt.tokens)
        # The last token is computed in any case, as engines do: its logits are wanted.
        hit = min(prompt.hit, tokens - 1)
        seconds = self._speed.compute_seconds(tokens - hit, hit)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._box.release()
        return asyncio.ensure_future(self._in_thread(lambda: self._cache.computed(prompt, seconds)))

    async def _generated(self, count: int) -> AsyncIterator[_End]:
        """The first token is there at once; the others come in pieces, on time."""
        loop = asyncio.get_running_loop()
        began, each = loop.time(), max(1, round(CHUNK_SECONDS / self._token_seconds))
        at = 1
        yield _End(1, 1)
        while at < count:
            new = min(each, count - at)
            at += new
            await asyncio.sleep(began + (at - 1) * self._token_seconds - loop.time())
            yield _End(at, new)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """What has begun there is finished, also for a request that was given up."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        with contextlib.suppress(asyncio.CancelledError):
            return await asyncio.shield(running)
        running.add_done_callback(_ignore)
        raise asyncio.CancelledError


class _End(NamedTuple):
    at: int  # tokens that are there
    new: int


def _ignore(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()
