"""Policies over REST: who overwrites whom, plans that hold or do not, and what is refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.accounts.models import User
from console.audit.models import AuditEntry
from console.control.models import Change, Target
from console.fleet.models import Driver
from console.orgs.models import Org
from console.policies import services
from console.policies.desired import orgs
from console.policies.documents import ClusterPolicies, Limits
from console.policies.evidence import reports
from console.policies.models import PolicyVersion
from console.sessions.changes.sizes import new_session
from console.sessions.models import Job
from swdriver_shim.cache.displacement.competition import Choice, Standing
from swdriver_shim.cache.reasons import Tally
from swdriver_shim.cache.reuse.sample import Recorder, Sample
from swdriver_shim.policy import Policy
from tests.conftest import People
from tests.console.control.drivers import join
from tests.html import compact

pytestmark = pytest.mark.django_db
POLICY = "/api/v1/orgs/acme/policy"


@pytest.fixture
def olga(people: People, api_of: Callable[..., Client]) -> Client:
    return api_of(people.org_admin)


def put(client: Client, body: dict[str, Any], match: str = "*", key: str = "k", query: str = "") -> Any:
    headers = {"If-Match": match, "Idempotency-Key": key}
    whole = {"reason": "asked for", **body}
    return client.put(f"{POLICY}{query}", whole, content_type="application/json", headers=headers)


def preview(client: Client, policy: dict[str, Any] | None) -> Any:
    return client.post(f"{POLICY}:preview", {"policy": policy}, content_type="application/json")


def test_a_policy_is_read_changed_and_read_again(olga: Client) -> None:
    before = olga.get(POLICY)
    assert (before["ETag"], before.json()["follows_default"]) == ('"0"', True)
    body = {"policy": {"ttl_last_use_seconds": 600}, "models": {"llama": {"tiers": "none"}}}
    answer = put(olga, body, match=before["ETag"])
    assert answer.status_code == 200, answer.content
    assert answer["ETag"] == '"1"'
    found = olga.get(POLICY).json()
    assert found["policy"]["ttl_last_use_seconds"] == 600
    assert found["models"]["llama"]["tiers"] == "none"
    assert found["in_words"].startswith("Prompts are stored in memory only for 10 min ")
    assert (found["author"], found["reason"]) == ("olga by token test", "asked for")
    assert found["applied"] == {"drivers": 0, "has_it": 0, "seconds": None, "lagging": []}
    [version] = olga.get(f"{POLICY}/versions").json()["items"]
    assert version == olga.get(f"{POLICY}/versions/1").json()


def test_redundancy_in_tier_2_is_read_previewed_saved_and_restored(
    olga: Client, people: People, browser_of: Callable[..., Client]
) -> None:
    assert olga.get(POLICY).json()["policy"]["redundant_from_priority"] is None
    wanted = {"tiers": "dram+tier2", "redundant_from_priority": 0}
    label = "Redundant in tier 2 from priority"
    assert preview(olga, wanted).status_code == 200
    assert put(olga, {"policy": wanted}).status_code == 200
    assert put(olga, {"policy": {"redundant_from_priority": 101}}, key="wrong").status_code == 422
    assert put(olga, {"policy": {}}, key="without").status_code == 200
    assert olga.get(POLICY).json()["policy"]["redundant_from_priority"] is None
    headers = {"Idempotency-Key": "back", "If-Match": '"2"'}
    path = f"{POLICY}/versions/1/restore"
    back = olga.post(path, {"reason": "so"}, content_type="application/json", headers=headers)
    assert back.status_code == 200, back.content
    assert olga.get(POLICY).json()["effective"]["redundant_from_priority"] == 0
    olga_at_the_page = browser_of(people.org_admin)
    page = olga_at_the_page.get("/orgs/acme/policy/").content.decode()
    assert label in page
    form = {"version": 3, "ttl_last_use_seconds": "1 h", "tiers": "dram+tier2", "share": 100}
    form |= {"priority": 35, "displacement": "default", "model": "", "reason": "by hand"}
    olga_at_the_page.post("/orgs/acme/policy/", form | {"redundant_from_priority": "60"})
    assert olga.get(POLICY).json()["policy"]["redundant_from_priority"] == 60
    olga_at_the_page.post("/orgs/acme/policy/", form | {"version": 4, "redundant_from_priority": ""})
    assert olga.get(POLICY).json()["policy"]["redundant_from_priority"] is None


def test_drivers_of_another_org_are_counted_and_named_to_the_platform_s_own_people_only(
    people: People, api_of: Callable[..., Client], browser_of: Callable[..., Client]
) -> None:
    for org in (people.acme, people.globex):
        session = new_session(f"of-{org.slug}", org, 1)
        session.save()
        driver = join(f"{org.slug}-chat", "http://127.0.0.1:9")
        Job.objects.create(session=session, name="chat", driver=driver)
        Target.objects.create(
            kind="driver", name=driver.name, generation=1, problem=f"it is {org.slug}'s"
        )

    def lagging(user: User) -> list[tuple[str, str]]:
        found = api_of(user).get(POLICY).json()["applied"]["lagging"]
        return [(one["driver"], one["why"]) for one in found]

    own = ("acme-chat", "it is acme's")
    assert lagging(people.viewer) == lagging(people.org_admin) == [own, ("", "")]
    assert lagging(people.platform_admin) == [own, ("globex-chat", "it is globex's")]
    for page in ("", "policy/", "policy/reach/"):
        shown = browser_of(people.org_admin).get(f"/orgs/acme/{page}").content.decode()
        assert "acme-chat" in shown
        assert "globex" not in shown
    Driver.objects.filter(name="globex-chat").update(lost_at=timezone.now())
    assert len(lagging(people.platform_admin)) == 2, "it may be back any time, with its job"


def test_limits_that_changed_are_applied_once_drivers_have_heard_of_them(
    people: People, olga: Client
) -> None:
    put(olga, {"policy": {"ttl_last_use_seconds": 3600}})
    join("one", "http://127.0.0.1:9")
    Target.objects.create(kind="driver", name="one", generation=1, observed_generation=1)

    def heard() -> None:
        last = Change.objects.latest("pk").pk
        Target.objects.filter(name="one").update(change=last, observed_change=last)

    def told() -> tuple[int, int, int]:
        found = olga.get(POLICY).json()
        report = reports.report(people.acme, 1)
        effective = found["effective"]["ttl_last_use_seconds"]
        return effective, found["applied"]["has_it"], report.drivers_up_to_date

    heard()
    assert told() == (3600, 1, 1)
    default, limits = Policy(ttl_last_use_seconds=60), Limits(ttl_last_use_seconds_max=60)
    shorter = ClusterPolicies(default=default, limits=limits)
    services.set_cluster(people.principal("platform_admin"), shorter, reason="a contract")
    assert told() == (60, 0, 0)
    heard()
    assert told() == (60, 1, 1)


def test_nobody_overwrites_what_they_have_not_seen(olga: Client) -> None:
    put(olga, {"policy": {"share": 1}}, match='"0"')
    late = put(olga, {"policy": {"share": 2}}, match='"0"', key="k2")
    assert (late.status_code, late["ETag"]) == (412, '"1"')
    assert late.json()["reason"] == "StaleVersion"
    headers = {"Idempotency-Key": "k3"}
    bare = olga.put(POLICY, {"policy": {}}, content_type="application/json", headers=headers)
    assert bare.status_code == 428


def test_sent_twice_it_is_done_once(olga: Client) -> None:
    first = put(olga, {"policy": {"share": 1}}, match='"0"')
    again = put(olga, {"policy": {"share": 1}}, match='"0"')
    assert again["Idempotency-Replayed"] == "true"
    assert again.content == first.content
    assert put(olga, {"policy": {"share": 2}}, match='"0"').status_code == 422
    counts = PolicyVersion.objects.count(), AuditEntry.objects.filter(action="policy.set").count()
    assert counts == (1, 1)


def test_a_dry_run_changes_nothing_and_gives_the_token_to_do_it(olga: Client) -> None:
    dry = put(olga, {"policy": {"share": 1}}, query="?validate_only=true").json()
    assert (dry["version"], dry["policy"]["share"]) == (1, 1)
    assert (PolicyVersion.objects.count(), Change.objects.count()) == (0, 0)
    done = put(olga, {"policy": {"share": 1}, "plan_token": dry["plan_token"]}, match='"0"')
    assert done.status_code == 200


@pytest.mark.parametrize("moved", ["policy", "limits", "another", "made up"])
def test_a_plan_is_refused_when_the_world_has_moved(
    moved: str, olga: Client, people: People, api_of: Callable[..., Client]
) -> None:
    token = preview(olga, {"share": 1}).json()["plan_token"]
    wanted = {"share": 1}
    if moved == "policy":
        put(olga, {"policy": {"share": 3}}, key="meanwhile")
    elif moved == "limits":
        api_of(people.platform_admin).put(
            "/api/v1/policies/cluster",
            {"default": {}, "limits": {"priority_max": 90}, "reason": "contract"},
            content_type="application/json",
            headers={"If-Match": "*", "Idempotency-Key": "c"},
        )
    elif moved == "another":
        wanted = {"share": 2}
    else:
        token = "x"
    late = put(olga, {"policy": wanted, "plan_token": token})
    assert (late.status_code, late.json()["reason"]) == (412, "StalePlan")
    assert late.json()["detail"].endswith((".", "again."))


@contextmanager
def driver_with(sample: Sample) -> Iterator[None]:
    """A driver that has this sample of the org's traffic."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = msgspec.json.encode(sample)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        join("odd", f"http://127.0.0.1:{server.server_address[1]}")
        yield
        server.shutdown()


