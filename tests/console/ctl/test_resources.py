"""The table of resources says what the API's description says."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from console.api.v1 import api
from console.ctl.arguments import parser
from console.ctl.catalogue import Reference
from console.ctl.changes import body_of, path_of
from console.ctl.failures import Usage
from console.ctl.resources import BY_NAME, RESOURCES, Call, Resource
from console.environment import PROJECT

SCHEMA: dict[str, Any] = json.loads(json.dumps(api.get_openapi_schema()))
# Lists that the table leaves out, and why.
LEFT_OUT = {
    "/alert-channels": "`kind` of a channel is another one than that of a manifest",
    "/alert-channels/{}/notifications": "what was sent to a channel: a page of the console",
    "/dead-letters": "for whoever repairs telemetry",
    "/hand-over/notes": "a page of the console",
    "/orgs/{}/callers": "tokens of engines",
    "/orgs/{}/policy/scheduled": "a part of policies that has pages of its own",
    "/orgs/{}/policy/versions": "history of policies: a page of the console",
    "/orgs/{}/purges": "receipts, which are documents to be stored",
    "/views": "views of pages",
    "/workloads/{}/events": "`get events --topic workload:…` has them, and `describe`",
}


def plain(path: str) -> str:
    """With empty braces, and below the API's own path."""
    parts = path.removeprefix("/api/v1").split("/")
    return "/".join("{}" if part.startswith("{") else part for part in parts)


OPERATIONS = {
    (method.upper(), plain(path)): operation
    for path, methods in SCHEMA["paths"].items()
    for method, operation in methods.items()
}


