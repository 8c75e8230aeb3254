"""Tokenizers that orgs have uploaded: each is loaded and used in a process of its own.

Their regular expressions, normalizers and templates are programs of strangers, and nothing in a thread
can be stopped. So a brain's own process never runs them: what one takes, requests for its model wait
for, in turns by org, and nobody else. A process that is late is killed, and another one is started for
the next question.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from inference_brain import uploads
from inference_brain.tokens.errors import (
    FAR,
    HALF_A_CHARACTER,
    BadMessages,
    BadTokenizer,
    TokenizerBusy,
    TokenizerStopped,
    TokensError,
    TooLong,
    far_too_long,
)
from inference_brain.tokens.lanes import Lanes
from inference_brain.tokens.messages import Chat
from inference_brain.tokens.questions import (
    LENGTH,
    READY,
    REFUSED,
    TEXTS,
    TOKENS,
    TOO_LONG,
    OfChat,
    OfText,
    OfTokens,
    Question,
    framed,
)
from telemetry.decoder import Limits, Malformed, decode, excerpt

log = logging.getLogger(__name__)

SECONDS: Final = 10.0  # for one prompt; one of a million tokens takes a few
WAIT_SECONDS: Final = 30.0  # of a request, with all that is before it
ANSWER_BYTES_MAX: Final = 64 << 20
TEXT_BYTES_MAX: Final = 16 << 20
TOKEN_BYTES: Final = 4
_TEXTS: Final = Limits(TEXT_BYTES_MAX, 1 << 21)
_STORED: Final = re.compile(r"[0-9a-f]{64}")
_RECEIVED_AT_ONCE: Final = 1 << 20


def is_uploaded(folder: Path) -> bool:
    """By its name: stores keep uploads under the hash of what is in them. Links are followed."""
    return _STORED.fullmatch(folder.resolve().name) is not None


class _Ended(Exception):
    """The process has ended, or has said what it never says."""


class _Worker:
    """A process that has been started. Used by one thread at a time, but for `kill`."""

    def __init__(self, folder: Path, seconds: float) -> None:
        """Raises OSError."""
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "inference_brain.tokens.worker", str(folder), str(seconds)]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    cwd=uploads.ROOT,
                    env=uploads.environment(),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        except OSError:
            self._socket.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kill it, and leave nothing of it."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def exchange(self, raw: bytes | None, seconds: float, kind: bytes) -> tuple[bytes, bytes]:
        """Ask, and return the answer: of this kind, REFUSED or TOO_LONG, and its bytes. Raises
        TimeoutError and _Ended."""
        until = time.monotonic() + seconds
        try:
            if raw is not None:
                self._socket.settimeout(seconds)
                self._socket.sendall(framed(raw))
            (size,) = LENGTH.unpack(self._received(LENGTH.size, until))
            if not 0 < size <= ANSWER_BYTES_MAX:
                raise _Ended
            told = self._received(size, until)
        except TimeoutError:
            raise
        except OSError:
            raise _Ended from None
        if told[:1] not in (kind, REFUSED, TOO_LONG):
            raise _Ended
        return told[:1], told[1:]

    def _received(self, size: int, until: float) -> bytes:
        made = bytearray()
        while len(made) < size:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            piece = self._socket.recv(min(size - len(made), _RECEIVED_AT_ONCE))
            if not piece:
                raise _Ended
            made += piece
        return bytes(made)


class UploadedTokenizer:
    """For one event loop. `seconds`: that one prompt may take. `stopped`: called, in the loop, when its
    process had to be replaced."""

    def __init__(
        self, folder: Path, seconds: float = SECONDS, stopped: Callable[[], None] | None = None
    ) -> None:
        self._folder = folder.resolve()
        self._seconds = seconds
        self._stopped = stopped
        self._lanes = Lanes(1)
        self._lock = threading.Lock()  # of the two below
        self._worker: _Worker | None = None
        self._is_closed = False

    @property
    def process(self) -> int | None:
        """The id of its process, if it has one."""
        worker = self._worker
        return worker.pid if worker else None

    async def load(self) -> None:
        """Raises BadTokenizer and OSError."""
        await self._lanes.run("", self._start)

    async def chat(self, org: str, chat: Chat, tokens_max: int | None = None) -> array[int]:
        """The tokens of a chat's prompt. Raises TokensError, as all of these."""
        return await self._tokens(org, OfChat(chat, tokens_max), tokens_max)

    async def text(
        self, org: str, text: str, tokens_max: int | None = None, *, add_special_tokens: bool = True
    ) -> array[int]:
        """The tokens of a completion's prompt."""
        question = OfText(text, tokens_max, add_special_tokens)
        return await self._tokens(org, question, tokens_max)

    async def decode(self, org: str, ids: Sequence[int]) -> str:
        return (await self._texts(org, OfTokens(list(ids)), 1))[0]

    async def decode_each(self, org: str, ids: Sequence[int]) -> list[str]:
        """The text of each of these tokens, special ones too."""
        return await self._texts(org, OfTokens(list(ids), each=True), len(ids))

    def close(self) -> None:
        """Who waits is told so."""
        with self._lock:
            self._is_closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()  # who reads from it finds that it has ended
            threading.Thread(target=worker.end, daemon=True).start()

    async def _tokens(self, org: str, question: Question, tokens_max: int | None) -> array[int]:
        raw = await self._ask(org, question, TOKENS)
        count = len(raw) // TOKEN_BYTES
        # What is a little longer is refused with better words where the answer's tokens are known.
        if tokens_max is not None and count > FAR * tokens_max:
            raise far_too_long(tokens_max)
        ids = array("I")
        ids.frombytes(raw[: count * TOKEN_BYTES])
        return ids

    async def _texts(self, org: str, question: Question, count: int) -> list[str]:
        raw = await self._ask(org, question, TEXTS)
        try:
            texts = decode(raw, list[str], _TEXTS)
        except Malformed as error:
            raise TokensError(f"The text of these tokens is too long: {error}") from None
        if len(texts) != count:
            raise TokenizerStopped("The tokenizer of this model has answered another question")
        return texts

    async def _ask(self, org: str, question: Question, kind: bytes) -> bytes:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await self._lanes.run(org, lambda: self._answer(question, kind))
        except TimeoutError:
            raise TokenizerBusy(
                "The tokenizer of this model is busy with other prompts. Try again"
            ) from None
        except TokenizerStopped as error:
            log.warning("The process of the tokenizer in %s was stopped. %s.", self._folder, error)
            if self._stopped is not None:
                self._stopped()
            raise

    # In the thread of the lane

    def _answer(self, question: Question, kind: bytes) -> bytes:
        try:
            raw = msgspec.msgpack.encode(question)
        except UnicodeEncodeError:
            raise BadMessages(HALF_A_CHARACTER) from None
        worker = self._worker
        if worker is not None and not worker.is_alive:  # the machine had no memory for it, say
            self._end(worker)
            worker = None
        try:
            worker = worker or self._start()
        except (BadTokenizer, OSError) as error:
            raise TokenizerStopped(f"The tokenizer of this model can't be loaded: {error}") from None
        try:
            found, told = worker.exchange(raw, self._seconds, kind)
        except TimeoutError:
            self._end(worker)
            raise TokenizerStopped(
                f"The tokenizer of this model took longer than {self._seconds:g} s for this prompt"
            ) from None
        except _Ended:
            self._end(worker)
            raise TokenizerStopped(
                "The tokenizer of this model took more memory or time than it may for this prompt"
            ) from None
        if found in (REFUSED, TOO_LONG):
            kind_of_error = TooLong if found == TOO_LONG else TokensError
            raise kind_of_error(excerpt(told.decode(errors="replace")))
        return told

    def _start(self) -> _Worker:
        """Raises BadTokenizer and OSError."""
        with self._lock:
            if self._is_closed:
                raise BadTokenizer("it is no longer used")
            worker = self._worker = _Worker(self._folder, self._seconds)
        try:
            kind, told = worker.exchange(None, uploads.LOAD_SECONDS, READY)
        except (TimeoutError, _Ended):
            self._end(worker)
            raise BadTokenizer(
                f"{self._folder} takes too much memory or time to load, or is no longer used"
            ) from None
        if kind != READY:
            self._end(worker)
            raise BadTokenizer(excerpt(told.decode(errors="replace")))
        return worker

    def _end(self, worker: _Worker) -> None:
        with self._lock:
            if self._worker is worker:
                self._worker = None
        worker.end()
