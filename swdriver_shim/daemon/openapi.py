"""A driver's API as OpenAPI 3.1, made from the table of verbs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from swdriver_shim.cache.reuse.sample import Sample
from swdriver_shim.daemon import binary
from swdriver_shim.daemon.verbs import Verb

_PROBLEM = {"description": "Refused, with a sentence: application/problem+json."}
_BYTES = {binary.OCTETS: {"schema": {"type": "string", "format": "binary"}}}


def describe(verbs: Sequence[Verb[Any, Any]]) -> dict[str, Any]:
    """Of the verbs, and of what the controller may ask for previews of policies."""
    kinds = [Sample, *(verb.body for verb in verbs), *(verb.answer for verb in verbs)]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    bodies, answers = schemas[1 : 1 + len(verbs)], schemas[1 + len(verbs) :]
    paths: dict[str, Any] = {
        f"/v1/{verb.path}": {
            "post": {
                "summary": verb.summary,
                "operationId": verb.path.rpartition("/")[2],
                "requestBody": {"required": True, **_content(body, has_bytes=verb.sends_bytes)},
                "responses": {
                    "200": {"description": "Done.", **_content(answer, has_bytes=verb.returns_bytes)},
                    **dict.fromkeys(("401", "409", "413", "422", "429", "503"), _PROBLEM),
                },
            }
        }
        for verb, body, answer in zip(verbs, bodies, answers, strict=True)
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "SwDriver shim", "version": "1"},
        "security": [{"token": []}],
        "paths": {**paths, "/v1/reuse": {"get": _reuse(schemas[0])}},
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _content(schema: dict[str, Any], *, has_bytes: bool) -> dict[str, Any]:
    if has_bytes:
        return {"description": f"{binary.__doc__} Header: {schema['$ref']}.", "content": _BYTES}
    return {"content": {"application/json": {"schema": schema}}}


def _reuse(schema: dict[str, Any]) -> dict[str, Any]:
    orgs = {"type": "array", "items": {"type": "object"}}
    return {
        "summary": "Get a sample of an org's traffic for previews. Needs the controller's token.",
        "operationId": "reuse",
        "parameters": [
            {
                "name": "org",
                "in": "query",
                "required": False,
                "description": "By default, all orgs that have a sample are listed.",
                "schema": {"type": "string"},
            }
        ],
        "responses": {
            "200": {
                "description": "A sample, or a list of orgs.",
                "content": {"application/json": {"schema": {"oneOf": [schema, orgs]}}},
            },
            **dict.fromkeys(("401", "404"), _PROBLEM),
        },
    }
