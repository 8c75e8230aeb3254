"""The tokenizer of the demo's models, as a folder that brains and engines read.

Each of the story's tokens is a word of three syllables with a blank before it, and the token's number is
the word's. All else is tokens of single bytes, so whatever people send to a demo's model is a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

from console.demo.story import VOCABULARY

SYLLABLES: Final = [a + b for a, b in product("bdfgklmnprstvzjh", "aeio")][:32]
WORD: Final = 3  # syllables
BLANK: Final = "Ġ"  # as byte-level tokenizers write a blank
MESSAGE_END: Final = "<|end|>"
TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }} {{ message['content'] }}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def word(token: int) -> str:
    """Of a token of the story, without the blank."""
    parts = []
    for _ in range(WORD):
        token, place = divmod(token, len(SYLLABLES))
        parts.append(SYLLABLES[place])
    return "".join(reversed(parts))


def text(tokens: Iterable[int]) -> str:
    """What these tokens of the story stand for."""
    return "".join(f" {word(token)}" for token in tokens)


def write(folder: Path) -> None:
    """The folder is made once, and left as it is then."""
    if (folder / "chat_template.jinja").exists():
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(), ensure_ascii=False))
    (folder / "chat_template.jinja").write_text(TEMPLATE)  # last: then all is there


def vocabulary() -> dict[str, int]:
    """The number of each piece: words of the story first, and the end of a message last."""
    pieces = {f"{BLANK}{word(token)}": token for token in range(VOCABULARY)}
    for piece in (*_bytes(), *SYLLABLES, *_beginnings(1), *_beginnings(2), MESSAGE_END):
        pieces.setdefault(piece, len(pieces))
    return pieces


def _tokenizer() -> dict[str, Any]:
    """As the library reads it. Merges build words syllable by syllable."""
    pieces = vocabulary()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": pieces[MESSAGE_END],
                "content": MESSAGE_END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": pieces,
            "merges": list(_merges()),
        },
    }


def _bytes() -> Iterator[str]:
    """All bytes, as byte-level tokenizers write them: those that can't be printed as later letters."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    later = 0x100
    for byte in range(0x100):
        if byte in printed:
            yield chr(byte)
        else:
            yield chr(later)
            later += 1


def _beginnings(syllables: int) -> Iterator[str]:
    return (f"{BLANK}{''.join(parts)}" for parts in product(SYLLABLES, repeat=syllables))


def _merges() -> Iterator[list[str]]:
    yield from ([syllable[0], syllable[1]] for syllable in SYLLABLES)
    yield from ([BLANK, syllable] for syllable in SYLLABLES)
    yield from ([before, syllable] for before in _beginnings(1) for syllable in SYLLABLES)
    for token in range(VOCABULARY):
        whole = word(token)
        yield [f"{BLANK}{whole[:4]}", whole[4:]]
