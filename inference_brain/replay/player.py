"""Sends requests when they are due, and times what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from inference_brain.replay.answers import EventReader, Part, Unreadable, complaint, whole
from inference_brain.replay.outcomes import UNKNOWN, Outcome, Outcomes
from inference_brain.replay.prompts import PromptMaker
from inference_brain.replay.schedule import Due
from kvss_agent.http.client.client import Answer, Client
from kvss_agent.http.client.failures import UpstreamFailed
from swdriver_shim.replay.traces import tenant

REPLICA_HEADER: Final = "x-tidegate-replica"
ERROR_BYTES_MAX: Final = 64 << 10
MADE_MAX: Final = 32  # requests that are made ahead
TOKEN_SECONDS_MAX: Final = 600.0  # between two tokens, whatever else comes meanwhile
END_SECONDS_MAX: Final = 0.5  # for the end of an answer that has said that it is at its end


@dataclass(frozen=True, slots=True)
class Play:
    """How requests are sent. `url`: with its `/v1`. `keys`: of orgs, one of which each session is of.
    `more`: fields of every body."""

    url: str
    keys: Sequence[str]
    at_once_max: int
    streams: bool = True
    output_tokens_max: int | None = None
    replica_header: str = REPLICA_HEADER
    seed: int = 0
    more: dict[str, Any] | None = None


class _Made(NamedTuple):
    due: Due
    body: bytes
    headers: dict[str, str]
    org: int


class Player:
    def __init__(
        self,
        play: Play,
        prompts: PromptMaker,
        client: Client,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._play = play
        self._prompts = prompts
        self._client = client
        self._clock = clock
        self._began = 0.0
        self.outcomes = Outcomes()

    async def run(self, dues: Iterable[Due], ended: Callable[[Outcome], None]) -> None:
        """Sends all of them; `ended` is called for each that has ended. One that is due while as many
        as are allowed are being answered waits, and is late. Cancelling leaves what came until then."""
        places = asyncio.Semaphore(self._play.at_once_max)
        made: asyncio.Queue[_Made | None] = asyncio.Queue(MADE_MAX)
        self._began = self._clock()
        async with asyncio.TaskGroup() as group:
            making = group.create_task(self._make(dues, made))
            while (one := await made.get()) is not None:
                await asyncio.sleep(one.due.at - self._now())
                await places.acquire()
                outcome = Outcome(one.due.at, org=one.org, input_tokens=one.due.request.input_tokens)
                self.outcomes.all.append(outcome)
                group.create_task(self._send(outcome, one, places, ended))
            await making

    async def _make(self, dues: Iterable[Due], made: asyncio.Queue[_Made | None]) -> None:
        """Makes requests before they are due, and beside the loop that times answers."""
        for due in dues:
            await made.put(await asyncio.to_thread(self._request, due))
        await made.put(None)

    def _now(self) -> float:
        return self._clock() - self._began

    def _request(self, due: Due) -> _Made:
        play, tokens = self._play, due.request.output_tokens
        if play.output_tokens_max is not None:
            tokens = min(tokens, play.output_tokens_max)
        more = dict(play.more or {})
        if play.streams:
            more |= {"stream": True, "stream_options": {"include_usage": True}}
        body = self._prompts.body(due.request, due.number, tokens, more)
        headers = {"content-type": "application/json"}
        org = 0
        if play.keys:
            org = tenant(due.request.session, len(play.keys), play.seed)
            headers["authorization"] = f"Bearer {play.keys[org]}"
        return _Made(due, msgspec.json.encode(body), headers, org)

    async def _send(
        self,
        outcome: Outcome,
        made: _Made,
        places: asyncio.Semaphore,
        ended: Callable[[Outcome], None],
    ) -> None:
        outcome.sent = self._now()
        outcome.why = "not answered when the replay was ended"
        try:
            url = self._play.url + self._prompts.path
            first = self._client.timeouts.first
            async with (
                asyncio.timeout(first) as limit,
                self._client.open("POST", url, made.headers, made.body) as answer,
            ):
                await self._read(outcome, answer, limit)
            outcome.why = None
        except UpstreamFailed as error:  # which has no address: clients of a brain read it, too
            outcome.why = f"{self._play.url}: {error}"
        except Unreadable as error:
            outcome.why = str(error)
        except TimeoutError:
            seconds = TOKEN_SECONDS_MAX if outcome.pieces else first
            outcome.why = f"no {'other token' if outcome.pieces else 'answer'} within {seconds:g} s"
        finally:
            outcome.ended = outcome.ended or self._now()
            places.release()
        ended(outcome)

    async def _read(self, outcome: Outcome, answer: Answer, limit: asyncio.Timeout) -> None:
        """`limit`: until the first token, and from then on until the next."""
        outcome.status = answer.status
        outcome.replica = answer.header(self._play.replica_header) or UNKNOWN
        if answer.status != 200:
            told = b""
            with contextlib.suppress(UpstreamFailed):
                told = await answer.whole(ERROR_BYTES_MAX)
            raise Unreadable(f"status {answer.status}: {complaint(told)}")
        if not self._play.streams:
            part = whole(await answer.whole())
            if not part.choices:
                raise Unreadable("there is nothing in the answer")
            _learn(outcome, part)
            return
        reader, has_choices = EventReader(), False
        while not reader.is_done:
            piece = await answer.piece(is_first=not outcome.pieces)
            if piece is None:
                raise Unreadable("the stream ended before its end")
            for part in reader.feed(piece):
                if part.has_tokens:
                    outcome.piece(self._now())
                    limit.reschedule(asyncio.get_running_loop().time() + TOKEN_SECONDS_MAX)
                has_choices = has_choices or bool(part.choices)
                _learn(outcome, part)
        outcome.ended = self._now()
        if not has_choices:
            raise Unreadable("there is nothing in the stream")
        # Mostly it is there already, and then the connection can be used again.
        with contextlib.suppress(UpstreamFailed, TimeoutError):
            async with asyncio.timeout(END_SECONDS_MAX):
                while await answer.piece() is not None:
                    pass


def _learn(outcome: Outcome, part: Part) -> None:
    if part.usage is not None:
        outcome.prompt_tokens = part.usage.prompt_tokens
        outcome.output_tokens = part.usage.completion_tokens
        outcome.cached_tokens = part.usage.cached_tokens
