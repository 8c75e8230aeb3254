"""Prompts of requests as tokens, by the tokenizer of their model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import UnsetType

from inference_brain.api.errors import ApiError, invalid, unavailable
from inference_brain.api.requests import Chat, Completion, Generation, Tokenize
from inference_brain.desired import ServedModel
from inference_brain.tokens.errors import BadTokenizer, TokenizerBusy, TokensError, TooLong
from inference_brain.tokens.messages import Chat as Messages
from inference_brain.tokens.service import AnyTokenizer, TokenService
from inference_brain.tokens.tokenizer import load
from inference_brain.tokens.turns import Tokens
from inference_brain.tokens.uploaded import SECONDS, UploadedTokenizer, is_uploaded

log = logging.getLogger(__name__)

PROMPTS_AT_ONCE: Final = 8
LOAD_SECONDS: Final = 20.0  # that a request waits for its model's tokenizer


class Found(NamedTuple):
    """`tokens`: of the prompt, or of the first of several; None where they are not known. `total` and
    `longest`: how many all of them have, and the longest; 0 where it is not known."""

    tokens: Tokens | None
    total: int
    longest: int


_UNKNOWN: Final = Found(None, 0, 0)


class Prompts:
    """The tokenizers of all models that are served. Used from one event loop. `seconds`: that one which
    was uploaded may take for a prompt."""

    def __init__(self, service: TokenService | None = None, seconds: float = SECONDS) -> None:
        self.service = service or TokenService()
        self.stopped = 0  # processes of uploaded tokenizers that had to be replaced
        self._seconds = seconds
        self._loading: dict[str, asyncio.Task[AnyTokenizer]] = {}  # by folder
        self._uploaded: dict[str, UploadedTokenizer] = {}
        self.broken: dict[str, str] = {}  # why a folder can't be used

    def follow(self, models: Iterable[ServedModel]) -> None:
        """Load the tokenizers of these models, and forget the others. One that could not be loaded is
        tried again."""
        wanted = {model.tokenizer for model in models if model.tokenizer}
        for folder in self._loading.keys() - wanted | self.broken.keys():
            if loading := self._loading.pop(folder, None):
                loading.cancel()
            if uploaded := self._uploaded.pop(folder, None):
                uploaded.close()
            self.broken.pop(folder, None)
        for folder in wanted - self._loading.keys():
            task = asyncio.get_running_loop().create_task(self._load(folder))
            task.add_done_callback(_ignore)
            self._loading[folder] = task

    def forget(self, org: str | None) -> None:
        """Forget what is kept of an org's prompts; of all orgs' without one."""
        self.service.turns.forget(org)

    def close(self) -> None:
        self.service.close()
        for uploaded in self._uploaded.values():
            uploaded.close()

    def _count_stopped(self) -> None:
        self.stopped += 1

    async def _load(self, folder: str) -> AnyTokenizer:
        try:
            if is_uploaded(Path(folder)):
                made = UploadedTokenizer(Path(folder), self._seconds, self._count_stopped)
                self._uploaded[folder] = made
                await made.load()
                return made
            return await asyncio.to_thread(load, Path(folder))
        except (BadTokenizer, OSError) as error:
            self.broken[folder] = str(error)
            log.warning("The tokenizer in %s can't be used: %s", folder, error)
            raise

    def state(self, folder: str) -> str:
        """Of a tokenizer: "loading", "ready", or why it can't be used."""
        task = self._loading.get(folder)
        is_ready = task is not None and task.done() and not task.cancelled() and not task.exception()
        return self.broken.get(folder) or ("ready" if is_ready else "loading")

    async def tokenizer(self, model: ServedModel) -> AnyTokenizer | None:
        """None for a model without one, and for one whose tokenizer can't be used: its prompts are sent
        on as they came. Raises ApiError while it is being loaded."""
        task = self._loading.get(model.tokenizer)
        if task is None:
            return None
        if not task.done():
            await asyncio.wait([task], timeout=LOAD_SECONDS)
        if not task.done():
            raise unavailable("The model's tokenizer is being loaded. Try again.", "loading", 5)
        return None if task.cancelled() or task.exception() else task.result()

    async def of(self, org: str, model: ServedModel, request: Generation) -> Found:
        """The tokens of a request's prompt. Raises ApiError."""
        tokenizer = await self.tokenizer(model)
        if tokenizer is None:
            return _given(request, self.service)
        try:
            if isinstance(request, Chat):
                chat = _messages(request)
                tokens = await self.service.chat(tokenizer, org, chat, model.tokens_max)
                return Found(tokens, len(tokens), len(tokens)) if tokens else _UNKNOWN
            assert isinstance(request, Completion)  # noqa: S101 - there are two kinds
            return await self._of_completion(tokenizer, org, model, request)
        except TokensError as error:
            raise _refused(error, "messages" if isinstance(request, Chat) else "prompt") from None

    async def _of_completion(
        self, tokenizer: AnyTokenizer, org: str, model: ServedModel, request: Completion
    ) -> Found:
        found: list[Tokens] = []
        for number, prompt in enumerate(request.prompts, 1):
            if not number % PROMPTS_AT_ONCE:
                await asyncio.sleep(0)  # others have their turn
            if isinstance(prompt, str):
                adds = request.add_special_tokens is not False
                found.append(
                    await self.service.text(
                        tokenizer, org, prompt, model.tokens_max, add_special_tokens=adds
                    )
                )
            else:
                found.append(self.service.given(prompt))
        return _of_several(found[0], found)

    async def count(self, org: str, model: ServedModel, request: Tokenize) -> Sequence[int] | None:
        """The tokens of `POST /tokenize`; None if the model has no tokenizer here. Raises ApiError."""
        tokenizer = await self.tokenizer(model)
        if tokenizer is None:
            return None
        try:
            if request.prompt is not None:
                adds = request.add_special_tokens is not False
                text = request.prompt
                told: Tokens | None = await self.service.text(
                    tokenizer, org, text, model.tokens_max, add_special_tokens=adds
                )
            else:
                chat = Messages(
                    request.messages or (),
                    request.tools,
                    None,
                    request.add_generation_prompt,
                    request.continue_final_message,
                    None,
                    request.chat_template_kwargs or {},
                )
                told = await self.service.chat(tokenizer, org, chat, model.tokens_max)
        except TokensError as error:
            raise _refused(error, "prompt" if request.messages is None else "messages") from None
        return None if told is None else told.ids

    async def decode(self, org: str, model: ServedModel, ids: Sequence[int]) -> str | None:
        """The text of tokens; None if the model has no tokenizer here. Raises ApiError."""
        tokenizer = await self.tokenizer(model)
        try:
            return await self.service.decode(tokenizer, org, ids) if tokenizer else None
        except TokensError as error:
            raise _refused(error, "tokens") from None

    async def texts(self, org: str, model: ServedModel, ids: Sequence[int]) -> list[str] | None:
        """The text of each token. Raises ApiError."""
        tokenizer = await self.tokenizer(model)
        try:
            return await self.service.decode_each(tokenizer, org, ids) if tokenizer else None
        except TokensError as error:
            raise _refused(error, "tokens") from None


