"""Who may not see a thing learns neither its name nor that it is there: every route, each role of a
stranger org, refusals, explanations, previews, searches, live topics. `everything` makes what there is.

A route is covered because it is in the table of addresses or in the description of the API. One with a
parameter of a new kind fails until `everything` says what stands for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import Client
from pytest_django import DjangoDbBlocker

from console.accounts.principal import Principal
from console.api.v1 import api
from console.live import access
from console.live.reading import Wanted, read
from console.operations.models import Operation
from console.sessions.models import Job, JobBox
from console.workloads.models import Workload
from tests.conftest import People, make_people
from tests.console.everything import (
    HIDDEN,
    OWN,
    Scene,
    drain_that_moves_ours,
    driver_that_answers,
    make_scene,
)
from tests.console.sessions.fleets import make_box
from tests.every_page import addresses

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

ROLES: Final = ("viewer", "on_call", "org_admin")
METHODS: Final = ("get", "post", "put", "patch", "delete")
_PARAMETER: Final = re.compile(r"([^/{}]+)/\{[^}]+\}")
# What changes from one answer to the next, whoever asks.
_NOISE: Final = re.compile(
    r"[0-9a-f]{32}|\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)|csrf[^>]*>|nonce-[^'\"]+|name=\"csrf[^>]*"
)
NEVER: Final = "zqxnothing"  # a name that nothing has; as long as HIDDEN, but for the last letters


@pytest.fixture(scope="module")
def there_is(rows_of_module: None, django_db_blocker: DjangoDbBlocker) -> Iterator[tuple[People, Scene]]:
    with (
        driver_that_answers(f"{OWN}-node", f"{OWN}-link") as own,
        driver_that_answers(f"{HIDDEN}-node", f"{HIDDEN}-link") as hidden,
    ):
        with django_db_blocker.unblock():
            people = make_people()
            scene = make_scene(people, own, hidden)
        yield people, scene


@pytest.fixture
def people(db: None, there_is: tuple[People, Scene]) -> People:
    return there_is[0]


@pytest.fixture
def scene(db: None, there_is: tuple[People, Scene]) -> Scene:
    return there_is[1]


@contextmanager
def taken_back() -> Iterator[None]:
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def text_of(answer: Any) -> str:
    """Status, headers and body."""
    content = async_to_sync(_whole)(answer) if answer.streaming else answer.content
    headers = "\n".join(f"{name}: {value}" for name, value in answer.headers.items())
    return f"{answer.status_code}\n{headers}\n{content.decode(errors='replace')}"


async def _whole(answer: Any) -> bytes:
    return b"".join([part async for part in answer])


def around(text: str) -> str | None:
    """What stands around the marker, if it is there."""
    place = text.lower().find(HIDDEN)
    return None if place < 0 else text[max(0, place - 160) : place + 80]


def report(found: Mapping[str, object]) -> str:
    return "\n".join(f"{where}: {text!r}" for where, text in found.items())


def paths_of_the_api(things: Mapping[str, object]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and description of every operation, with things in the place of parameters."""
    for path, operations in api.get_openapi_schema()["paths"].items():
        for method, described in operations.items():
            yield method, _PARAMETER.sub(lambda one: f"{one[1]}/{things[one[1]]}", path), described


def clients(
    people: People, browser_of: Callable[..., Client], api_of: Callable[..., Client]
) -> dict[str, tuple[Client | None, Client]]:
    """A browser and a token of each role; and of tokens that are confined."""
    found = {role: (browser_of(getattr(people, role)), api_of(getattr(people, role))) for role in ROLES}
    # Somebody with a role on the platform, whom a token confines to the org.
    return {**found, "confined": (None, api_of(people.platform_admin, org=people.acme))}


