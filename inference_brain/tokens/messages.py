"""Messages of a chat request as chat templates get them, which is how vLLM prepares them.

Clients send what OpenAI's API allows; templates are written for less. So contents become one string or a
list of parts, whichever the template is written for, arguments of tool calls become objects, and tools
have the fields that vLLM gives them, in its order: what a template prints of them is part of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from inference_brain.tokens.errors import BadMessages
from telemetry.decoder import Limits, Malformed, decode

ContentFormat = Literal["string", "openai"]
Message = Mapping[str, Any]

# Parts whose text is in the field of their own name, or in `text`.
_TEXT_FIELDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MAY_BE_EMPTY: Final = frozenset({"text", "refusal"})
_PLAIN: Final = frozenset({"assistant", "tool", "user"})
_MEDIA_FIELDS: Final = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "input_image",
        "prompt_embeds",
        "video_embeds",
        "video_url",
    }
)
# What parts of OpenAI's API have: everything else is handed on to the template.
_KNOWN_FIELDS: Final = _MEDIA_FIELDS - {"input_image", "prompt_embeds"} | {
    "closed",
    "data",
    "file",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
}
_ATTRIBUTION: Final = "x-anthropic-billing-header"  # of some clients: another one with each request
_ARGUMENTS: Final = Limits(8 << 20, 1 << 20, 200)
RESERVED: Final = frozenset({"chat_template", "documents", "messages", "self", "tokenize", "tools"})


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt in messages, as clients send it. Nothing of it is changed.

    `template`: the name of one of the model's templates. `reasoning_effort` and `template_kwargs`: what
    templates may ask for besides; templates see those that they name.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None

    def variables(self) -> dict[str, Any]:
        """What the template is given besides messages and tools. Raises BadMessages."""
        if refused := sorted(RESERVED & self.template_kwargs.keys()):
            raise BadMessages(f"chat_template_kwargs may not have {', '.join(refused)}")
        if self.add_generation_prompt and self.continue_final_message:
            raise BadMessages("continue_final_message and add_generation_prompt can't both be set")
        made: dict[str, Any] = {"documents": None, **self.template_kwargs}
        if self.documents is not None:
            made["documents"] = self.documents
        if self.reasoning_effort is not None:
            made["reasoning_effort"] = self.reasoning_effort
            made.setdefault("enable_thinking", self.reasoning_effort != "none")
        made["add_generation_prompt"] = self.add_generation_prompt
        return made


def has_media(messages: Sequence[Message]) -> bool:
    """Whether any part of them is no text, such as an image: then text alone is not the prompt."""
    return any(
        isinstance(part, Mapping)
        and (not _MEDIA_FIELDS.isdisjoint(part) or part.get("type", "text") not in _TEXT_FIELDS)
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )


def prepare(
    messages: Sequence[Message], content_format: ContentFormat, *, has_developer: bool
) -> list[dict[str, Any]]:
    """The messages as a template gets them. `has_developer`: whether it knows that role; else such
    messages are the system's. Raises BadMessages."""
    if not messages:
        raise BadMessages("A chat needs at least one message")
    made = [_prepared(message, content_format) for message in messages]
    if not has_developer and any(one["role"] == "developer" for one in made):
        return _one_system([_as_system(one) for one in made])
    return made


def prepare_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools with the fields that vLLM's have, in their order. Raises BadMessages."""
    return None if tools is None else [_tool(one) for one in tools]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadMessages("A tool has a function with a name")
    deferred = tool.get("defer_loading")
    described: dict[str, Any] = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        described["strict"] = function["strict"]
    if (later := function.get("defer_loading", deferred)) is not None:
        described["defer_loading"] = later
    made = {"type": "function", "function": described}
    return made if deferred is None else {**made, "defer_loading": deferred}


def _prepared(message: Message, content_format: ContentFormat) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadMessages("A message has a role")
    if len(message) == 2 and isinstance(content, str) and content_format == "string" and role in _PLAIN:
        return {"role": role, "content": content}  # as most are
    parts: Sequence[Any]
    if content is None:
        parts = ()
    elif isinstance(content, str):
        parts = ({"type": "text", "text": content},)
    elif isinstance(content, list):
        parts = content
    else:
        raise BadMessages("The content of a message is a string, or a list of parts")
    if role == "system":
        parts = [one for part in parts for one in _without_attribution(part)]
    texts = [text for part in parts if (text := _text(part)) is not None]
    made: dict[str, Any] = {"role": role, "content": "\n".join(text for text, _ in texts)}
    # Results of tools are strings for every template: few expect parts there.
    if content_format == "openai" and role != "tool":
        made["content"] = [{"type": "text", "text": text, **more} for text, more in texts]
    if role == "assistant":
        _prepare_answer(message, made)
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            made[name] = message[name]
    if role == "developer":
        made["tools"] = message.get("tools")
    return made


def _prepare_answer(message: Message, made: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise BadMessages("tool_calls is a list")
    if calls:
        made["tool_calls"] = [_call(one) for one in calls]
    if (reasoning := message.get("reasoning")) is not None:
        made["reasoning"] = made["reasoning_content"] = reasoning


def _call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise BadMessages("A tool call is an object with a function")
    if call.get("type", "function") != "function":
        raise BadMessages("A tool call of an assistant is of type function")
    # In vLLM's order: a template may print them as they are.
    described = {"arguments": _arguments(function.get("arguments")), "name": function.get("name")}
    ordered = {name: call[name] for name in ("id", "function", "type") if name in call}
    return {**ordered, **call, "function": {**described, **function, **described}}


def _arguments(given: object) -> Mapping[str, Any]:
    """As an object. What is none, or no JSON, is an empty one: it was the model that wrote it, and the
    conversation has to go on."""
    if isinstance(given, str):
        try:
            given = decode(given, object, _ARGUMENTS)
        except Malformed:
            return {}
    return given if isinstance(given, Mapping) else {}


def _text(part: object) -> tuple[str, dict[str, Any]] | None:
    """The text of a part and what else it has that OpenAI's API does not know; None for one that is
    empty."""
    if isinstance(part, str):
        return part, {}
    if not isinstance(part, Mapping) or not isinstance(kind := part.get("type"), str):
        raise BadMessages("A part of a message has a type")
    if kind not in _TEXT_FIELDS:
        raise BadMessages("A part of a message is of a type that is not known")
    text = part.get(_TEXT_FIELDS[kind])
    if text is None and kind in _MAY_BE_EMPTY:
        return None
    if not isinstance(text, str):
        raise BadMessages(f"A part of type {kind} has a string in {_TEXT_FIELDS[kind]}")
    return text, {name: value for name, value in part.items() if name not in _KNOWN_FIELDS}


def _without_attribution(part: Any) -> Iterator[Any]:
    """A part of a system message without a first line that names the client, which would be another one
    with each request."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if not isinstance(text, str) or not text.startswith(_ATTRIBUTION):
        yield part
    elif rest := text.partition("\n")[2]:
        yield rest if isinstance(part, str) else {**part, "text": rest}


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One message of the system, at the beginning, where templates want it."""
    systems = [one for one in messages if one["role"] == "system"]
    if not systems or (len(systems) == 1 and messages[0]["role"] == "system"):
        return messages
    contents = [_joined(one.get("content")) for one in systems]
    first = {"role": "system", "content": "\n\n".join(one for one in contents if one)}
    return [first, *(one for one in messages if one["role"] != "system")]


def _joined(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return str(content or "")
