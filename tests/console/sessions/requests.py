"""Requests about sessions and jobs, as operations that have ended."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from console.fleet.models import Box, Driver
from console.operations.models import Operation
from console.orgs.models import Org
from console.sessions import rules, services
from console.sessions.changes import jobs, sizes
from console.sessions.models import RuleSet, Session, Stream
from tests.conftest import People


def start_job(people: People, driver: Driver, session_name: str = "chat", **more: object) -> Operation:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        session = services.for_change(admin, session_name)
        return jobs.start_job(admin, session, "serve", driver, **more)  # type: ignore[arg-type]


def shards() -> list[Stream]:
    return list(services.streams_of(Session.objects.get(name="chat")))


def create(
    people: People,
    name: str = "chat",
    boxes: int = 2,
    org: Org | None = None,
    bytes_per_token: int | None = None,
    **more: Any,
) -> Operation:
    with transaction.atomic():
        session = sizes.new_session(name, org or people.acme, boxes, bytes_per_token=bytes_per_token)
        return sizes.create(people.principal("platform_admin"), session, **more)


def resize(people: People, boxes: int, name: str = "chat", **more: Any) -> Operation:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        return sizes.resize(admin, services.for_change(admin, name), boxes, **more)


def set_rules(people: People, org: Org | None = None, **values: Any) -> RuleSet:
    admin = people.principal("platform_admin")
    with transaction.atomic():
        return rules.set_rules(admin, rules.for_change(admin, org), values)


def boxes_of(name: str = "chat") -> list[str]:
    return list(Box.objects.filter(session_box__session__name=name).values_list("name", flat=True))
