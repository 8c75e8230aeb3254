"""`python -m workload_manager execute --folder F`: one execute job, requests for an engine of its own.

    F/spec.json       in:  an `ExecuteSpec`
    F/secrets.json    in:  `Secrets`, where it needs any
    F/progress.json   out: how many requests are answered
    F/result.json     out: {"answers": [{"status", "seconds", "body"}]}, with exit status 0
    F/error.json      out: {"reason", "sentence"}, with exit status 1

The engine is prepared, started, kept running and ended by a manager, as that of an instance is. SIGTERM
cancels the job, with exit status 143, once the engine has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets as random_secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec
import uvloop
from msgspec import Meta, structs

from kvss_agent.desired import Document
from kvss_agent.documents import Invalid, decode, whole
from kvss_agent.http.client import Client, Timeouts, UpstreamFailed
from kvss_agent.process import daemon
from kvss_agent.process.durable_file import write_durably
from kvss_agent.process.options import WrongSettings
from workload_manager.manager import CONNECT_SECONDS, Manager
from workload_manager.proxy import ANSWER_SECONDS
from workload_manager.settings import LOCAL, Settings, parse
from workload_manager.spec import InstanceSpec, Secrets, checked, read_secrets
from workload_manager.state import State
from workload_manager.status import WAIT_SECONDS_MAX, Status

log = logging.getLogger("workload_manager")

CANCELLED: Final = 128 + signal.SIGTERM
EX_CONFIG: Final = 78
REQUESTS_MAX: Final = 1024
RESULT_BYTES_MAX: Final = 1 << 20  # the Cluster Server takes no more
RESTARTS_MAX: Final = 3  # of the engine, before it answers for the first time
ATTEMPTS_MAX: Final = 3  # of a request that its engine did not answer
AGAIN_SECONDS: Final = 1.0  # until the second one; then twice as long: by then it is known who has ended
PROGRESS_SECONDS: Final = 0.5
PATH: Final = whole(r"^/(v1/[a-z_/]{1,100}|tokenize|detokenize)$")
UNANSWERED: Final = (502, 503)  # the engine has ended, or another one is being started


class Asked(Document, frozen=True, omit_defaults=True):
    """A request, as a client sends it to the engine."""

    body: dict[str, Any]
    path: Annotated[str, Meta(pattern=PATH)] = "/v1/completions"


class ExecuteSpec(Document, frozen=True, omit_defaults=True):
    """An engine, described as that of an instance, and what it is asked."""

    instance: InstanceSpec
    requests: Annotated[tuple[Asked, ...], Meta(min_length=1, max_length=REQUESTS_MAX)]
    at_once: Annotated[int, Meta(ge=1, le=256)] = 8


class Answer(msgspec.Struct, frozen=True):
    """What the engine said: JSON as a value, all else as text."""

    status: int
    seconds: float
    body: Any


class Failed(Exception):
    """The job can't be done. A word for machines, a sentence for people."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class Cancelled(Exception):
    """By whoever has submitted it."""


_DECODER: Final = msgspec.json.Decoder(ExecuteSpec)
_ANY: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder()


def main(arguments: Sequence[str]) -> int:
    try:
        settings = replace(parse(arguments, os.environ, "execute"), listen=LOCAL)
    except WrongSettings as error:
        sys.stderr.write(f"{error}\n")
        return EX_CONFIG
    daemon.set_up_logs(settings)
    daemon.use_all_descriptors()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_attempt(settings))


async def _attempt(settings: Settings) -> int:
    folder = settings.folder
    try:
        spec = decode((folder / "spec.json").read_bytes(), _DECODER)
        checked(spec.instance)
        execution = Execution(settings, spec, read_secrets(folder))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, execution.cancel)
        write_durably(folder / "result.json", _result(await execution.run()))
    except Cancelled:
        return CANCELLED
    except Failed as error:
        return _failed(settings, error.reason, str(error))
    except Invalid as error:
        return _failed(settings, "Misconfigured", str(error))
    except OSError as error:
        return _failed(settings, "CannotStart", f"{error}.")
    return 0


def _result(answers: Sequence[Answer]) -> bytes:
    """Raises Failed."""
    made = msgspec.json.encode({"answers": answers})
    if len(made) > RESULT_BYTES_MAX:
        raise Failed("ResultTooLarge", f"The answers have more than {RESULT_BYTES_MAX} bytes.")
    return made