def test_a_driver_whose_sample_makes_no_sense_is_named_and_breaks_nothing(olga: Client) -> None:
    """One of another version, say. What it is told of is half a log."""
    numbers = dict.fromkeys(("requests", "requested", "columns", "hit", "held_bytes", "room_bytes"), 1)
    sample = Sample(
        org="acme",
        now=1.0,
        complete=True,
        stride=1,
        threshold=1,
        column_bytes=64,
        displacement=None,
        log=b"\x00",
        **numbers,
    )
    with driver_with(sample):
        told = preview(olga, {"ttl_last_use_seconds": 60})
    assert told.status_code == 200, told.content
    assert (told.json()["drivers_silent"], told.json()["traffic"]) == (1, False)


def test_the_displacement_policy_that_the_traffic_has_chosen_is_shown_with_its_reasons(
    olga: Client, people: People, browser_of: Callable[..., Client]
) -> None:
    recorder, tally = Recorder(), Tally()
    recorder.matched([bytes(16)], 0, tally, 1.0)
    standings = (Standing("cost", 0.25), Standing("arc", 0.5))
    sample = Sample(
        org="acme",
        now=1.0,
        complete=True,
        stride=recorder.share.stride,
        threshold=recorder.share.threshold,
        requests=1,
        requested=64,
        columns=1,
        hit=0,
        held_bytes=64,
        room_bytes=64,
        column_bytes=64,
        displacement=Choice(in_use="arc", seconds=600.0, standings=standings),
        log=recorder.log,
    )
    with driver_with(sample):
        told = preview(olga, {"ttl_last_use_seconds": 60}).json()
        page = compact(browser_of(people.org_admin).get("/orgs/acme/policy/"))
        staff_page = compact(browser_of(people.platform_admin).get("/orgs/acme/policy/"))
    [chosen] = told["displacement"]
    assert (chosen["in_use"], chosen["seconds"]) == ("arc", 600.0)
    rates = {one["policy"]: one["hit_rate"] for one in chosen["standings"]}
    assert rates == {"cost": 0.25, "arc": 0.5}
    assert "for 10 min" in page
    assert "Displacement policies that compete" in page
    assert "at least 1.0 % more hits there, and more than 2 standard errors of noise" in page
    assert chosen["driver"] is None, "it is of no session of the org's"
    assert "of another session" in page
    assert 'data-label="Driver">odd<' in staff_page
    assert re.search(r"cost .{0,20}25.{0,40}arc .{0,20}50", page)


