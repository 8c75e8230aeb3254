"""The process of one uploaded tokenizer: loads it, and answers a brain's questions one by one.

    python -m inference_brain.tokens.worker FOLDER SECONDS   # its standard input is a socket

Regular expressions and templates of an upload may take any time and memory. Here that is this process's
alone, which is killed when an answer is late; `uploaded.py` starts another.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from io import BufferedRWPair
from pathlib import Path
from typing import Final

import msgspec

from inference_brain import uploads
from inference_brain.tokens.errors import TokensError, TooLong
from inference_brain.tokens.questions import (
    DECODER,
    LENGTH,
    READY,
    REFUSED,
    TEXTS,
    TOKENS,
    TOO_LONG,
    OfChat,
    OfText,
    Question,
    framed,
)
from inference_brain.tokens.tokenizer import PromptTokenizer, load
from telemetry.decoder import Limits, unpack

QUESTION: Final = Limits(256 << 20)  # of a body of 32 MiB, with room


def main(folder: Path, seconds: float) -> None:
    uploads.bound_this_process()
    with socket.socket(fileno=os.dup(0)) as brain, brain.makefile("rwb") as pipe:
        try:
            tokenizer = load(folder)
        except (TokensError, OSError) as error:
            _write(pipe, REFUSED + str(error).encode(errors="replace"))
            return
        _write(pipe, READY)
        while (raw := _read(pipe)) is not None:
            uploads.allow(math.ceil(seconds))
            _write(pipe, answer(tokenizer, unpack(raw, DECODER, QUESTION)))


def answer(tokenizer: PromptTokenizer, question: Question) -> bytes:
    try:
        if isinstance(question, OfChat):
            return TOKENS + tokenizer.chat(question.chat, question.tokens_max).tobytes()
        if isinstance(question, OfText):
            adds = question.add_special_tokens
            ids = tokenizer.text(question.text, question.tokens_max, add_special_tokens=adds)
            return TOKENS + ids.tobytes()
        if question.each:
            texts = tokenizer.decode_each(question.ids)
        else:
            texts = [tokenizer.decode(question.ids)]
        return TEXTS + msgspec.json.encode(texts)
    except TooLong as error:
        return TOO_LONG + str(error).encode(errors="replace")
    except TokensError as error:
        return REFUSED + str(error).encode(errors="replace")


def _read(pipe: BufferedRWPair) -> bytes | None:
    """None when the brain has gone."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    raw = pipe.read(size)
    return raw if len(raw) == size else None


def _write(pipe: BufferedRWPair, raw: bytes) -> None:
    pipe.write(framed(raw))
    pipe.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
