"""Tenants who mean harm: what they send about workloads, and what they try to learn of others."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from django.db import transaction
from django.test import Client

from console.accounts.models import User
from console.accounts.principal import SYSTEM, Refused
from console.routing.models import ServedModel
from console.sessions.models import Session
from console.workloads import changes, lifecycle, spec
from console.workloads.leader import rendering
from telemetry.models import Event
from tests.conftest import People
from tests.console.sessions.fleets import make_driver, make_fleet
from tests.console.sessions.requests import create
from tests.console.workloads.workloads import (
    a_workload,
    an_instance,
    locked,
    make_workload,
    settle,
    wanted,
)
from workload_manager.compiler.spec import CompileSpec

URL = "/api/v1/workloads"
SPEC: dict[str, Any] = {
    "name": "talk",
    "model": "example/chat-8b",
    "tokens_max": 32768,
    "engine": {"kind": "emulator"},
}


@contextmanager
def ends_within(seconds: int) -> Iterator[None]:
    """What never ends is a failure, and not a test run that hangs."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"It has not ended within {seconds} s.")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def send(client: Client, method: str, path: str, body: Any) -> Any:
    raw = body if isinstance(body, str) else json.dumps(body)
    return client.generic(
        method,
        f"{URL}{path}",
        data=raw,
        content_type="application/json",
        headers={"If-Match": "*", "Idempotency-Key": str(uuid4())},
    )


@pytest.mark.parametrize("name", ["x - at `$]", "]", "x - at `$[", "x - at `$.a]b", "[", "a.]"])
@pytest.mark.parametrize("place", ["top", "engine"])
def test_no_name_of_a_field_keeps_the_reader_busy(name: str, place: str) -> None:
    values = {**SPEC, name: 1} if place == "top" else {**SPEC, "engine": {"kind": "emulator", name: 1}}
    with ends_within(10):
        with pytest.raises(spec.Wrong):
            spec.from_values(values)
        with pytest.raises(spec.Wrong):
            spec.parse(json.dumps(values))


@pytest.mark.parametrize(
    "body",
    [
        '{"spec": {"name": ' + "[" * 400 + "]" * 400 + "}}",
        '{"spec": {"name": ' + "[" * 5000 + "]" * 5000 + "}}",
        '{"spec": {"name": ' + '{"a":' * 400 + "1" + "}" * 400 + "}}",
        '{"spec": {"\\ud800": 1}}',
        '{"spec": {"name": "\\ud800"}}',
        '{"spec": {"engine": {"kind": "\\ud800"}}}',
        '{"spec": {"engine": {"kind": "emulator", "\\ud800": 1}}}',
        '{"spec": {"tokens_max": NaN}}',
        '{"spec": {"tokens_max": 1e999}}',
        '{"spec": {"tokens_max": ' + "9" * 5000 + "}}",
        '{"yaml": "\\ud800: 1"}',
        '{"yaml": "name: \\u0000"}',
        '{"yaml": "? [a, b]\\n: 1\\n? {a: b}\\n: 2"}',
        '{"yaml": "' + "- " * 9000 + '"}',
        '{"yaml": "a: &a [1]\\nb: *a"}',
        '{"yaml": "!!python/object/apply:os.system [id]"}',
        '{"yaml": "%YAML 9.9\\n---\\na: 1"}',
    ],
)
def test_no_spec_is_the_console_s_fault(
    people: People, api_of: Callable[[User], Client], body: str
) -> None:
    with ends_within(30):
        response = send(api_of(people.org_admin), "POST", "", body)
    assert response.status_code in (400, 422), (response.status_code, response.content[:300])


def test_no_patch_is_the_console_s_fault(people: People, api_of: Callable[[User], Client]) -> None:
    a_workload(people.acme)
    for inner in ("[" * 400 + "]" * 400, '{"a":' * 400 + "1" + "}" * 400):
        body = '{"patch": {"weights": ' + inner + "}}"
        response = send(api_of(people.org_admin), "PATCH", "/talk", body)
        assert response.status_code in (400, 422), (response.status_code, response.content[:300])


def test_a_roll_back_sets_nothing_that_only_a_platform_admin_sets(people: People) -> None:
    make_fleet(boxes=4)
    workload = make_workload(org="acme")
    shell = {"kind": "command", "command": ["sh", "-c", "serve"], "emulator": None}
    changes.update(SYSTEM, locked(SYSTEM), spec.merged(workload.spec(), {"engine": shell}))
    settle()
    changes.update(SYSTEM, locked(SYSTEM), wanted(org="acme"), reason="That command must not run.")
    settle()
    principal = people.principal("org_admin")
    with pytest.raises(Refused):
        changes.roll_back(principal, locked(principal), 2)
    assert changes.roll_back(SYSTEM, locked(SYSTEM), 2).spec().engine.kind == "command"


