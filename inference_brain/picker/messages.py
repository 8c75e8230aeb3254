"""Envoy's `ext_proc` messages, to phases and from replies.

Only here protobuf is touched. Its classes have no types, so this is the border that checks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from inference_brain.picker.exchange import DESTINATION, BrokenProtocol
from inference_brain.picker.phases import (
    BodyMode,
    Change,
    Head,
    HeadReply,
    Immediate,
    Phase,
    Piece,
    PieceReply,
    Reply,
    Side,
    Trailers,
)

NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SERVED: Final = "x-gateway-destination-endpoint-served"
FILTER: Final = "envoy.filters.http.ext_proc"
ADDRESS: Final = "upstream.address"
ENDPOINTS_MAX: Final = 4096

_Mode = processing_mode_pb2.ProcessingMode
_MODES: Final = {
    _Mode.NONE: BodyMode.NONE,
    _Mode.STREAMED: BodyMode.STREAMED,
    _Mode.BUFFERED: BodyMode.BUFFERED,
    _Mode.FULL_DUPLEX_STREAMED: BodyMode.FULL_DUPLEX,
}
_OVERWRITE: Final = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def phase(message: Any) -> Phase:
    """What a gateway has sent. Raises BrokenProtocol."""
    match message.WhichOneof("request"):
        case "request_headers":
            return _request_head(message)
        case "request_body":
            return Piece(Side.REQUEST, message.request_body.body, message.request_body.end_of_stream)
        case "request_trailers":
            return Trailers(Side.REQUEST)
        case "response_headers":
            head = message.response_headers
            return Head(Side.RESPONSE, _headers(head), head.end_of_stream, served=_served(message))
        case "response_body":
            return Piece(Side.RESPONSE, message.response_body.body, message.response_body.end_of_stream)
        case "response_trailers":
            return Trailers(Side.RESPONSE)
        case other:
            raise BrokenProtocol(f"a message of an unknown kind: {other}")


def message(reply: Reply) -> Any:
    """To a gateway."""
    if isinstance(reply, Immediate):
        return _immediate(reply)
    side = "request" if reply.side is Side.REQUEST else "response"
    if isinstance(reply, HeadReply):
        common = pb.CommonResponse(clear_route_cache=bool(reply.endpoints))
        _change(common.header_mutation, reply.change)
        made = pb.ProcessingResponse(**{f"{side}_headers": pb.HeadersResponse(response=common)})
    elif isinstance(reply, PieceReply):
        common = pb.CommonResponse(clear_route_cache=bool(reply.endpoints))
        _change(common.header_mutation, reply.change)
        if reply.streamed:
            streamed = common.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = reply.data or b"", reply.ends
        elif reply.data is not None:
            common.body_mutation.body = reply.data
        made = pb.ProcessingResponse(**{f"{side}_body": pb.BodyResponse(response=common)})
    else:
        return pb.ProcessingResponse(**{f"{side}_trailers": pb.TrailersResponse()})
    if reply.endpoints:
        made.dynamic_metadata.update({NAMESPACE: {DESTINATION: reply.endpoints}})
    return made


def _immediate(reply: Immediate) -> Any:
    answer = reply.answer
    made = pb.ProcessingResponse()
    made.immediate_response.status.code = answer.status
    made.immediate_response.body = answer.body
    made.immediate_response.details = "tidegate_endpoint_picker"
    _change(made.immediate_response.headers, Change(answer.headers))
    return made


def _change(mutation: Any, change: Change | None) -> None:
    if change is None:
        return
    for name, value in change.put.items():
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = name, value.encode("latin-1")
    mutation.remove_headers.extend(change.drop)


def _request_head(message: Any) -> Head:
    head = message.request_headers
    modes: dict[str, Any] = {}
    if message.HasField("protocol_config"):
        config = message.protocol_config
        modes["request_mode"] = _MODES.get(config.request_body_mode, BodyMode.OTHER)
        modes["response_mode"] = _MODES.get(config.response_body_mode, BodyMode.OTHER)
    return Head(Side.REQUEST, _headers(head), head.end_of_stream, among=_subset(message), **modes)


def _headers(head: Any) -> Mapping[str, str]:
    """Names in lower case. What came several times is one, as HTTP has it. Each character is a byte,
    also where a gateway has taken them for UTF-8."""
    found: dict[str, str] = {}
    for header in head.headers.headers:
        name = _bytewise(header.key).lower()
        raw: bytes = header.raw_value
        value = raw.decode("latin-1") if raw else _bytewise(header.value)
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _bytewise(text: str) -> str:
    return text if text.isascii() else text.encode().decode("latin-1")


def _subset(message: Any) -> Collection[str] | None:
    """The endpoints to pick from: a list, or a string with commas, since gateways differ."""
    fields = message.metadata_context.filter_metadata[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    texts = [value.string_value]
    if value.WhichOneof("kind") == "list_value":
        texts = [one.string_value for one in value.list_value.values[:ENDPOINTS_MAX]]
    named = (one.strip() for text in texts for one in text.split(",")[:ENDPOINTS_MAX])
    return frozenset(one for one in named if one)


def _served(message: Any) -> str | None:
    """Which endpoint has answered: as the protocol says it, or by Envoy's attribute."""
    metadata = message.metadata_context.filter_metadata
    if NAMESPACE in metadata and SERVED in metadata[NAMESPACE].fields:
        return str(metadata[NAMESPACE].fields[SERVED].string_value)
    if FILTER in message.attributes and ADDRESS in message.attributes[FILTER].fields:
        return str(message.attributes[FILTER].fields[ADDRESS].string_value)
    return None
