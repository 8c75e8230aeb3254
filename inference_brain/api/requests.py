"""Bodies of requests: what clients may ask for, checked before anything is queued.

Every field that is sent on is named here; another one is refused, as OpenAI does it. Three kinds of
fields never reach an engine: those that would say whose cache a request may use (`kv_transfer_params`,
`cache_salt`, `vllm_xargs` and identifiers of images), those that are the brain's (`priority` and
`tidegate`), and those that only OpenAI's own service has a use for (`user`, `metadata`, …).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from inference_brain.api.errors import ApiError, invalid, of_malformed
from inference_brain.api.scans import containers_and_commas, is_deeper, may_have_long_integer
from inference_brain.tokens.messages import RESERVED
from swdriver_shim.policy import AS_USUAL, Rules
from telemetry.decoder import Limits, Malformed, decode, too_deep

# The bytes are bounded while they are read.
BODY: Final = Limits(1 << 30, 1 << 23, depth_max=None, containers_max=1 << 19)
DEPTH_MAX: Final = 64
VALUE_BYTES: Final = 16  # that a value takes in memory beside its text, about,
CONTAINER_BYTES: Final = 200  # and an array or object
_SHORT_BYTES: Final = 4 << 10  # are counted sooner one by one
STOPS_MAX: Final = 16
MESSAGES_MAX: Final = 100_000
PROMPTS_MAX: Final = 2048  # of one request
_USUAL_ROLES: Final = ("user", "assistant", "system")  # compared and not hashed: it may be anything
ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_SEPARATE: Final = ("kv_transfer_params", "cache_salt", "vllm_xargs", "request_id")
_OURS: Final = ("priority", "tidegate")
_OPENAI_ONLY: Final = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "verbosity"),
)
# What engines prepare before the first token, for as long as the client makes it: a grammar, say.
_PREPARED: Final = attrgetter(
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("logit_bias", "allowed_token_ids", "bad_words", "use_beam_search", "echo"),
)
_REMOVED: Final = (*_SEPARATE, *_OURS, *_OPENAI_ONLY)

Count = Annotated[int, Meta(ge=0, le=1 << 30)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Stop = Annotated[str, Meta(max_length=10_000)]
Text = Annotated[str, Meta(max_length=100_000)]
Anything = dict[str, Any]
T = TypeVar("T", bound=Struct)


class StreamOptions(Struct, forbid_unknown_fields=True, omit_defaults=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Generation(Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions have in common. UNSET: the client does not say."""

    model: Annotated[str, Meta(min_length=1, max_length=500)]
    stream: bool | UnsetType | None = UNSET
    stream_options: StreamOptions | UnsetType | None = UNSET
    max_tokens: Count | UnsetType | None = UNSET
    n: Annotated[int, Meta(ge=1, le=128)] | UnsetType | None = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType | None = UNSET
    top_p: Share | UnsetType | None = UNSET
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOPS_MAX)] | UnsetType | None = UNSET
    presence_penalty: Penalty | UnsetType | None = UNSET
    frequency_penalty: Penalty | UnsetType | None = UNSET
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)]
        | UnsetType
        | None
    ) = UNSET
    seed: int | UnsetType | None = UNSET
    response_format: Anything | UnsetType | None = UNSET
    # Of engines beside OpenAI's API
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] | UnsetType | None = UNSET
    min_p: Share | UnsetType | None = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | UnsetType | None = UNSET
    length_penalty: Annotated[float, Meta(ge=-100, le=100)] | UnsetType | None = UNSET
    use_beam_search: bool | UnsetType | None = UNSET
    min_tokens: Count | UnsetType | None = UNSET
    ignore_eos: bool | UnsetType | None = UNSET
    stop_token_ids: Annotated[list[Count], Meta(max_length=4096)] | UnsetType | None = UNSET
    allowed_token_ids: Annotated[list[Count], Meta(max_length=1 << 20)] | UnsetType | None = UNSET
    bad_words: Annotated[list[Text], Meta(max_length=4096)] | UnsetType | None = UNSET
    include_stop_str_in_output: bool | UnsetType | None = UNSET
    skip_special_tokens: bool | UnsetType | None = UNSET
    detokenize: bool | UnsetType | None = UNSET
    spaces_between_special_tokens: bool | UnsetType | None = UNSET
    add_special_tokens: bool | UnsetType | None = UNSET
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=1000)] | UnsetType | None = UNSET
    return_token_ids: bool | UnsetType | None = UNSET
    return_tokens_as_token_ids: bool | UnsetType | None = UNSET
    structured_outputs: Anything | UnsetType | None = UNSET
    guided_json: Any | UnsetType = UNSET
    guided_regex: Text | UnsetType | None = UNSET
    guided_choice: Annotated[list[Text], Meta(max_length=10000)] | UnsetType | None = UNSET
    guided_grammar: Text | UnsetType | None = UNSET
    # Ours
    priority: Annotated[int, Meta(ge=0, le=100)] | UnsetType | None = UNSET
    tidegate: Rules | UnsetType | None = UNSET
    # Not sent on
    user: Any | UnsetType = UNSET
    metadata: Any | UnsetType = UNSET
    store: Any | UnsetType = UNSET
    service_tier: Any | UnsetType = UNSET
    safety_identifier: Any | UnsetType = UNSET
    prompt_cache_key: Any | UnsetType = UNSET
    prompt_cache_retention: Any | UnsetType = UNSET
    verbosity: Any | UnsetType = UNSET
    kv_transfer_params: Any | UnsetType = UNSET
    cache_salt: Any | UnsetType = UNSET
    vllm_xargs: Any | UnsetType = UNSET
    request_id: Any | UnsetType = UNSET

    @property
    def is_stream(self) -> bool:
        return self.stream is True

    @property
    def answers(self) -> int:
        """How many answers it asks for."""
        return _number(self.n) or 1

    @property
    def answer_tokens_max(self) -> int | None:
        """Of each answer; None: as many as fit."""
        return _number(self.max_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether engines do nothing before its first token but compute its prompt."""
        if self.answers > 1 or _number(self.prompt_logprobs) is not None:
            return False
        if any(_PREPARED(self)):
            return False
        form = self.response_format
        return not isinstance(form, dict) or form.get("type") == "text"

    @property
    def wants_usage(self) -> bool:
        options = self.stream_options
        return isinstance(options, StreamOptions) and options.include_usage

    @property
    def rules(self) -> Rules:
        """Its own rules for the cache: they can only be stricter than those of its org."""
        return self.tidegate if isinstance(self.tidegate, Rules) else AS_USUAL

    @property
    def wish(self) -> int | None:
        """The priority that it names."""
        return _number(self.priority)


class Completion(Generation, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    suffix: str | UnsetType | None = UNSET
    echo: bool | UnsetType | None = UNSET
    best_of: Annotated[int, Meta(ge=1, le=128)] | UnsetType | None = UNSET
    logprobs: Annotated[int, Meta(ge=0, le=1000)] | UnsetType | None = UNSET

    @property
    def answers(self) -> int:
        each = max(_number(self.n) or 1, _number(self.best_of) or 1)
        return each * len(self.prompts)

    @property
    def prompts(self) -> list[Any]:
        """Each a text, or a list of tokens."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return self.prompt


class Chat(Generation, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Anything], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Count | UnsetType | None = UNSET
    logprobs: bool | UnsetType | None = UNSET
    top_logprobs: Annotated[int, Meta(ge=0, le=1000)] | UnsetType | None = UNSET
    tools: Annotated[list[Anything], Meta(max_length=4096)] | UnsetType | None = UNSET
    tool_choice: str | Anything | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    functions: Annotated[list[Anything], Meta(max_length=4096)] | UnsetType | None = UNSET
    function_call: str | Anything | UnsetType | None = UNSET
    modalities: list[str] | UnsetType | None = UNSET
    audio: Anything | UnsetType | None = UNSET
    prediction: Anything | UnsetType | None = UNSET
    reasoning_effort: Annotated[str, Meta(max_length=100)] | UnsetType | None = UNSET
    include_reasoning: bool | UnsetType | None = UNSET
    echo: bool | UnsetType | None = UNSET
    add_generation_prompt: bool | UnsetType | None = UNSET
    continue_final_message: bool | UnsetType | None = UNSET
    chat_template_kwargs: Anything | UnsetType | None = UNSET
    documents: list[Anything] | UnsetType | None = UNSET

    @property
    def is_plain(self) -> bool:
        choice = self.tool_choice
        is_free = not isinstance(choice, dict) and choice != "required"  # else there is a grammar
        return is_free and super().is_plain and not _has_media(self.messages)

    @property
    def answer_tokens_max(self) -> int | None:
        newer = _number(self.max_completion_tokens)
        return _number(self.max_tokens) if newer is None else newer


class Tokenize(Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: of a `prompt`, or of `messages`."""

    model: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Anything], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    tools: list[Anything] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Anything | None = None
    return_token_strs: bool = False


class Detokenize(Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    model: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    tokens: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(max_length=1 << 22)]


def _has_media(messages: Sequence[Anything]) -> bool:
    return any(
        isinstance(part, dict) and "text" not in part
        for message in messages
        if isinstance(parts := message.get("content"), list)
        for part in parts
    )


G = TypeVar("G", bound=Generation)
_CHAT: Final = msgspec.json.Decoder(Chat)
_COMPLETION: Final = msgspec.json.Decoder(Completion)
_TOKENIZE: Final = msgspec.json.Decoder(Tokenize)
_DETOKENIZE: Final = msgspec.json.Decoder(Detokenize)


def chat(raw: bytes) -> Chat:
    """Raises ApiError."""
    request = _decoded(raw, _CHAT)
    _check(request)
    for index, message in enumerate(request.messages):
        if type(message.get("content")) is not str or message.get("role") not in _USUAL_ROLES:
            _check_message(index, message)
    given = request.chat_template_kwargs
    if isinstance(given, dict) and (refused := sorted(RESERVED & given.keys())):
        reason = f"'chat_template_kwargs' may not have {', '.join(refused)}."
        raise invalid(reason, "chat_template_kwargs", "invalid_value")
    if request.top_logprobs not in (None, UNSET, 0) and request.logprobs is not True:
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs", "invalid_value")
    return request


def completion(raw: bytes) -> Completion:
    """Raises ApiError."""
    request = _decoded(raw, _COMPLETION)
    _check(request)
    prompts = request.prompts
    if not prompts:
        raise invalid("'prompt' is an empty list.", "prompt", "invalid_value")
    if len(prompts) > PROMPTS_MAX:
        raise invalid(f"'prompt' has more than {PROMPTS_MAX} prompts.", "prompt", "invalid_value")
    for prompt in prompts:
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, list) or not prompt or not _are_tokens(prompt):
            raise invalid(
                "'prompt' is a text, a list of texts, a list of tokens, or a list of such lists.",
                "prompt",
                "invalid_value",
            )
    return request


def tokenize(raw: bytes) -> Tokenize:
    """Raises ApiError."""
    request = _decoded(raw, _TOKENIZE)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("Give either 'prompt' or 'messages'.", "prompt")
    for index, message in enumerate(request.messages or ()):
        _check_message(index, message)
    return request


def detokenize(raw: bytes) -> Detokenize:
    """Raises ApiError."""
    return _decoded(raw, _DETOKENIZE)


def memory_of(raw: bytes) -> int:
    """About how many bytes the values of a body take beside itself: of small ones many times as much."""
    if len(raw) <= _SHORT_BYTES:
        containers, values = raw.count(b"[") + raw.count(b"{"), raw.count(b",")
        return CONTAINER_BYTES * containers + VALUE_BYTES * values
    containers, values = containers_and_commas(raw)
    return CONTAINER_BYTES * containers + VALUE_BYTES * values


def sent_on(request: G) -> G:
    """A copy for an engine, without what clients may not set. The messages in it are the same."""
    made = copy.copy(request)
    for name in _REMOVED:
        setattr(made, name, UNSET)
    return made


def _number(value: int | UnsetType | None) -> int | None:
    return value if isinstance(value, int) else None


def _decoded(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        value = decode(raw, decoder, BODY, may_have_long_integer)
    except Malformed as error:
        raise of_malformed(error) from None
    if is_deeper(value, raw, DEPTH_MAX):
        raise of_malformed(too_deep(DEPTH_MAX))
    return value


def _check(request: Generation) -> None:
    if request.stream_options not in (None, UNSET) and not request.is_stream:
        raise invalid(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options"
        )


def _check_message(index: int, message: Anything) -> None:
    """Its role and the form of its content. Identifiers of media are removed: engines take them for what
    is in the media."""
    at = f"messages[{index}]"
    role = message.get("role")
    if role is None:
        raise invalid(
            f"Missing required parameter: '{at}.role'.", f"{at}.role", "missing_required_parameter"
        )
    if not isinstance(role, str) or role not in ROLES:
        allowed = ", ".join(f"'{one}'" for one in sorted(ROLES))
        raise invalid(
            f"Invalid value for '{at}.role': it is one of {allowed}.", f"{at}.role", "invalid_value"
        )
    content = message.get("content")
    if content is None:
        if role in ("system", "developer", "user"):
            raise invalid(
                f"Missing required parameter: '{at}.content'.",
                f"{at}.content",
                "missing_required_parameter",
            )
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _wrong_content(at)
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _wrong_content(at)
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise _wrong_content(at)
        part.pop("uuid", None)
        for inner in part.values():
            if isinstance(inner, dict):
                inner.pop("uuid", None)


def _wrong_content(at: str) -> ApiError:
    return invalid(
        f"Invalid value for '{at}.content': it is a text, or a list of parts, each with a 'type'.",
        f"{at}.content",
        "invalid_value",
    )


def _are_tokens(prompt: Sequence[Any]) -> bool:
    return set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < 1 << 32