def test_a_preview_without_traffic_says_so(olga: Client) -> None:
    told = preview(olga, {"ttl_last_use_seconds": 60}).json()
    assert (told["traffic"], told["proposed"]["hit_rate"], told["drivers"]) == (False, None, 0)


def test_an_earlier_version_is_restored_byte_for_byte(olga: Client) -> None:
    put(olga, {"policy": {"share": 1}}, key="a")
    put(olga, {"policy": {"share": 2}}, key="b")
    answer = olga.post(
        f"{POLICY}/versions/1/restore",
        {"reason": "as before"},
        content_type="application/json",
        headers={"If-Match": '"2"', "Idempotency-Key": "c"},
    )
    assert answer.status_code == 200, answer.content
    first, third = (PolicyVersion.objects.get(number=number) for number in (1, 3))
    assert (third.document.encode(), third.same_as) == (first.document.encode(), 1)


def test_limits_are_told_with_the_field(
    olga: Client, people: People, api_of: Callable[..., Client]
) -> None:
    body = {
        "default": {"ttl_last_use_seconds": 60},
        "limits": {"ttl_last_use_seconds_max": 600},
        "reason": "contract",
    }
    headers = {"If-Match": "*", "Idempotency-Key": "c"}
    admin = api_of(people.platform_admin)
    done = admin.put("/api/v1/policies/cluster", body, content_type="application/json", headers=headers)
    assert (done.status_code, done["ETag"]) == (200, '"1"')
    for answer in (
        put(olga, {"policy": {"ttl_last_use_seconds": 3600}}),
        preview(olga, {"ttl_last_use_seconds": 3600}),
    ):
        assert answer.status_code == 422
        [error] = answer.json()["errors"]
        assert error["pointer"] == "/body/policy/ttl_last_use_seconds"
        assert "At most 10 min from the last use" in error["detail"]