# What may be sent, by the end of an address, so that it is answered with more than a refusal. All of it
# changes nothing, or is taken back.
def bodies(scene: Scene) -> dict[str, dict[str, Any]]:
    own = scene.own.by_place
    policy = {"policy": {"ttl_last_use_seconds": 60}, "reason": "r"}
    plan = {"boxes": 2, "wait_seconds": 0}
    return {
        "/explain": {"request": "r-7"},
        "/policy:preview": policy,
        "/policy": policy,
        "/restore": {"reason": "r"},
        "/scheduled": {**policy, "starts_at": "2099-01-01T00:00:00Z"},
        "/purge": {"reason": "r"},
        "/policies/bulk": {"orgs": [scene.own.org], "changes": {"share": 3}, "reason": "r"},
        "/workloads": {"spec": {**SPEC, "org": scene.own.org}},
        f"/workloads/{OWN}-workload": {"patch": {"replicas": 3}},
        "/scale": {"replicas": 1},
        "/sessions": {"name": "new", "org": scene.own.org, **plan},
        "/resize": plan,
        "/jobs": {"name": "new", "driver": f"{OWN}-driver"},
        "/move": {"stream": f"{OWN}-driver.full.0", "node": own["nodes"]},
        "/restore-rails": {},
        "/members/" + str(own["members"]): {"role": "viewer"},
        "/session-rules": {"path": "prefer_rail", "boxes_quota": None},
    }


SPEC: Final = {
    "name": "new",
    "model": "new",
    "tokens_max": 99,
    "engine": {"kind": "emulator"},
}
HEADERS: Final = {"Idempotency-Key": "k-1", "If-Match": "*"}


