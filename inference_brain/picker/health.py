"""gRPC's health protocol, which gateways and Kubernetes ask.

Its two messages have one field each, so they are made here rather than by another dependency.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE: Final = "grpc.health.v1.Health"
EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS: Final = "liveness"
READINESS: Final = frozenset({"", "readiness", EXT_PROC})
SERVING: Final = 1
NOT_SERVING: Final = 2
SERVICE_UNKNOWN: Final = 3
WATCH_SECONDS: Final = 1.0  # between two looks at whether it has changed

_Field = descriptor_pb2.FieldDescriptorProto


def _messages() -> tuple[Any, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="tidegate/health.proto", package="grpc.health.v1", syntax="proto3"
    )
    for name, field, kind in (
        ("HealthCheckRequest", "service", _Field.TYPE_STRING),
        ("HealthCheckResponse", "status", _Field.TYPE_INT32),  # an enum on the wire
    ):
        made = file.message_type.add(name=name)
        made.field.add(name=field, number=1, type=kind, label=_Field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    ask, answer = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"grpc.health.v1.{name}"))
        for name in ("HealthCheckRequest", "HealthCheckResponse")
    )
    return ask, answer


HealthCheckRequest, HealthCheckResponse = _messages()


class Health:
    """Alive as soon as it answers; ready when `is_ready` says so."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    def status(self, service: str) -> int:
        if service == LIVENESS:
            return SERVING
        if service not in READINESS:
            return SERVICE_UNKNOWN
        return SERVING if self._is_ready() else NOT_SERVING

    async def check(self, request: Any, context: Any) -> Any:
        status = self.status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no such service.")
        return HealthCheckResponse(status=status)

    async def watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG002
        """Each change, as long as somebody looks."""
        before = None
        while True:
            status = self.status(request.service)
            if status != before:
                yield HealthCheckResponse(status=status)
            before = status
            await asyncio.sleep(WATCH_SECONDS)

    def handler(self) -> Any:
        codec = {
            "request_deserializer": HealthCheckRequest.FromString,
            "response_serializer": HealthCheckResponse.SerializeToString,
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self.check, **codec),
                "Watch": grpc.unary_stream_rpc_method_handler(self.watch, **codec),
            },
        )
