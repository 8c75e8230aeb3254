"""What a manager says of its instance: asked over its Unix socket, by a poll that is answered when
something has changed."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Final

import httptools
import msgspec

from cluster_server.proto import cluster_pb2 as pb
from telemetry.decoder import MESSAGE, Limits, Malformed, Seconds, decode, excerpt

SOCKET: Final = "manager.sock"
POLL_SECONDS: Final = 30.0  # a manager without news answers after so long
OVERDUE_SECONDS: Final = 5.0  # beyond that
ANSWER_BYTES_MAX: Final = 64 << 10
READ_BYTES: Final = 16 << 10
URL_CHARACTERS_MAX: Final = 500
COUNT_MAX: Final = (1 << 63) - 1  # that can be passed on, as JSON
OWN_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ANSWER: Final = Limits(ANSWER_BYTES_MAX, MESSAGE.items_max)
_CACHE: Final = {
    "none": pb.NO_CACHE,
    "waiting": pb.WAITING,
    "attached": pb.ATTACHED,
    "released": pb.RELEASED,
}


class ProgressStatus(msgspec.Struct, frozen=True):
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    seconds: float = 0.0

    def message(self) -> pb.Progress:
        whole = [int(min(max(one, 0.0), float(1 << 62))) for one in (self.done, self.total)]
        return pb.Progress(
            done=whole[0], total=whole[1], unit=excerpt(self.unit, 20), seconds=max(self.seconds, 0.0)
        )


class ManagerStatus(msgspec.Struct, frozen=True):
    """What is read of the answer. Fields that are not known are others'."""

    state: str
    version: int = 0
    reason: str = ""
    sentence: str = ""
    since: Seconds = 0.0
    goal: str = ""
    url: str = ""
    cache: str = ""
    progress: ProgressStatus | None = None
    restarts: int = 0
    running_requests: int = 0

    def check(self) -> None:
        """Raises Malformed."""
        if self.state.upper() not in pb.State.keys()[1:]:
            raise Malformed(f"It has a state that does not exist: {excerpt(self.state, 20)!r}")
        if self.goal and self.goal not in pb.Goal.keys()[1:]:
            raise Malformed(f"It has a goal that does not exist: {excerpt(self.goal, 20)!r}")
        if self.cache and self.cache not in _CACHE:
            raise Malformed(f"It has a cache that does not exist: {excerpt(self.cache, 20)!r}")
        for count in (self.version, self.restarts, self.running_requests):
            check_count(count)

    def message(self, name: str) -> pb.InstanceStatus:
        return pb.InstanceStatus(
            name=name,
            state=pb.State.Value(self.state.upper()),
            reason=excerpt(self.reason, 100),
            sentence=excerpt(self.sentence, 500),
            since=self.since,
            goal=pb.Goal.Value(self.goal) if self.goal else pb.GOAL_UNSPECIFIED,
            url=excerpt(self.url, URL_CHARACTERS_MAX),
            cache=_CACHE.get(self.cache, pb.CACHE_STATE_UNSPECIFIED),
            progress=self.progress.message() if self.progress else None,
            restarts=min(self.restarts, (1 << 32) - 1),
            running_requests=min(self.running_requests, (1 << 32) - 1),
        )


def check_count(count: int) -> None:
    """Raises Malformed."""
    if not 0 <= count <= COUNT_MAX:
        raise Malformed("It has a count below 0, or one that is too large")


def is_own_fault(error: Exception) -> bool:
    """Whether it is why who asks can't ask, and so says nothing of who would have answered."""
    if isinstance(error, OSError):
        return error.errno in OWN_ERRORS
    return not isinstance(error, Malformed)


async def ask(folder: Path, version: int, poll_seconds: float = POLL_SECONDS) -> ManagerStatus:
    """What it says next, later than this version, or now if it has no news for so long. Raises
    OSError, also where it takes too long, and Malformed."""
    # The path of a socket has 107 bytes at most, and a state directory may be deep.
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        async with asyncio.timeout(poll_seconds + OVERDUE_SECONDS):
            reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{SOCKET}")
            try:
                path = f"/status?after={version}&wait={poll_seconds:g}"
                head = f"GET {path} HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n"
                body = await exchanged(reader, writer, head.encode(), ANSWER_BYTES_MAX)
            finally:
                writer.close()
    finally:
        os.close(directory)
    status = decode(body, ManagerStatus, _ANSWER)
    status.check()
    return status


class _Parsed:
    def __init__(self) -> None:
        self.body = bytearray()
        self.is_whole = False

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.is_whole = True


async def exchanged(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, bytes_max: int
) -> bytes:
    """The body of the answer to a request, the only one of its connection. Raises OSError and
    Malformed."""
    writer.write(request)
    parsed = _Parsed()
    parser = httptools.HttpResponseParser(parsed)
    try:
        while not parsed.is_whole:
            piece = await reader.read(READ_BYTES)
            if not piece:
                raise ConnectionResetError("its answer ends too early")
            parser.feed_data(piece)
            if len(parsed.body) > bytes_max:
                raise Malformed("Its answer is too long")
    except httptools.HttpParserError as error:
        raise Malformed(f"Its answer is not HTTP: {excerpt(str(error))}") from None
    if (status := parser.get_status_code()) != 200:
        raise Malformed(f"It answers {status}")
    return bytes(parsed.body)
