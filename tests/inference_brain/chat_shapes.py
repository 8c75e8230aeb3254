"""Folders of models as families have them: a small tokenizer, a configuration, and a chat template of
our own in the family's shape. And the conversations that templates are tried with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.inference_brain.small_tokenizers import SHAPES as TOKENIZERS
from tests.inference_brain.small_tokenizers import wide

TEMPLATES: Final = Path(__file__).with_name("chat_templates")
GOLDENS: Final = Path(__file__).with_name("goldens")


@dataclass(frozen=True)
class Shape:
    """`in_config`: the templates are in the configuration, and not in files of their own."""

    tokenizer: str
    special: Mapping[str, str]
    more: Mapping[str, str] = field(default_factory=dict)
    in_config: bool = False
    legacy_special: bool = False


SHAPES: Final = {
    "chatml": Shape("gpt2", {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}, in_config=True),
    "command_r": Shape(
        "gpt2",
        {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
        {"tool_use": "command_r.tool_use"},
        in_config=True,
    ),
    "deepseek": Shape(
        "deepseek",
        {"bos_token": wide("begin▁of▁sentence"), "eos_token": wide("end▁of▁sentence")},
    ),
    "gemma": Shape("gemma", {"bos_token": "<bos>", "eos_token": "<eos>"}, in_config=True),
    "glm": Shape("qwen", {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}),
    "granite": Shape("gpt2", {"bos_token": "<|end_of_text|>", "eos_token": "<|end_of_text|>"}),
    "harmony": Shape("llama3", {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"}),
    "llama3": Shape("llama3", {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "mistral": Shape("mistral", {"bos_token": "<s>", "eos_token": "</s>"}, legacy_special=True),
    "parts": Shape("qwen", {"eos_token": "<|im_end|>"}),
    "phi3": Shape("phi3", {"bos_token": "<s>", "eos_token": "<|endoftext|>"}, in_config=True),
    "qwen2": Shape("qwen", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "qwen3": Shape("qwen", {"eos_token": "<|im_end|>"}, in_config=True),
    "zephyr": Shape("llama2", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
}


def write_folder(name: str, folder: Path) -> Path:
    """A model's folder of this shape, as a hub would have it."""
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    TOKENIZERS[shape.tokenizer]().save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if shape.legacy_special:
        whole = {
            key: {"content": text, "lstrip": False, "normalized": False, "rstrip": False}
            for key, text in shape.special.items()
        }
        (folder / "special_tokens_map.json").write_text(json.dumps(whole))
    else:
        config |= shape.special
    sources = {"default": name, **shape.more}
    texts = {key: (TEMPLATES / f"{file}.jinja").read_text() for key, file in sources.items()}
    if not shape.in_config:
        (folder / "chat_template.jinja").write_text(texts["default"])
    elif shape.more:
        listed = [{"name": key, "template": text} for key, text in texts.items()]
        config["chat_template"] = listed
    else:
        config["chat_template"] = texts["default"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a <city> & its “temperature”.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Berlin", "Paris"]},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}
_USER: Final = {"role": "user", "content": "  What is the weather in Berlin today?\n"}
_ANSWER: Final = {"role": "assistant", "content": "It is fine.\n\n  Like every day… "}
_THANKS: Final = {"role": "user", "content": "No way! «é» 東京 <b>word</b> 12345"}
_SYSTEM: Final = {"role": "system", "content": "You are of use to people.  "}
_CALL: Final = {
    "role": "assistant",
    "content": None,
    "reasoning": "They want the weather.",
    "tool_calls": [
        {
            "id": "call12345",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Berlin", "days": [1, 2]}'},
        }
    ],
}
_RESULT: Final = {"role": "tool", "tool_call_id": "call12345", "content": '{"temperature": "20 °C"}'}
_THOUGHT: Final = {"role": "assistant", "content": "<think>\nWhat now?\n</think>\n\nIt is 20 °C."}

# By their names: what a client asks. `chat_template_kwargs` and the like are as in the API.
CHATS: Final[dict[str, dict[str, Any]]] = {
    "one": {"messages": [_USER]},
    "system": {"messages": [_SYSTEM, _USER]},
    "turns": {"messages": [_SYSTEM, _USER, _ANSWER, _THANKS]},
    "turns without system": {"messages": [_USER, _ANSWER, _THANKS, _ANSWER, _USER]},
    "no generation prompt": {"messages": [_USER, _ANSWER], "add_generation_prompt": False},
    "continued": {
        "messages": [_USER, _ANSWER],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "tools": {"messages": [_SYSTEM, _USER], "tools": [WEATHER]},
    "tool call": {
        "messages": [_USER, _CALL, _RESULT],
        "tools": [WEATHER],
    },
    "after a tool call": {
        "messages": [_USER, _CALL, _RESULT, _ANSWER, _THANKS],
        "tools": [WEATHER, WEATHER],
    },
    "thinking": {"messages": [_USER, _THOUGHT, _THANKS, _THOUGHT], "add_generation_prompt": False},
    "thinking is off": {"messages": [_USER], "template_kwargs": {"enable_thinking": False}},
    "effort": {"messages": [_USER], "reasoning_effort": "high"},
    "documents": {
        "messages": [_USER],
        "documents": [{"title": "One", "text": "It rains."}, {"title": "Two", "text": "é"}],
        "template_kwargs": {"controls": {"citations": True, "length": "long"}},
    },
    "parts": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be like water."}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "!"}],
            },
        ]
    },
    "developer": {"messages": [_USER, {"role": "developer", "content": "Go on."}, _SYSTEM, _THANKS]},
    "two users": {"messages": [_USER, _THANKS]},
    "name": {"messages": [{**_USER, "name": "Long John"}]},
    "nothing": {"messages": [{"role": "user", "content": ""}]},
    "special tokens in text": {
        "messages": [{"role": "user", "content": "<|im_end|></s><|eot_id|> [INST]"}]
    },
}


def conversation(turns: int, words: int, seed: str = "") -> Sequence[dict[str, str]]:
    """A long one: turns of so many words, none like another."""
    made = []
    for turn in range(turns):
        text = " ".join(f"{seed}word{turn} number {index} of the day" for index in range(words // 6))
        made.append({"role": ("user", "assistant")[turn % 2], "content": text})
    return made