def _failed(settings: Settings, reason: str, sentence: str) -> int:
    sys.stderr.write(f"{reason}: {sentence}\n")
    with contextlib.suppress(OSError):  # the folder is gone, or not to be written to: it was said
        said = msgspec.json.encode({"reason": reason, "sentence": sentence})
        write_durably(settings.folder / "error.json", said)
    return 1


class Execution:
    """One job. `run` is called once."""

    def __init__(self, settings: Settings, spec: ExecuteSpec, secrets: Secrets) -> None:
        self._folder = settings.folder
        self._spec = spec
        self._key = random_secrets.token_urlsafe(32)  # nobody else asks this engine
        self._manager = Manager(settings, spec.instance, structs.replace(secrets, api_key=self._key))
        self._answers: dict[int, Answer] = {}
        self._began = time.monotonic()
        self._said_at = 0.0

    def cancel(self) -> None:
        self._manager.drain()

    async def run(self) -> list[Answer]:
        """The answers in the order of the requests; the engine has ended by then. Raises Failed,
        Cancelled, and OSError where the manager can't begin."""
        self._report(is_last=True)
        managing = asyncio.create_task(self._manager.run())
        asking = asyncio.create_task(self._ask_all())
        try:
            await asyncio.wait({managing, asking}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                await managing  # it could not begin, or was cancelled
                raise Cancelled
            await asking
        finally:
            asking.cancel()
            self._manager.drain()
            await asyncio.gather(managing, asking, return_exceptions=True)
        self._report(is_last=True)
        return [self._answers[number] for number in range(len(self._spec.requests))]

    async def _ask_all(self) -> None:
        waiting = iter(enumerate(self._spec.requests))
        client = Client(Timeouts(CONNECT_SECONDS, ANSWER_SECONDS, ANSWER_SECONDS))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._spec.at_once, len(self._spec.requests))):
                    group.create_task(self._ask_some(client, waiting))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await client.close()

    async def _ask_some(self, client: Client, waiting: Iterator[tuple[int, Asked]]) -> None:
        for number, asked in waiting:
            self._answers[number] = await self._ask(client, asked)
            self._report()

    async def _ask(self, client: Client, asked: Asked) -> Answer:
        """Its engine is asked again where it ended before it had answered."""
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                await asyncio.sleep(AGAIN_SECONDS * 2 ** (attempt - 1))
            url = (await self._until_ready()).url + asked.path
            began = time.monotonic()
            try:
                async with client.open("POST", url, headers, msgspec.json.encode(asked.body)) as answer:
                    body = await answer.whole(RESULT_BYTES_MAX)
            except UpstreamFailed as error:
                log.warning("A request got no answer: %s", error)
                continue
            if answer.status not in UNANSWERED:
                return Answer(answer.status, round(time.monotonic() - began, 6), _value(body))
        raise Failed("Unanswered", f"A request got no answer in {ATTEMPTS_MAX} attempts.")

    async def _until_ready(self) -> Status:
        """Raises Failed where that is not to be expected any more."""
        board, version = self._manager.board, 0
        while True:
            status = await board.next(version, WAIT_SECONDS_MAX)
            if status.version == version:  # nothing is new: said at once when the board has ended
                await asyncio.sleep(AGAIN_SECONDS)
            version = status.version
            match State(status.state):
                case State.READY:
                    return status
                case State.DRAINING | State.GONE:
                    raise Cancelled
                case State.PENDING if status.reason != "Created":
                    raise Failed(status.reason, status.sentence)
            if status.restarts >= RESTARTS_MAX and not self._answers:
                raise Failed("EngineFails", status.sentence)

    def _report(self, *, is_last: bool = False) -> None:
        now = time.monotonic()
        if not is_last and now < self._said_at + PROGRESS_SECONDS:
            return
        self._said_at = now
        said = {
            "done": len(self._answers),
            "total": len(self._spec.requests),
            "unit": "requests",
            "seconds": round(now - self._began, 3),
        }
        write_durably(self._folder / "progress.json", msgspec.json.encode(said))


def _value(body: bytes) -> Any:
    try:
        return decode(body, _ANY)
    except Invalid:
        return body.decode(errors="replace")
