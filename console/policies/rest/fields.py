"""Policies in the API's descriptions and bodies: msgspec's definitions, as pydantic wants them."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from console.policies.documents import Limits, Malformed, read_struct, spelled_out
from swdriver_shim.policy import Policy, Rules

S = TypeVar("S", bound=msgspec.Struct)


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Whole in itself: pydantic keeps references of its own."""
    (top,), parts = msgspec.json.schema_components([kind], ref_template="{name}")

    def inlined(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return inlined(parts[value["$ref"]])
            return {key: inlined(each) for key, each in value.items()}
        return [inlined(each) for each in value] if isinstance(value, list) else value

    found: dict[str, Any] = inlined(top)
    return found


def _reader(kind: type[S]) -> Any:
    def read(value: Any) -> S:
        if isinstance(value, kind):
            return value
        try:
            return read_struct(value, kind)
        except Malformed as error:
            raise ValueError(f"{error.at}: {error}" if error.at else str(error)) from None

    return read


PolicyField = Annotated[
    Policy,
    PlainValidator(_reader(Policy)),
    PlainSerializer(spelled_out),
    WithJsonSchema(_schema(Policy)),
]
LimitsField = Annotated[
    Limits,
    PlainValidator(_reader(Limits)),
    PlainSerializer(spelled_out),
    WithJsonSchema(_schema(Limits)),
]
RulesField = Annotated[
    Rules,
    PlainValidator(_reader(Rules)),
    PlainSerializer(msgspec.to_builtins),
    WithJsonSchema(_schema(Rules)),
]