@pytest.mark.parametrize(
    "body",
    [
        {"policy": {"ttl_last_use_seconds": 0}},
        {"policy": {"ttl_last_use_seconds": True}},
        {"policy": {"unknown": 1}},
        {"policy": []},
        {"policy": None, "models": {"llama": {}}},
        {"policy": {}, "models": {"": {}}},
        {"policy": {}, "reason": " "},
        {"policy": {}, "reason": "\x00"},
        {"policy": {}, "plan_token": "\n"},
    ],
)
def test_what_is_no_policy_is_422(body: dict[str, Any], olga: Client) -> None:
    answer = put(olga, body)
    assert answer.status_code == 422, answer.content
    assert PolicyVersion.objects.count() == 0


def test_a_callers_token_is_shown_once(olga: Client) -> None:
    made = olga.post("/api/v1/orgs/acme/callers", {"name": "vllm"}, content_type="application/json")
    token = made.json()["token"]
    [listed] = olga.get("/api/v1/orgs/acme/callers").json()["items"]
    assert token.startswith(listed["prefix"])
    assert "token" not in listed
    twice = olga.post("/api/v1/orgs/acme/callers", {"name": "vllm"}, content_type="application/json")
    assert twice.status_code == 422
    [error] = twice.json()["errors"]
    assert error == {"pointer": "/body/name", "detail": "Acme has an API key of this name already."}
    assert olga.delete(f"/api/v1/orgs/acme/callers/{listed['id']}").status_code == 204
    assert olga.get("/api/v1/orgs/acme/callers").json()["items"] == []
    actions = list(AuditEntry.objects.order_by("id").values_list("action", flat=True))
    assert actions[-2:] == ["policy.caller_add", "policy.caller_remove"]
    assert all(token not in str(entry.after) for entry in AuditEntry.objects.all())


@pytest.mark.usefixtures("contexts_of_pages")
def test_a_caller_is_made_and_removed_in_a_browser(
    people: People, browser_of: Callable[..., Client]
) -> None:
    olga, path = browser_of(people.org_admin), "/orgs/acme/callers/"
    made = olga.post(path, {"name": "vllm"})
    token = made.context["token"]
    assert token.encode() in made.content
    assert token.encode() not in olga.get(path).content
    assert b"API key of this name already" in olga.post(path, {"name": "vllm"}).content
    public_id = token.split("_")[1]
    assert olga.post(f"{path}{public_id}/remove/").status_code == 302
    assert b"No keys yet" in olga.get(path).content


def test_a_list_of_policies_takes_as_many_statements_for_many_orgs_as_for_few(
    people: People, browser_of: Callable[..., Client]
) -> None:
    ada = browser_of(people.platform_admin)
    counts = []
    for more in (0, 20):
        Org.objects.bulk_create([Org(slug=f"org-{more}-{n}", name="Org") for n in range(more)])
        with CaptureQueriesContext(connection) as queries:
            assert ada.get("/policies/").status_code == 200
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_what_drivers_are_told_takes_as_many_statements_for_many_orgs_as_for_few(people: People) -> None:
    join("one", "http://127.0.0.1:9")
    orgs()("one")
    counts = []
    for more in (0, 20):
        Org.objects.bulk_create([Org(slug=f"org-{more}-{n}", name="Org") for n in range(more)])
        orgs()("one")  # the new ones get their keys
        with CaptureQueriesContext(connection) as queries:
            told = msgspec.json.decode(orgs()("one")["orgs"])
        counts.append(len(queries))
    assert counts[0] == counts[1]
    assert len(told) == 22
