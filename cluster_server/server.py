"""The gRPC server: where it listens, by which certificates, within which bounds.

async with serving(backend, inventory, ServerSettings((Place(unix=path),))) as server:
    ...
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster_server.access import Gate, JwtSettings
from cluster_server.backend import Backend
from cluster_server.checks import MESSAGE_BYTES_MAX
from cluster_server.inventory import Inventory
from cluster_server.proto import cluster_pb2 as pb
from cluster_server.proto import rpc
from cluster_server.services import InventoryService, Jobs, Seats, Workloads

log = logging.getLogger(__name__)

STOP_SECONDS: Final = 2.0  # for calls that are being answered
CALLS_MAX: Final = 1024
SERVICES: Final = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),  # lists are as long as what was applied
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 512),
    ("grpc.max_metadata_size", 16 << 10),
    # Whoever watches notices soon that the other side has gone.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where to listen: a Unix socket, which only this user can open, or an address."""

    unix: Path | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.unix:
            return f"unix:{self.unix}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """`authorities`: those of a console. With them only who shows a certificate of theirs is let in.
    `console_name`: which host name a console's has, if its own authority has not issued it."""

    certificate: Path
    key: Path
    authorities: Path | None = None
    console_name: str = ""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    places: tuple[Place, ...]
    tls: TlsFiles | None = None
    tokens: JwtSettings | None = None
    watchers_max: int = 64
    followers_max: int = 64


@dataclass(frozen=True, slots=True)
class Serving:
    """`targets`: as clients name it, with the ports that were chosen."""

    targets: tuple[str, ...]
    watchers: Seats
    followers: Seats


@contextlib.asynccontextmanager
async def serving(
    backend: Backend, inventory: Inventory, settings: ServerSettings
) -> AsyncIterator[Serving]:
    """Answer for as long as this lasts. Raises OSError where it cannot listen."""
    gate = Gate(settings.tokens, settings.tls.console_name if settings.tls else "")
    server = aio.server(interceptors=(gate,), options=OPTIONS, maximum_concurrent_rpcs=CALLS_MAX)
    watchers = Seats("who watch", settings.watchers_max)
    followers = Seats("who read logs", settings.followers_max)
    rpc.serve("Workloads", Workloads(backend, watchers, followers), server)
    rpc.serve("Jobs", Jobs(backend, watchers, followers), server)
    rpc.serve("Inventory", InventoryService(inventory), server)
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    reflection.enable_server_reflection(
        (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    targets = tuple(_listen(server, place, settings.tls) for place in settings.places)
    await server.start()
    for service in ("", *SERVICES):
        await state.set(service, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield Serving(targets, watchers, followers)
    finally:
        await state.enter_graceful_shutdown()
        await server.stop(STOP_SECONDS)


def _listen(server: Any, place: Place, tls: TlsFiles | None) -> str:
    """Returns the target for clients. Raises OSError."""
    before = os.umask(0o177)  # a socket is made with the rights that it is to have
    try:
        if place.unix or tls is None:
            port = server.add_insecure_port(str(place))
        else:
            port = server.add_secure_port(str(place), _credentials(tls))
    except RuntimeError as error:  # grpc's own, of which the details are in its log
        raise OSError(f"it cannot listen on {place}") from error
    finally:
        os.umask(before)
    return str(place) if place.unix else str(Place(host=place.host, port=port))


def _credentials(tls: TlsFiles) -> Any:
    """Renewed files are taken at the next connection."""
    seen: list[tuple[bytes, ...]] = []

    def read() -> Any:
        files = (tls.key, tls.certificate, tls.authorities)
        found = tuple(one.read_bytes() if one else b"" for one in files)
        if seen and seen[-1] == found:
            return None  # grpc keeps what it has
        seen[:] = [found]
        key, certificate, authorities = found
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities or None)

    def renewed() -> Any:
        try:
            return read()
        except OSError as error:
            log.warning("The certificate cannot be read again: %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(
        read(), renewed, require_client_authentication=tls.authorities is not None
    )
