"""docs/workloads.md says of a spec what the code does, and its examples work in their order."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from django.test import Client
from msgspec import Struct

from console.environment import PROJECT
from console.workloads import spec
from console.workloads.leader import conditions, verdicts
from console.workloads.spec import WorkloadSpec
from tests.conftest import People
from tests.console.sessions.fleets import make_fleet
from tests.console.workloads.workloads import settle

TEXT = (PROJECT / "docs" / "workloads.md").read_text()
EXAMPLES = re.findall(r"^\$ api (.+)$", TEXT, re.MULTILINE)


def fields(kind: type[Struct], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a spec, with its default."""
    for one in msgspec.structs.fields(kind):
        inner = [
            part
            for part in (one.type, *getattr(one.type, "__args__", ()))
            if isinstance(part, type) and issubclass(part, Struct)
        ]
        if inner:
            yield from fields(inner[0], f"{path}{one.encode_name}.")
        else:
            yield f"{path}{one.encode_name}", one.default


def rows() -> dict[str, str]:
    """Fields that the page explains, with the defaults that it says."""
    table = TEXT.partition("## Spec")[2].partition("## Who may")[0]
    found = re.findall(r"^\| `([a-z0-9_.]+)` \|([^|]*)\|", table, re.MULTILINE)
    return {name: said.strip() for name, said in found}


def test_every_field_is_explained() -> None:
    assert sorted(rows()) == sorted(name for name, _ in fields(WorkloadSpec))


def test_defaults_are_as_it_says() -> None:
    said = rows()
    for name, default in fields(WorkloadSpec):
        if isinstance(default, bool):
            assert said[name] == str(default).lower(), name
        elif isinstance(default, int | float):
            assert float(said[name]) == default, name


def test_the_example_of_a_spec_is_one() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert spec.parse(text).engine.kind == "emulator"


@pytest.mark.django_db
def test_the_examples_work_in_their_order(people: People, api_of: Callable[..., Client]) -> None:
    make_fleet(boxes=4)
    client = api_of(people.org_admin)
    assert len(EXAMPLES) > 10
    for example in EXAMPLES:
        method, path, *more = shlex.split(example)
        body = more[1] if more else ""
        response = client.generic(
            method,
            f"/api/v1{path}",
            data=json.dumps(json.loads(body)) if body else "",
            content_type="application/json",
            headers={"If-Match": "*", "Idempotency-Key": str(uuid4())},
        )
        assert response.status_code in (200, 201, 202), f"{example}: {response.content!r}"
        settle()


@pytest.mark.parametrize("module", [conditions, verdicts])
def test_every_reason_is_listed(module: ModuleType) -> None:
    """The words for machines, as they stand in the code, are in the table of docs/rollouts.md."""
    text = (PROJECT / "docs" / "rollouts.md").read_text().partition("## Conditions")[2]
    reasons = set(re.findall(r'"([A-Z][a-z]+(?:[A-Z][a-z]+)*)"', inspect.getsource(module)))
    assert len(reasons) > 4
    assert {one for one in reasons if f"`{one}`" not in text} == set()
