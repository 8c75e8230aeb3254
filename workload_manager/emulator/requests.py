"""OpenAI's API as the emulator has it: what it reads of requests, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from telemetry.decoder import Limits, Malformed, decode
from workload_manager.emulator.texts import NotTokens, Texts

BODY_BYTES_MAX: Final = 64 << 20
BODY: Final = Limits(BODY_BYTES_MAX, 1 << 23, depth_max=64)
ANSWER_TOKENS: Final = 64  # where a request does not say how many
MESSAGES_MAX: Final = 100_000
_CHAT_FIELDS: Final = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("reasoning_effort", "chat_template_kwargs"),
    }
)


class BadRequest(ValueError):
    """A sentence. `status`: of the answer."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


class StreamOptions(Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(Struct, kw_only=True):
    """What it reads of a request; all else is ignored, as it would be by greedy decoding."""

    model: str = ""
    prompt: str | list[Any] | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=MESSAGES_MAX)] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kv_transfer_params: Any = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be served. `answer_tokens`: so many are generated."""

    id: str
    model: str
    prompt: Sequence[int]
    answer_tokens: int
    finish: str  # why it ends there: "length", or "stop" where the request does not say how many
    is_chat: bool
    is_stream: bool
    wants_usage: bool = False
    wants_usage_always: bool = False
    kv_transfer_params: object = None


def asked(raw: bytes, texts: Texts, name: str, model: str, tokens_max: int, *, is_chat: bool) -> Asked:
    """A request's body, as a whole. Raises BadRequest."""
    try:
        body = decode(raw, Body, BODY)
    except Malformed as error:
        raise BadRequest(f"{error}.") from None
    if body.model != model:
        raise BadRequest(f"The model “{body.model[:100]}” does not exist.", 404)
    if body.n not in (None, 1):
        raise BadRequest("The emulator gives one answer to a request: `n` is 1.")
    prompt = _prompt(body, texts, is_chat=is_chat)
    if not 0 < len(prompt) < tokens_max:
        raise BadRequest(
            f"A prompt and its answer have {tokens_max} tokens at most; this prompt has {len(prompt)}."
        )
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    room = tokens_max - len(prompt)
    if wanted is not None and not 1 <= wanted <= room:
        raise BadRequest(
            f"The answer has 1 to {room} tokens: the prompt has {len(prompt)}, and together they have "
            f"{tokens_max} at most. `max_tokens` is {wanted}."
        )
    options = body.stream_options or StreamOptions()
    return Asked(
        name,
        model,
        prompt,
        wanted or min(ANSWER_TOKENS, room),
        "length" if wanted else "stop",
        is_chat,
        body.stream is True,
        options.include_usage,
        options.continuous_usage_stats,
        body.kv_transfer_params,
    )


def _prompt(body: Body, texts: Texts, *, is_chat: bool) -> Sequence[int]:
    try:
        if is_chat:
            if not body.messages:
                raise BadRequest("A chat has a message or more in `messages`.")
            fields = msgspec.structs.asdict(body)
            return texts.chat({name: fields[name] for name in _CHAT_FIELDS})
        if isinstance(body.prompt, str):
            return texts.encode(body.prompt)
    except NotTokens as error:
        raise BadRequest(f"{error}.") from None
    given = body.prompt or []
    if len(given) == 1 and isinstance(given[0], str | list):  # a list of one prompt
        return _prompt(Body(prompt=given[0]), texts, is_chat=False)
    if all(type(one) is int and 0 <= one < 1 << 32 for one in given):
        return given
    raise BadRequest("`prompt` is a text, a list of tokens, or a list with one of these.")


@dataclass(slots=True)
class Reply:
    """An answer in OpenAI's form, as a whole or in events."""

    asked: Asked
    hit: int
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, answered: int) -> bytes:
        said: dict[str, Any] = {"text": text}
        if self.asked.is_chat:
            said = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": self.asked.finish}
        kind = "chat.completion" if self.asked.is_chat else "text_completion"
        return msgspec.json.encode(
            {**self._head(kind), "choices": [choice], "usage": self._usage(answered)}
        )

    def event(self, text: str, answered: int, *, is_first: bool, is_last: bool) -> bytes:
        """`answered`: tokens until now."""
        said: dict[str, Any] = {"text": text}
        if self.asked.is_chat:
            said = {"delta": {**({"role": "assistant"} if is_first else {}), "content": text}}
        finish = self.asked.finish if is_last else None
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        more = {"usage": self._usage(answered)} if self.asked.wants_usage_always else {}
        return _event({**self._head(self._kind), "choices": [choice], **more})

    def last(self, answered: int) -> bytes:
        """What follows the answer."""
        done = b"data: [DONE]\n\n"
        if not self.asked.wants_usage:
            return done
        return _event({**self._head(self._kind), "choices": [], "usage": self._usage(answered)}) + done

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.asked.is_chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.asked.is_chat else 'cmpl'}-{self.asked.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.asked.model}

    def _usage(self, answered: int) -> dict[str, Any]:
        prompt = len(self.asked.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answered,
            "total_tokens": prompt + answered,
            "prompt_tokens_details": {"cached_tokens": self.hit},
        }


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def models(model: str, tokens_max: int) -> bytes:
    one = {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "tidegate",
        "root": model,
        "max_model_len": tokens_max,
    }
    return msgspec.json.encode({"object": "list", "data": [one]})


def refusal(sentence: str, status: int) -> bytes:
    kind = {404: "NotFoundError", 400: "BadRequestError", 503: "ServiceUnavailableError"}
    name = kind.get(status, "InternalServerError")
    return msgspec.json.encode({"error": {"message": sentence, "type": name, "code": status}})
