"""The services of `cluster.proto` over gRPC, made of the descriptor that their messages come with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from cluster_server.proto import cluster_pb2 as pb


def stub(service: str, channel: Any) -> Any:
    """The calls of a service, such as `Workloads`, each by its name."""
    described = pb.DESCRIPTOR.services_by_name[service]
    calls = {}
    for method in described.methods:
        call = channel.unary_stream if method.server_streaming else channel.unary_unary
        calls[method.name] = call(
            f"/{described.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
    return SimpleNamespace(**calls)


def serve(service: str, servicer: object, server: Any) -> None:
    """Answer calls with the servicer's methods of their names. Those that it lacks are UNIMPLEMENTED."""
    described = pb.DESCRIPTOR.services_by_name[service]
    handlers = {}
    for method in described.methods:
        if answer := getattr(servicer, method.name, None):
            kind = "unary_stream" if method.server_streaming else "unary_unary"
            handlers[method.name] = getattr(grpc, f"{kind}_rpc_method_handler")(
                answer,
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
    handler = grpc.method_handlers_generic_handler(described.full_name, handlers)
    server.add_generic_rpc_handlers((handler,))
