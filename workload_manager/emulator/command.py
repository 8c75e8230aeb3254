"""`python -m workload_manager.emulator --spec FILE`: one engine, until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from kvss_agent.documents import Invalid
from kvss_agent.http.server import HttpBounds, HttpPolicy
from kvss_agent.limits.admission import Places
from kvss_agent.process import daemon
from kvss_agent.process.durable_file import write_durably
from kvss_agent.process.options import place as place_of
from workload_manager import kv_layout
from workload_manager.emulator.application import Api
from workload_manager.emulator.cache import Attachment, Cache
from workload_manager.emulator.document import EngineDocument, read
from workload_manager.emulator.engine import Engine
from workload_manager.emulator.texts import BytesAsTokens, Texts

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 4096
ANSWER_SECONDS: Final = 24 * 3600.0
IDLE_SECONDS: Final = 60
_UNIX: Final = "unix:"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m workload_manager.emulator",
        description="An engine that computes nothing behind OpenAI's API, with a driver in its process.",
    )
    made.add_argument("--spec", type=Path, required=True, help="a file with its document, in JSON")
    made.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="PLACE",
        help="HOST:PORT, or unix:/PATH (default: %(default)s)",
    )
    made.add_argument(
        "--address-file", type=Path, metavar="FILE", help="a file that gets its address, once it answers"
    )
    made.add_argument(
        "--grace-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="for requests that run when it is stopped (60)",
    )
    staged = made.add_argument_group("staged faults")
    staged.add_argument("--start-seconds", type=float, default=0.0, metavar="S", help="until it answers")
    staged.add_argument("--fail-start", action="store_true", help="end at once, with an error")
    staged.add_argument(
        "--fail-requests", type=_share, default=0.0, metavar="SHARE", help="of requests, with status 500"
    )
    return made


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    daemon.set_up_logs()  # as its manager's, in whose log its lines are
    if options.fail_start:
        sys.stderr.write("The emulator does not start, as it was told (--fail-start).\n")
        return 1
    try:
        document = read(options.spec)
        asyncio.run(_serve(document, options))
    except (Invalid, OSError, ValueError) as error:
        sys.stderr.write(f"The emulator can't start: {error}\n")
        return 1
    return 0


async def _serve(document: EngineDocument, options: argparse.Namespace) -> None:
    stop = daemon.stop_signal()
    if options.start_seconds:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), options.start_seconds)
    if stop.is_set():
        return
    model = kv_layout.emulated(document.model, document.revision, document.emulator, document.boxes)
    loaded = _texts(document)
    cache = Cache(model)
    with contextlib.ExitStack() as opened:
        attachment = None
        if document.driver:
            attachment = Attachment(document.driver, model, cache.use)
            opened.callback(attachment.close)
        engine = Engine(cache, loaded, document.emulator, fail_share=options.fail_requests)
        opened.callback(engine.close)
        api = Api(document, engine, loaded, attachment)
        async with _answering(api, options.listen) as url:
            log.info("Serving %s at %s", document.model, url)
            if options.address_file:
                write_durably(options.address_file, url.encode())
            if attachment:
                attachment.begin()
            await stop.wait()
            await _drain(engine, options.grace_seconds)


def _texts(document: EngineDocument) -> Texts:
    """Of its tokenizer; without one, bytes. Raises OSError and ValueError."""
    if not document.tokenizer:
        return BytesAsTokens()
    from workload_manager.emulator.tokenized import Tokenized  # it takes a while

    return Tokenized(Path(document.tokenizer), document.emulator.answer_tokens_below)


@contextlib.asynccontextmanager
async def _answering(api: Api, place: str) -> AsyncIterator[str]:
    bounds = HttpBounds(request_seconds=ANSWER_SECONDS, idle_seconds=IDLE_SECONDS)
    places = Places(CONNECTIONS_MAX, CONNECTIONS_MAX, CONNECTIONS_MAX)
    listener, url = listen(place)
    with contextlib.closing(listener):
        async with daemon.http_server(api.application(), listener, HttpPolicy(bounds, places)):
            yield url


async def _drain(engine: Engine, seconds: float) -> None:
    """Requests that run are finished, new ones are refused."""
    engine.is_draining = True
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.idle(), seconds)


def listen(place: str) -> tuple[socket.socket, str]:
    """The socket, and the address to reach it at. Raises OSError and ValueError."""
    if not place.startswith(_UNIX):
        try:
            listener = daemon.listen(place_of(place))
        except ValueError as error:
            raise ValueError(f"--listen: {error}") from None
        return listener, daemon.url_of(listener)
    path = place.removeprefix(_UNIX)
    with contextlib.suppress(FileNotFoundError):  # of a former one, in a folder of our own
        os.unlink(path)  # noqa: PTH108 - a socket
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener, place


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError("a share is from 0 to 1")
    return share
