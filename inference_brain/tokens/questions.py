"""What a brain asks the process of an uploaded tokenizer: frames of bytes, after their length."""

from __future__ import annotations

import struct
from typing import Final

import msgspec
from msgspec import Struct

from inference_brain.tokens.messages import Chat

LENGTH: Final = struct.Struct("<I")
# What an answer begins with
TOKENS: Final = b"n"  # four bytes each
TEXTS: Final = b"t"  # a JSON array
REFUSED: Final = b"e"  # a sentence without its stop
TOO_LONG: Final = b"l"  # likewise
READY: Final = b"r"


class OfChat(Struct, frozen=True, tag="chat"):
    """The tokens of a chat's prompt."""

    chat: Chat
    tokens_max: int | None = None


class OfText(Struct, frozen=True, tag="text"):
    """The tokens of a completion's prompt."""

    text: str
    tokens_max: int | None = None
    add_special_tokens: bool = True


class OfTokens(Struct, frozen=True, tag="tokens"):
    """The text of tokens, or of each of them with special ones."""

    ids: list[int]
    each: bool = False


Question = OfChat | OfText | OfTokens
DECODER: Final[msgspec.msgpack.Decoder[Question]] = msgspec.msgpack.Decoder(Question)


def framed(raw: bytes) -> bytes:
    return LENGTH.pack(len(raw)) + raw
