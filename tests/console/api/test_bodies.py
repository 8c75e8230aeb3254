"""Bodies that are no JSON, or JSON that nobody can hold: refused with a sentence, by every operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

from console.accounts.models import User
from console.api.v1 import api
from tests.conftest import People

pytestmark = pytest.mark.django_db

BODIES = {
    "deep": b"[" * 50_000,
    "deep in a field": b'{"name":' * 20_000,
    "infinite": b'{"x": 1e999}',
    "not a number": b'{"x": NaN}',
    "no 64 bits": b'{"x": 123456789012345678901234567890}',
    "thousands of digits": b'{"x": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"x": "\xff\xfe"}',
    "half": b'{"x": ',
}


def takers() -> list[tuple[str, str]]:
    """Every operation with a JSON body, with something in place of its parameters."""
    found = []
    for path, operations in api.get_openapi_schema()["paths"].items():
        for method, operation in operations.items():
            if "application/json" in operation.get("requestBody", {}).get("content", {}):
                plain = path
                while "{" in plain:
                    before, _, rest = plain.partition("{")
                    plain = f"{before}1{rest.partition('}')[2]}"
                found.append((method, plain))
    return found


@pytest.mark.parametrize("what", BODIES)
def test_such_a_body_is_refused_with_a_sentence(
    people: People, browser_of: Callable[[User], Client], what: str
) -> None:
    browser = browser_of(people.platform_admin)
    seen = 0
    for method, path in takers():
        answer = browser.generic(method.upper(), path, BODIES[what], content_type="application/json")
        assert answer.status_code < 500, (method, path, answer.content)
        assert answer.status_code >= 400, (method, path, answer.content)
        seen += b"The body is not the JSON that is expected here: " in answer.content
    assert seen >= 35  # all but those that want a credential of a process