def _given(request: Generation, service: TokenService) -> Found:
    """Prompts that came as tokens need no tokenizer."""
    if not isinstance(request, Completion) or any(isinstance(one, str) for one in request.prompts):
        return _UNKNOWN
    return _of_several(service.given(request.prompts[0]), request.prompts)


def _of_several(first: Tokens, prompts: Sequence[Sized]) -> Found:
    sizes = [*map(len, prompts)]
    return Found(first, sum(sizes), max(sizes))


def _messages(request: Chat) -> Messages:
    return Messages(
        request.messages,
        _set(request.tools),
        _set(request.documents),
        request.add_generation_prompt is not False,
        request.continue_final_message is True,
        _set(request.reasoning_effort),
        _set(request.chat_template_kwargs) or {},
    )


def _set(value: Any) -> Any:
    return None if isinstance(value, UnsetType) else value


def _refused(error: TokensError, param: str) -> ApiError:
    sentence = f"{error}.".replace("..", ".")
    if isinstance(error, TokenizerBusy):
        return unavailable(sentence, "tokenizer_busy")
    # By this code clients know that another model, or less of the conversation, would help.
    code = "context_length_exceeded" if isinstance(error, TooLong) else None
    return invalid(sentence, param, code)


def _ignore(task: asyncio.Task[AnyTokenizer]) -> None:
    """Whoever asks for the tokenizer learns what became of it."""
    if not task.cancelled():
        task.exception()
