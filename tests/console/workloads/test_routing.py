"""What a workload makes for routing is not changed by people, on pages and over REST."""

from __future__ import annotations

import json
from collections.abc import Callable
from uuid import uuid4

import pytest
from django.test import Client

from console.accounts.models import User
from console.accounts.principal import SYSTEM
from console.routing import services as routing
from tests.conftest import People
from tests.console.sessions.fleets import make_fleet
from tests.console.workloads.workloads import make_workload
from tests.html import compact

WHY = "Model talk and its replicas belong to workload talk. Change the workload instead."
REPLICA = {"name": "talk-1", "url": "http://10.0.0.1:8000"}


@pytest.fixture(autouse=True)
def workload(people: People) -> None:
    make_fleet(boxes=4)
    make_workload(org="acme")
    model = routing.for_change(SYSTEM, "talk")
    routing.add_replica(SYSTEM, model, name="talk-0", values={"url": "http://10.0.0.1:8000"})


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "", None),
        ("POST", "/replicas", REPLICA),
        ("PATCH", "/replicas/talk-0", {"draining": True}),
        ("DELETE", "/replicas/talk-0", None),
    ],
)
def test_the_api_refuses_and_names_the_workload(
    method: str, path: str, body: object, people: People, api_of: Callable[[User], Client]
) -> None:
    headers = {"If-Match": "*", "Idempotency-Key": str(uuid4())}
    found = api_of(people.platform_admin).generic(
        method,
        f"/api/v1/models/talk{path}",
        data="" if body is None else json.dumps(body),
        content_type="application/json",
        headers=headers,
    )
    assert (found.status_code, found.json()["detail"]) == (409, WHY)


def test_pages_refuse_and_link_to_the_workload(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    browser = browser_of(people.platform_admin)
    page = browser.get("/routing/models/talk/").content.decode()
    assert 'href="/workloads/talk/"' in page
    assert "/routing/models/talk/edit/" not in page
    assert "/routing/models/talk/replicas/talk-0/" not in page
    for path in ("replicas/talk-0/drain", "replicas/talk-0/remove", "remove"):
        typed = path.split("/")[1] if "/" in path else "talk"
        answer = browser.post(f"/routing/models/talk/{path}/", {"typed": typed}, follow=True)
        assert WHY in compact(answer)
    [replica] = routing.get_model(people.principal("platform_admin"), "talk").replicas.all()
    assert not replica.draining
