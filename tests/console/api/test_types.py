"""Nothing is taken for what it is not: in the body of no operation, at no depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from django.test import Client
from pydantic import ValidationError

from console.api.fields import Input
from console.api.v1 import api
from tests.conftest import People

MISTAKEN = {
    "integer": ["1", "0", "", True, False, 1.5],
    "number": ["1", "1.5", "", True, False],
    "boolean": [0, 1, "true", "yes", "on", "", 1.0],
}


def all_below(kind: type[Input]) -> Iterator[type[Input]]:
    for below in kind.__subclasses__():
        yield below
        yield from all_below(below)


BODIES = sorted(
    {one for one in all_below(Input) if one.__module__.startswith("console.")},
    key=lambda one: one.__name__,
)
Steps = tuple[str, ...]


def leaves(schema: Mapping[str, Any], path: Steps) -> Iterator[tuple[Steps, str]]:
    """Every number and truth in a description, by how it is reached: names, and `[]` for an item."""
    kinds = [schema, *schema.get("anyOf", [])]
    texts = any(one.get("type") == "string" for one in kinds)
    for one in kinds:
        kind = one.get("type")
        if kind in MISTAKEN and not texts:
            yield path, kind
        elif kind == "array" and "items" in one:
            yield from leaves(one["items"], (*path, "[]"))


def built(path: Steps, value: object) -> object:
    for part in reversed(path):
        value = [value] if part == "[]" else {part: value}
    return value


@pytest.mark.parametrize("body", BODIES, ids=lambda one: one.__name__)
def test_no_field_takes_a_value_of_another_kind(body: type[Input]) -> None:
    taken = []
    for name, schema in body.model_json_schema().get("properties", {}).items():
        for path, kind in leaves(schema, (name,)):
            for value in MISTAKEN[kind]:
                try:
                    body.model_validate(built(path, value))
                except ValidationError as error:
                    if name in {str(one["loc"][0]) for one in error.errors() if one["loc"]}:
                        continue
                taken.append(f"{'.'.join(path)}: {value!r} for {kind}")
    assert taken == []


def test_every_body_is_one_that_is_held_to_this() -> None:
    schema = api.get_openapi_schema()
    lax = [
        f"{method} {path}"
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
        for kind, content in operation.get("requestBody", {}).get("content", {}).items()
        if kind == "application/json"
        and schema["components"]["schemas"]
        .get(content["schema"].get("$ref", "").rpartition("/")[2], {})
        .get("additionalProperties")
        is not False
    ]
    assert lax == []


@pytest.mark.django_db
@pytest.mark.parametrize(
    "tokens", [["1", "2"], [True], [1, "2"], [1.5], ["x"], "12", [None], [[1]]], ids=str
)
def test_explain_takes_numbers_for_tokens_and_nothing_else(
    tokens: object, people: People, api_of: Callable[..., Client]
) -> None:
    answer = api_of(people.viewer).post(
        "/api/v1/orgs/acme/explain", {"tokens": tokens}, content_type="application/json"
    )
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"].startswith("/body/tokens")
