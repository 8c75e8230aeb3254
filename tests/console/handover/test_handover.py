"""What the next on call is told: what is open, what goes on, what was done, and notes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.audit.models import AuditEntry
from console.fleet.membership import tokens
from console.handover import services
from console.handover.models import Note
from console.operations.models import Operation
from console.operations.services import start
from console.overview.services import overview
from telemetry.events import events_of
from telemetry.topics import FLEET
from tests.conftest import People
from tests.console.alerts.things import make_alert, make_silence
from tests.console.operations import machines  # noqa: F401 - registers them
from tests.html import compact

pytestmark = pytest.mark.django_db
JSON = "application/json"


def leave(client: Client, text: str, org: str | None, key: str = "k") -> int:
    told = {"text": text, "org": org}
    headers = {"Idempotency-Key": key}
    return client.post("/api/v1/hand-over/notes", told, content_type=JSON, headers=headers).status_code


def test_what_is_open_goes_on_ends_soon_and_was_done_and_nothing_of_others(people: People) -> None:
    now = timezone.now()
    for org in (people.acme, people.globex):
        make_alert("refill-slow", f"org:{org.slug}", org)
        over = {"state": "resolved", "state_since": now - timedelta(hours=1)}
        make_alert("evict-slow", f"org:{org.slug}", org, **over)
        long_over = {"state_since": now - timedelta(hours=13), "begun_at": now - timedelta(hours=14)}
        make_alert("hit-rate-drop", f"org:{org.slug}", org, **{**over, **long_over})
        make_silence(["rule=a"], org, ends_at=now + timedelta(hours=30))
        make_silence(["rule=b"], org, ends_at=now + timedelta(hours=2))
        make_silence(["rule=c"], org, ends_at=now - timedelta(seconds=1))
        with transaction.atomic():
            for name in ("going", "ended", "failed"):
                start(SYSTEM, "tests.waits", f"session:{org.slug}-{name}", name, plan={}, org_id=org.pk)
        services.write(SYSTEM, org, f"of {org.slug}")
    ended = {"done": True, "done_at": now}
    Operation.objects.filter(sentence="ended").update(state="succeeded", response={}, **ended)
    why = {"reason": "Worn", "detail": "It did not work."}
    Operation.objects.filter(sentence="failed").update(state="failed", error=why, **ended)
    found = services.hand_over(people.principal("on_call"))
    assert [(alert.subject, silence) for alert, silence in found.open] == [("acme", None)]
    assert [alert.rule for alert in found.over] == ["evict-slow"]
    assert [silence.matchers for silence in found.silences] == [["rule=b"], ["rule=a"]]
    assert found.silences[0].ends_at < found.ends_soon < found.silences[1].ends_at
    assert [one.sentence for one in found.operations] == ["going", "failed"]
    assert [entry.action for entry in found.changes] == ["handover.note"]
    assert [note.text for note in found.notes] == ["of acme"]
    everything = services.hand_over(people.principal("platform_on_call"))
    assert (everything.open_count, everything.change_count, len(everything.notes)) == (2, 2, 2)
    of_one = services.hand_over(people.principal("platform_on_call"), "globex")
    assert [note.text for note in of_one.notes] == ["of globex"]


def test_join_tokens_of_instances_leave_room_for_what_people_did(people: People) -> None:
    soon = timezone.now() + timedelta(hours=1)
    admin = people.principal("platform_admin")
    tokens.issue(admin, kind="node", uses=1, note="rack 7", expires_at=soon)
    made, _ = tokens.issue(SYSTEM, kind="driver", uses=1, workload="chat", expires_at=soon)
    tokens.revoke(SYSTEM, made.public_id)
    assert AuditEntry.objects.count() == 3
    found = services.hand_over(people.principal("platform_on_call"))
    assert [entry.object_name for entry in found.changes] == ["rack 7"]
    assert [entry.object_name for entry in overview(admin).entries] == ["rack 7"]
    assert [event.sentence for event in events_of(FLEET)] == ["Join token rack 7 was created."]


def test_who_is_on_call_leaves_notes_which_are_recorded(
    people: People, api_of: Callable[..., Client], browser_of: Callable[..., Client]
) -> None:
    assert leave(api_of(people.on_call), "power supply at 9", "acme") == 201
    assert leave(api_of(people.viewer), "hm", "acme") == 403
    assert leave(api_of(people.stranger), "hm", "acme") == 404
    assert leave(api_of(people.on_call), "hm", None, key="all") == 403, "of all, by the platform's"
    assert leave(api_of(people.platform_on_call), "the spine", None) == 201
    assert leave(api_of(people.platform_on_call), " ", None, key="blank") == 422
    entries = AuditEntry.objects.filter(action="handover.note").order_by("id")
    assert [(entry.actor_name, entry.after) for entry in entries] == [
        ("carl by token test", {"text": "power supply at 9"}),
        ("otto by token test", {"text": "the spine"}),
    ]
    notes = api_of(people.viewer).get("/api/v1/hand-over/notes").json()["items"]
    assert [note["text"] for note in notes] == ["power supply at 9"]
    browser = browser_of(people.on_call)
    done = browser.post("/hand-over/?hours=8", {"text": "from the page", "org": "acme"})
    assert done["Location"] == "/hand-over/?org=&hours=8#notes"
    assert "from the page" in browser.get("/hand-over/").content.decode()
    assert "from the page" not in browser_of(people.stranger).get("/hand-over/").content.decode()
    assert Note.objects.count() == 3


def test_page_and_api_say_the_same(
    people: People, api_of: Callable[..., Client], browser_of: Callable[..., Client]
) -> None:
    make_alert("refill-slow", "org:acme", people.acme)
    make_silence(["rule=refill-slow"], people.acme)
    told = api_of(people.viewer).get("/api/v1/hand-over?org=acme&hours=24").json()
    assert (told["open_count"], len(told["open"]), len(told["silences"])) == (1, 1, 1)
    page = compact(browser_of(people.viewer).get("/hand-over/?org=acme&hours=24"))
    assert "Open alerts: 1" in page
    assert "silenced until" in page
    assert "Add note" not in page
    assert 'data-live-topic="org:acme"' in page
    everything = browser_of(people.platform_on_call).get("/hand-over/").content.decode()
    assert 'data-live-topic="fleet"' in everything
    assert "Add note" in everything
    live = browser_of(people.platform_on_call).get("/hand-over/", headers={"HX-Request": "true"})
    assert "Open alerts: 1" in live.content.decode()
    assert "<form" not in live.content.decode(), "what is being written stays"


def test_it_takes_as_many_queries_however_much_there_is(people: People) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            services.hand_over(people.principal("platform_admin"))
        return len(captured)

    make_alert("refill-slow", "org:acme", people.acme)
    services.write(SYSTEM, people.acme, "x")
    few = queries()
    for number in range(5):
        make_alert("agent-not-reporting", f"node:ax-{number}")
        make_silence([f"node=ax-{number}"])
        services.write(SYSTEM, people.acme, "x")
    assert queries() == few