@pytest.mark.parametrize(
    "patch",
    [
        {"weights": {"source": "s3://theirs/model"}},
        {"engine": {"kind": "vllm", "emulator": None}},
        {"tokenizer": {"sha256": "a" * 64}},
    ],
    ids=["weights", "kind", "tokenizer"],
)
def test_what_may_run_what_it_is_given_is_given_nothing_else(
    people: People, patch: dict[str, Any]
) -> None:
    """`--trust-remote-code` was set by a platform admin for the weights that it was set with."""
    make_fleet(boxes=4)
    trusting: dict[str, Any] = {
        "engine": {"kind": "emulator", "arguments": ["--start-seconds", "1"]},
        "weights": {"source": "s3://ours/model"},
    }
    workload = make_workload(org="acme", **trusting)
    principal = people.principal("org_admin")
    changes.update(principal, locked(principal), spec.merged(workload.spec(), {"tokens_max": 9000}))
    settle()
    with pytest.raises(Refused, match="Only a platform admin"):
        changes.update(principal, locked(principal), spec.merged(locked(principal).spec(), patch))


def test_nobody_else_takes_the_driver_of_a_workload_for_a_job(
    people: People, api_of: Callable[[User], Client]
) -> None:
    make_fleet(boxes=4)
    make_workload(org="acme")
    make_driver("talk-1-0", workload="talk")
    create(people, boxes=1)  # a session `chat`
    for who in (people.org_admin, people.platform_admin):
        answer = api_of(who).post(
            "/api/v1/sessions/chat/jobs",
            data={"name": "mine", "driver": "talk-1-0"},
            content_type="application/json",
            headers={"If-Match": "*", "Idempotency-Key": str(uuid4())},
        )
        assert answer.status_code == 404, answer.content
        assert "talk-1-0" in answer.json()["detail"]


def test_of_a_thousand_revisions_those_before_go_that_nothing_runs(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "REVISIONS_KEPT", 3)
    workload = a_workload(people.acme)
    an_instance(workload, 0)
    for number in range(2, 8):
        said = spec.merged(locked(SYSTEM).spec(), {"tokens_max": 1000 + number})
        with transaction.atomic():
            changes._new_revision(SYSTEM, locked(SYSTEM), said.template, note="Again")
    numbers = set(workload.revisions.values_list("number", flat=True))
    assert numbers == {1, 5, 6, 7}, "the first one still runs"


def test_who_has_the_name_next_sees_nothing_of_who_had_it(
    people: People, api_of: Callable[[User], Client]
) -> None:
    make_fleet(boxes=4)
    workload = make_workload(org="acme", model="acme/secret-project")
    changes.restart(SYSTEM, locked(SYSTEM), reason="Acme only.")
    topics = ("workload:talk", "session:talk")
    assert all(feed(api_of(people.org_admin), topic) for topic in topics)
    ServedModel.objects.all().delete()
    lifecycle.forget(workload)
    Session.objects.all().delete()
    before = Event.objects.latest("pk").pk
    make_workload(people.principal("stranger"), org="globex")
    for topic in topics:
        assert min(feed(api_of(people.stranger), topic)) > before


def feed(client: Client, topic: str) -> list[int]:
    """The numbers of the events that they see of it."""
    response = client.get(f"/api/v1/events?topic={topic}")
    assert response.status_code == 200, response.content
    return [one["id"] for one in response.json()["items"]]


def test_no_hash_tells_a_viewer_whether_they_have_guessed_a_variable(
    people: People, api_of: Callable[[User], Client]
) -> None:
    """What they are not shown, they could try out: they know all else that the hashes are made of."""
    guessed = {"engine": {"environment": {"PIN": "1234"}}}
    workload = a_workload(people.acme)
    changes._new_revision(SYSTEM, workload, wanted(org="acme", **guessed).template, note="")
    revision = workload.revision
    assert revision is not None
    shown = api_of(people.viewer).get(f"{URL}/talk/revisions/2").json()
    assert shown["template"]["engine"]["environment"] == {"PIN": "(masked)"}
    assert shown["digest"] not in (revision.digest, wanted(org="acme", **guessed).template.digest)
    job = rendering.compile_spec(workload, revision)
    assert b"1234" not in job
    other = wanted(org="acme", engine={"environment": {"PIN": "5678"}}).template
    inputs = [
        CompileSpec(model="m", engine=one.engine, tokens_max=9).inputs({})
        for one in (revision.template_read(), other)
    ]
    assert inputs[0] == inputs[1], "the address of an artifact"
