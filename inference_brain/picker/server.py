"""The picker's gRPC server: `ext_proc` for gateways, and health.

picker = Picker(router, PickerSettings(("0.0.0.0", 9002)))
await picker.start()
...
await picker.stop(grace_seconds=30)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, Final

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc
from grpc import aio

from inference_brain.body_room import BodyRoom
from inference_brain.picker import messages
from inference_brain.picker.exchange import HELD_BYTES_MAX, BrokenProtocol, Exchange
from inference_brain.picker.health import Health
from inference_brain.picker.phases import Immediate
from inference_brain.picker.routing import Answer, Asked, Place, Refused, Router, failure
from inference_brain.picker.settings import PickerSettings, Tls

log = logging.getLogger(__name__)

STOP_SECONDS: Final = 10.0  # for requests that are being answered
_ENVELOPE_BYTES: Final = 1 << 20  # of a message, beside the body in it


class Picker:
    """Serves gateways until it is stopped."""

    def __init__(self, router: Router, settings: PickerSettings) -> None:
        self.settings = settings
        self.streams = 0
        self.port = 0
        self._router = router
        self._memory = BodyRoom(HELD_BYTES_MAX)
        self._server: Any = None

    async def start(self) -> int:
        """Returns the port. Raises OSError if it cannot listen there."""
        limit = self.settings.bounds.body_bytes_max + _ENVELOPE_BYTES
        self._server = aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),
                # Gateways ping, also while nothing is asked.
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        ext_proc.add_ExternalProcessorServicer_to_server(_Service(self), self._server)
        self._server.add_generic_rpc_handlers((Health(lambda: self._router.is_ready).handler(),))
        host, port = self.settings.listen
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self.settings.tls:
                bound = self._server.add_secure_port(address, _credentials(self.settings.tls))
            else:
                bound = self._server.add_insecure_port(address)
        except RuntimeError as error:  # grpc's own, of which the details are in its log
            raise OSError(f"the endpoint picker cannot listen on {address}") from error
        await self._server.start()
        self.port = int(bound)
        return self.port

    async def stop(self, grace_seconds: float) -> None:
        """New requests are refused; those that have begun may end."""
        if self._server is not None:
            await self._server.stop(grace_seconds)

    async def exchange(self, arriving: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """One request: messages of the gateway in, replies out."""
        if self.streams >= self.settings.streams_max:
            yield messages.message(Immediate(_CROWDED))
            return
        exchange = Exchange(self.settings.bounds, self._memory, self._router.whose)
        self.streams += 1
        try:
            async with asyncio.timeout(self.settings.body_seconds) as patience:
                async for arrived in arriving:
                    for reply in exchange.received(messages.phase(arrived)):
                        yield messages.message(reply)
                    if not exchange.is_reading:
                        patience.reschedule(None)
                    if asked := exchange.take_asked():
                        for reply in exchange.placed(await self._decide(asked)):
                            yield messages.message(reply)
                    if exchange.is_over:
                        break
        except TimeoutError:
            for reply in exchange.late():
                yield messages.message(reply)
        except BrokenProtocol as error:
            log.warning("A gateway does not keep to the protocol: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:  # also when the gateway cancels, since its client has left
            self.streams -= 1
            exchange.closed()

    async def _decide(self, asked: Asked) -> Place | Answer:
        try:
            return await self._router.route(asked)
        except Refused as refused:
            return refused.answer
        except Exception:
            log.exception("A request could not be routed")
            return _FAILED


@contextlib.asynccontextmanager
async def picking(router: Router, settings: PickerSettings) -> AsyncIterator[Picker]:
    """Serve gateways for as long as this lasts. Raises OSError if it cannot listen."""
    picker = Picker(router, settings)
    await picker.start()
    log.info("The endpoint picker listens on %s:%s", settings.listen[0], picker.port)
    try:
        yield picker
    finally:
        await picker.stop(STOP_SECONDS)


class _Service(ext_proc.ExternalProcessorServicer):  # type: ignore[misc]
    def __init__(self, picker: Picker) -> None:
        self.Process = picker.exchange


def _credentials(tls: Tls) -> Any:
    """Renewed files are taken at the next connection."""
    seen: list[tuple[bytes, ...]] = []

    def read() -> Any:
        files = (tls.key, tls.certificate, tls.client_authority)
        found = tuple(one.read_bytes() if one else b"" for one in files)
        if seen and seen[-1] == found:
            return None  # grpc keeps what it has
        seen[:] = [found]
        key, certificate, authority = found
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority or None)

    def renewed() -> Any:
        try:
            return read()
        except OSError as error:
            log.warning("The certificate of the endpoint picker cannot be read again: %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(
        read(), renewed, require_client_authentication=tls.client_authority is not None
    )


_CROWDED: Final = failure(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "Too many requests are open at once. Try again soon.",
    "server_error",
    "overloaded",
)
_FAILED: Final = failure(
    HTTPStatus.INTERNAL_SERVER_ERROR,
    "The request could not be routed, for a reason of ours.",
    "server_error",
    "internal_error",
)