def send(client: Client, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
    return client.generic(
        method.upper(),
        path,
        data="" if body is None else json.dumps(body),
        content_type="application/json",
        headers=HEADERS,
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("role", [*ROLES, "confined"])
def test_nobody_reads_anything_of_another_org_anywhere(
    role: str,
    scene: Scene,
    people: People,
    browser_of: Callable[..., Client],
    api_of: Callable[..., Client],
) -> None:
    """Every page and every operation of the API, as somebody who names only what is theirs."""
    Operation.objects.filter(target=f"session:{OWN}-session").delete()  # so that changes are planned
    own, told, statuses = scene.own.by_place, {}, {}
    said = bodies(scene)
    browser, client = clients(people, browser_of, api_of)[role]
    if browser is not None:
        for path in addresses(own).values():
            for query in ("", f"?org={scene.own.org}&topic=org:{scene.own.org}&request=r-7&far=1&q=r-7"):
                told[f"{role} GET {path}{query}"] = text_of(browser.get(f"{path}{query}"))
    for method, path, described in paths_of_the_api(own):
        queries = [""]
        if method == "get":
            names = {one["name"] for one in described.get("parameters", []) if one["in"] == "query"}
            if "topic" in names:
                queries += [f"?topic={topic}" for topic in own_topics(scene)]
            if names & {"q", "whose", "state"}:
                queries.append("?q=r-7&far=true&whose=administered&state=all&hidden=true")
        elif "validate_only" in json.dumps(described.get("parameters", [])):
            queries.append("?validate_only=true")
        ending = next((end for end in said if path.endswith(end)), None)
        for query in queries:
            with taken_back():
                answer = send(client, method, f"{path}{query}", said.get(ending or "", {}))
                told[f"{role} {method} {path}{query}"] = text_of(answer)
                statuses[role, method, path, query] = answer.status_code
    leaks = {where: found for where, text in told.items() if (found := around(text))}
    assert not leaks, report(leaks)
    assert not [key for key, status in statuses.items() if status >= 500]
    if role in ("org_admin", "confined"):
        planned = [key for key, status in statuses.items() if "only" in key[-1] and status == 200]
        assert planned, "plans were shown, and so were looked at"


def test_a_drain_that_moves_our_streams_is_not_named_to_us(
    scene: Scene, people: People, api_of: Callable[..., Client]
) -> None:
    Operation.objects.filter(target=f"session:{OWN}-session").delete()
    # No workload, a job on its box, and a free box: so that the drain is all that it waits for.
    Workload.objects.filter(session__name=f"{OWN}-session").update(session=None)
    job = Job.objects.get(name=f"{OWN}-job")
    JobBox.objects.create(job=job, session_box=job.session.boxes.get())
    make_box(f"{OWN}-box2")
    with transaction.atomic():
        drain_that_moves_ours()
    client, path = api_of(people.org_admin), f"/api/v1/sessions/{OWN}-session/resize?validate_only=true"
    refused = send(client, "post", path, {"boxes": 2})
    assert refused.json()["reason"] == "InProgress", refused.json()["detail"]
    assert "An operation on the fleet" in refused.json()["detail"]
    assert around(text_of(refused)) is None


def own_topics(scene: Scene) -> list[str]:
    return [f"org:{scene.own.org}", f"session:{scene.own.by_place['sessions']}"]


def test_their_own_people_see_all_of_it(
    scene: Scene, people: People, browser_of: Callable[..., Client], api_of: Callable[..., Client]
) -> None:
    """The other side of the same: what is hidden above is there, and is shown to whom it belongs."""
    org, session = scene.hidden.org, scene.hidden.by_place["sessions"]
    people.stranger.refresh_from_db()
    theirs, platform = api_of(people.stranger), api_of(people.platform_viewer)
    for path in (
        f"/api/v1/orgs/{org}",
        f"/api/v1/sessions/{session}/streams",
        f"/api/v1/slowest?topic=org:{org}",
        "/api/v1/alerts",
        f"/api/v1/orgs/{org}/policy/versions",
    ):
        assert HIDDEN in theirs.get(path).content.decode(), path
    explained = send(theirs, "post", f"/api/v1/orgs/{org}/explain", {"request": "r-7"}).json()
    named = {one["driver"]: one for one in explained["answers"]}
    assert named.keys() == {f"{HIDDEN}-driver", ""}, "theirs by name, and one that is none of theirs"
    assert named[f"{HIDDEN}-driver"]["homes"][0]["link"] == f"{HIDDEN}-link"
    assert (named[""]["model"], named[""]["homes"]) == ("", [])
    why = platform.get(f"/api/v1/sessions/{OWN}-session/streams").json()["items"][0]["why"]
    assert why.startswith(f"{HIDDEN}-node"), "who runs the fleet sees what keeps a stream from its rail"
    seen = platform.get(f"/api/v1/operations/{scene.own.by_place['operations']}").json()
    assert f"{HIDDEN}-node2" in seen["progress"]["message"]


@pytest.mark.timeout(400)
def test_what_is_hidden_is_as_what_is_not_there(
    scene: Scene, people: People, browser_of: Callable[..., Client], api_of: Callable[..., Client]
) -> None:
    """Every address that names a thing of the other org answers as one that names nothing."""
    hidden = scene.hidden.by_place
    nothing: dict[str, object] = {place: _nothing(value) for place, value in hidden.items()}
    differ = {}
    for role, (browser, client) in clients(people, browser_of, api_of).items():
        pairs: list[tuple[str, Client, str, str, Any]] = []
        if browser is not None:
            unreal_of = addresses(nothing)
            pairs = [
                ("GET", browser, real, unreal_of[name], None)
                for name, real in addresses(hidden).items()
                if real != unreal_of[name]
            ]
        for (method, real, _), (_, unreal, _) in zip(
            paths_of_the_api(hidden), paths_of_the_api(nothing), strict=True
        ):
            body = next((one for end, one in bodies(scene).items() if real.endswith(end)), {})
            if real != unreal:
                pairs.append((method, client, real, unreal, body))
        for method, by, real, unreal, body in pairs:
            with taken_back():
                one = text_of(send(by, method, real, body))
            with taken_back():
                other = text_of(send(by, method, unreal, body))
            found, wanted = (_plain(text, things) for text, things in ((one, hidden), (other, nothing)))
            if found != wanted:
                differ[f"{role} {method} {real}"] = (found[:400], wanted[:400])
    assert not differ, report(differ)


@pytest.mark.timeout(400)
def test_a_question_that_names_what_is_hidden_is_answered_as_if_it_named_nothing(
    scene: Scene, people: People, api_of: Callable[..., Client]
) -> None:
    """Every query of every list and chart, and every name in a body: by kinds of names."""
    client = api_of(people.org_admin)
    hidden = scene.hidden.by_place
    nothing = {place: _nothing(value) for place, value in hidden.items()}
    differ = {}
    for method, path, described in paths_of_the_api(scene.own.by_place):
        asked = [one for one in described.get("parameters", []) if one["in"] == "query"]
        for name in [one["name"] for one in asked if _takes_names(one)] if method == "get" else ():
            for form in TOPICS if name in ("topic", "target") else NAMES:
                texts = [
                    _plain(text_of(client.get(f"{path}?{name}={quote(form.format(**things))}")), things)
                    for things in (hidden, nothing)
                ]
                if texts[0] != texts[1]:
                    differ[f"{path}?{name}={form}"] = (texts[0][-300:], texts[1][-300:])
    session = scene.own.by_place["sessions"]
    for path, body in (
        (f"/api/v1/sessions/{session}/jobs", {"name": "new", "driver": "{drivers}"}),
        (f"/api/v1/sessions/{session}/jobs?validate_only=true", {"name": "new", "driver": "{drivers}"}),
        (f"/api/v1/sessions/{session}/move", {"stream": f"{OWN}-driver.full.0", "node": "{nodes}"}),
        (f"/api/v1/orgs/{scene.own.org}/explain", {"request": "r", "session": "{sessions}"}),
        (f"/api/v1/orgs/{scene.own.org}/purge", {"model": f"{HIDDEN}-model", "reason": "r"}),
        ("/api/v1/policies/bulk", {"orgs": ["{orgs}"], "changes": {}, "reason": "r"}),
        ("/api/v1/tokens", {"name": "t", "org": "{orgs}", "days": 1}),
        ("/api/v1/alerts/bulk", {"verb": "acknowledge", "alerts": ["{alerts}"]}),
        ("/api/v1/hand-over/notes", {"org": "{orgs}", "text": "hm"}),
    ):
        texts = []
        for things in (hidden, nothing):
            filled = _filled(body, things)
            if things is nothing and "model" in filled:
                filled = {**filled, "model": f"{NEVER}-model"}
            with taken_back():
                texts.append(_plain(text_of(send(client, "post", path, filled)), things))
        if texts[0] != texts[1]:
            differ[path] = (texts[0][-400:], texts[1][-400:])
    assert not differ, report(differ)


TOPICS: Final = ("org:{orgs}", "session:{sessions}", "driver:{drivers}")
NAMES: Final = ("{orgs}", "{sessions}", "{users}")


def _takes_names(parameter: Mapping[str, Any]) -> bool:
    schemas = [parameter["schema"], *parameter["schema"].get("anyOf", [])]
    formed = ("enum", "const", "format")
    texts = [one for one in schemas if one.get("type") == "string" and not one.keys() & set(formed)]
    return bool(texts) and parameter["name"] not in ("cursor", "start", "end", "since", "until")


def _filled(value: Any, things: Mapping[str, object]) -> Any:
    match value:
        case str() if value.startswith("{"):
            return things[value.strip("{}")]
        case list():
            return [_filled(one, things) for one in value]
        case dict():
            return {name: _filled(one, things) for name, one in value.items()}
    return value


def _nothing(value: object) -> object:
    """Of the same kind, and of nothing that there is."""
    if isinstance(value, int):
        return 7_654_321 if value > 1 else value
    text = str(value)
    if HIDDEN in text:
        return text.replace(HIDDEN, NEVER)
    if re.fullmatch(r"[0-9a-f]{8}-[0-9a-f-]{27}", text):
        return "01990000-0000-7000-8000-00000000dead"
    return text if not re.search(r"\d", text) else "0000000dead0"[: len(text)]


def _plain(text: str, things: Mapping[str, object]) -> str:
    """An answer without the names that were asked for, and without what is new in each."""
    text = re.sub(r"Content-Length: \d+", "", _NOISE.sub("", text))
    for value in sorted(map(str, things.values()), key=len, reverse=True):
        if len(value) > 2:
            text = text.replace(value, "<it>")
    return text.replace(HIDDEN, "<it>").replace(NEVER, "<it>")


# Live


def test_live_topics_of_others_are_as_if_they_were_not_there(scene: Scene, people: People) -> None:
    for role in ROLES:
        principal = principal_of(people, role)
        for place, name in scene.hidden.by_place.items():
            for kind in ("org", "session", "node", "driver", "agent"):
                assert not access.may_see(principal, f"{kind}:{name}"), (role, place, kind)
        assert all(access.may_see(principal, topic) for topic in own_topics(scene))


def test_live_frames_of_ones_own_tell_of_nobody_else(scene: Scene) -> None:
    """Frames are made once for all viewers of a topic, so they are made for those who may see least."""
    reading = read(Wanted(None, begin=own_topics(scene)))
    text = json.dumps(
        [[list(feed.events), feed.numbers, feed.state] for feed in reading.begun.values()], default=str
    )
    assert OWN in text, "there were events"
    assert around(text) is None


def principal_of(people: People, role: str) -> Principal:
    return people.principal(role)