def resolved(schema: Any) -> dict[str, Any]:
    """The properties of a schema, of all its alternatives together."""
    if "$ref" in schema:
        return resolved(SCHEMA["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    found = dict(schema.get("properties", {}))
    for one in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        found |= resolved(one)
    return found


def answer_of(operation: Any) -> Any:
    for status in ("200", "201", "202"):
        if content := operation["responses"].get(status, {}).get("content"):
            return content["application/json"]["schema"]
    raise AssertionError("it answers with nothing")


def item_of(resource: Resource) -> dict[str, Any]:
    """The properties of an item, as its list or its own path tells them."""
    if resource.within:
        above = BY_NAME[resource.parent]
        schema = item_of(above)[resource.within]["items"]
    elif resource.single:
        schema = answer_of(OPERATIONS["GET", plain(resource.path)])
    else:
        schema = answer_of(OPERATIONS["GET", plain(resource.path)])
        schema = resolved(schema)["items"]["items"] if resource.paged else schema["items"]
    return resolved(schema)


def parameters(operation: Any, where: str) -> set[str]:
    return {one["name"] for one in operation.get("parameters", ()) if one["in"] == where}


def calls(resource: Resource) -> list[tuple[str, Call]]:
    own = {"create": resource.create, "update": resource.update, "delete": resource.delete}
    return [(name, call) for name, call in {**own, **resource.actions}.items() if call]


CALLS = [(resource, name, call) for resource in RESOURCES for name, call in calls(resource)]


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda one: one.name)
def test_a_row_reads_what_the_api_has(resource: Resource) -> None:
    properties = item_of(resource)
    for column in resource.shown(wide=True)[bool(resource.parent) :]:
        found: Any = {"properties": properties}
        for part in column.path.split("."):
            there = resolved(found)
            # What models of engines are is theirs: an object without a description.
            assert part in there or not there, f"{column.heading}: {column.path}"
            found = there.get(part, {})
    if not resource.single:
        assert resource.key in properties
    if resource.item_path is not None:
        assert ("GET", plain(resource.item_path)) in OPERATIONS
    if not resource.within:
        asked = parameters(OPERATIONS["GET", plain(resource.path)], "query")
        assert set(resource.filters) == asked - {"cursor", "limit"} or resource.name == "alert-rule"
        assert resource.paged == ("cursor" in asked) or resource.single


@pytest.mark.parametrize(
    ("resource", "call"),
    [one[::2] for one in CALLS],
    ids=[f"{one.name}-{name}" for one, name, _ in CALLS],
)
def test_a_row_changes_as_the_api_wants_it(resource: Resource, call: Call) -> None:
    reference = Reference(resource, "{" if resource.parent else "", "{")
    path = plain(path_of(reference, call).replace("%7B", "{"))
    operation = OPERATIONS[call.method, path]
    headers = parameters(operation, "header")
    assert ("If-Match" in headers) == bool(call.match), "match"
    assert ("validate_only" in parameters(operation, "query")) == call.dry, "dry"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    taken = resolved(body["schema"]) if body else {}
    if call.wrap:
        assert call.wrap in taken
        taken |= dict.fromkeys(call.fields)
    left_out = {"wait_seconds", "plan_token", "yaml", call.wrap} | (
        set() if resource.create is call or resource.update is call else set(taken)
    )
    assert set(call.fields) | set(call.body) <= set(taken)
    assert set(taken) - left_out <= set(call.fields) | set(call.body)
    if call.match == "self":
        assert resource.item_path is not None


@pytest.mark.parametrize(
    "resource", [one for one in RESOURCES if one.is_applied], ids=lambda one: one.name
)
def test_what_get_prints_is_known_to_apply(resource: Resource) -> None:
    written = {
        *(resource.create or Call("")).fields,
        *(resource.update or Call("")).fields,
        resource.key,
    }
    if resource.inner:
        assert resource.inner in item_of(resource)
        return
    shown = set(item_of(resource))
    assert shown - written == set(resource.read_only) - written
    assert "kind" not in shown


def choices(schema: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a schema with the texts to choose from."""
    if "$ref" in schema:
        schema = SCHEMA["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    yield from ((name, one) for one in schema.get("enum", ()) if isinstance(one, str))
    for one in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        yield from choices(one, name)
    if "items" in schema:
        yield from choices(schema["items"], name)
    for inner, one in schema.get("properties", {}).items():
        yield from choices(one, f"{name}.{inner}" if name else inner)


@pytest.mark.parametrize(
    "resource", [one for one in RESOURCES if one.is_applied], ids=lambda one: one.name
)
def test_choices_that_yaml_reads_as_false_or_true_are_known(resource: Resource) -> None:
    """`no` is put right where a manifest is read. Nothing is for `yes`, `on` and `off`."""
    reference = Reference(resource, "{" if resource.parent else "", "{")
    found = set()
    for call in filter(None, (resource.create, resource.update)):
        path = plain(path_of(reference, call).replace("%7B", "{"))
        body = OPERATIONS[call.method, path]["requestBody"]["content"]["application/json"]["schema"]
        found |= {one for one in choices(body) if isinstance(yaml.safe_load(one[1]), bool)}
    assert found == {(name, "no") for name in resource.says_no}


def test_every_list_of_the_api_is_in_the_table_or_left_out_with_a_reason() -> None:
    lists = {
        path for (method, path), one in OPERATIONS.items() if method == "GET" and "cursor" in str(one)
    }
    assert lists == {
        plain(one.path) for one in RESOURCES if one.paged and not one.single and not one.within
    } | set(LEFT_OUT)


def test_names_are_told_apart() -> None:
    names = [name for one in RESOURCES for name in {one.name, one.plural, one.short} if name]
    assert len(names) == len(set(names)) == len(BY_NAME)


def test_it_imports_nothing_of_the_console_but_itself() -> None:
    """Also nothing of apps that the import contract does not know yet."""
    found = {
        name
        for path in (PROJECT / "console" / "ctl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [one.name for one in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if name.split(".")[0] == "console"
    }
    assert found
    assert all(name.startswith("console.ctl") for name in found)


def test_a_field_that_is_a_switch_is_sent_only_where_it_is_said_and_taken() -> None:
    calls = {one.name: one.actions["drain"] for one in RESOURCES if one.name in ("node", "box")}
    for words, field in (((), None), (("--ignore-redundancy",), True)):
        assert parser().parse_args(["drain", "ax-1", *words]).ignore_redundancy is field
    assert body_of(calls["node"], {"ignore_redundancy": True}, "") == {"ignore_redundancy": True}
    with pytest.raises(Usage, match="It takes no --ignore-redundancy"):
        body_of(calls["box"], {"ignore_redundancy": True}, "")
