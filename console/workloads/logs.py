"""Logs of instances, read through the Cluster Server: the last lines at once, or followed.

Who asks has been checked before. The end of what is followed is told in a line that begins with `MARK`,
unless the instance has ended and all was read.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import grpc
from channels.db import database_sync_to_async
from django.conf import settings
from django.http import Http404

from cluster_server.client import Away, ClusterClient, Refused
from cluster_server.proto import cluster_pb2 as pb
from cluster_server.proto import rpc
from console.workloads.leader.cluster import NoCluster, channel, credentials

LINES: Final = 200
LINES_MAX: Final = 10_000
BYTES_MAX: Final = 1 << 20
CALL_SECONDS: Final = 5.0
FOLLOW_SECONDS_MAX: Final = 3600.0
FOLLOWERS_MAX: Final = 32  # of a process: each has one of its places for requests
FOLLOWERS_OF_ONE_MAX: Final = 4
CHECK_SECONDS: Final = 15.0  # how often it is asked whether they may still see it
MARK: Final = b"--- tidegate: "  # as no engine begins a line
NO_SERVER: Final = (
    "The Cluster Server does not answer. Logs are read through it; instances run without it."
)
NOT_STORED: Final = "The log of this instance is not stored any more."


class NoLog(Exception):
    """Why there is no log to read now, in a sentence."""


class TooManyFollowers(Exception):
    """In a sentence."""


def tail(instance: str, lines: int = LINES, *, seconds: float = CALL_SECONDS) -> bytes:
    """The last lines, at most BYTES_MAX of them. Raises NoLog, and Http404 if it is not stored."""
    found, is_cut = bytearray(), False
    try:
        with channel() as opened:
            request = pb.LogsRequest(name=instance, tail_lines=lines)
            for chunk in rpc.stub("Workloads", opened).Logs(request, timeout=seconds):
                found += chunk.data
                if len(found) > 2 * BYTES_MAX:
                    del found[:-BYTES_MAX]
                    is_cut = True
    except NoCluster as error:
        raise NoLog(str(error)) from None
    except OSError as error:
        raise NoLog(f"The certificate for the Cluster Server can't be read: {error}.") from error
    except grpc.RpcError as error:
        status = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
        raise _failure(status) from error
    if len(found) <= BYTES_MAX and not is_cut:
        return bytes(found)
    return bytes(found[-BYTES_MAX:].partition(b"\n")[2])


def _failure(status: grpc.StatusCode) -> Exception:
    if status is grpc.StatusCode.NOT_FOUND:
        return Http404(NOT_STORED)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return NoLog("Too many clients read logs from the Cluster Server. Try again later.")
    if status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return NoLog("The Cluster Server does not accept the console's certificate.")
    return NoLog(NO_SERVER)


class Followers:
    """How many follow logs in this process, and who. On one event loop."""

    def __init__(self, total: int = FOLLOWERS_MAX, of_one: int = FOLLOWERS_OF_ONE_MAX) -> None:
        self._total, self._of_one = total, of_one
        self._owners: Counter[str] = Counter()

    def check(self, owner: str) -> None:
        """Raises TooManyFollowers."""
        if self._owners[owner] >= self._of_one:
            raise TooManyFollowers(f"You follow {self._of_one} logs already. Close one.")
        if self._owners.total() >= self._total:
            raise TooManyFollowers(f"{self._total} logs are followed already. Try again later.")

    def __len__(self) -> int:
        return self._owners.total()

    def enter(self, owner: str) -> None:
        self.check(owner)
        self._owners[owner] += 1

    def leave(self, owner: str) -> None:
        self._owners[owner] -= 1
        self._owners += Counter()  # without those that are at nothing


FOLLOWERS: Final = Followers()


async def follow(
    instance: str,
    lines: int,
    *,
    owner: str,
    may_see: Callable[[], bool],
    seconds: float = FOLLOW_SECONDS_MAX,
    check_seconds: float = CHECK_SECONDS,
) -> AsyncGenerator[bytes, None]:
    """The last lines, and all that come, until the instance has ended, the time is over, or who reads
    has left or may not see it any more."""
    try:
        FOLLOWERS.enter(owner)
    except TooManyFollowers as error:
        yield _end(str(error))
        return
    try:
        async with aclosing(_followed(instance, lines, may_see, seconds, check_seconds)) as pieces:
            async for piece in pieces:
                yield piece
    finally:
        FOLLOWERS.leave(owner)


async def _followed(
    instance: str, lines: int, may_see: Callable[[], bool], seconds: float, check_seconds: float
) -> AsyncGenerator[bytes, None]:
    target = settings.CLUSTER_URL.removeprefix("https://")
    allowed = database_sync_to_async(may_see)
    until = time.monotonic() + seconds
    checked_at = time.monotonic()
    async with ClusterClient(target, credentials()) as cluster:
        pieces = cluster.logs(instance, tail_lines=lines, follow=True)
        coming: asyncio.Task[bytes] | None = None
        try:
            while True:
                now = time.monotonic()
                if now >= until:
                    yield _end("The longest time to follow a log is over. Follow it again.")
                    return
                if now - checked_at >= check_seconds:
                    checked_at = now
                    if not await allowed():
                        yield _end("You may not see this log any more.")
                        return
                coming = coming or asyncio.ensure_future(anext(pieces))
                wait = min(until, checked_at + check_seconds) - now
                if not (await asyncio.wait({coming}, timeout=max(wait, 0.0)))[0]:
                    continue
                done, coming = coming, None
                yield done.result()
        except StopAsyncIteration:
            return
        except Away:
            yield _end(NO_SERVER)
        except Refused as error:
            yield _end(str(_failure(error.status)))
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.wait({coming})
            await pieces.aclose()


def _end(sentence: str) -> bytes:
    return b"\n" + MARK + sentence.encode() + b"\n"
