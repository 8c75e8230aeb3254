"""Nothing answers 500 to bad input: every page, with what nobody should send."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

from console.accounts.models import NAME_RULE, User
from console.orgs.models import SLUG_RULE
from tests.conftest import People
from tests.console.alerts.things import make_alert, make_channel
from tests.console.fleet.worlds import make_world

BAD = ["%00", "%FF%FE", "%ED%A0%80", "x" * 10_000, "%0d%0aX-Injected:%201", "../../etc/passwd", "9" * 40]
PATHS = [
    "/{}",
    "/?org={}",
    "/routing/?org={}",
    "/search/?q={}",
    "/hand-over/?org={0}&hours={0}",
    "/api/v1/hand-over?org={0}&hours={0}",
    "/api/v1/search?q={0}&most={0}",
    "/api/v1/overview?org={}",
    "/log-in/?next={}",
    "/users/{}/",
    "/orgs/{}/",
    "/orgs/{}/edit/",
    "/orgs/{}/policy/",
    "/orgs/acme/policy/?model={0}&template={0}",
    "/orgs/acme/policy/history/?page={}",
    "/orgs/acme/retention/?days={}",
    "/orgs/acme/retention/report.csv?days={}",
    "/policies/?q={0}&page={0}",
    "/policies/bulk/?org={0}",
    "/audit/{}/",
    "/audit/?q={0}&actor={0}&action={0}&org={0}&request_id={0}&since={0}&until={0}&page={0}",
    "/audit/export.csv?q={0}&org={0}&since={0}",
    "/alerts/?q={0}&state={0}&severity={0}&rule={0}&org={0}&topic={0}&hidden={0}&page={0}",
    "/alerts/{}/",
    "/alerts/history/?days={}",
    "/api/v1/alert-statistics?days={}",
    "/alerts/silences/?matchers={0}&org={0}",
    "/alerts/rules/{}/",
    "/alerts/rules/evict-slow/?org={}",
    "/alerts/channels/{}/",
    "/api/v1/alerts?q={0}&state={0}&rule={0}&org={0}&topic={0}&cursor={0}",
    "/api/v1/alert-rules/{0}?org={0}",
    "/operations/?target={0}&kind={0}&done={0}&page={0}",
    "/api/v1/sessions?org={0}&waiting={0}&cursor={0}",
    "/api/v1/sessions/{}",
    "/sessions/?page={}",
    "/sessions/{}/",
    "/sessions/{}/resize/",
    "/sessions/{}/restore-rails/",
    "/orgs/{}/session-rules/",
    "/workloads/?q={0}&org={0}&ready={0}&page={0}",
    "/workloads/{}/",
    "/workloads/{}/edit/",
    "/workloads/{0}/revisions/1/?with={0}",
    "/api/v1/workloads?org={0}&q={0}&ready={0}&cursor={0}",
    "/api/v1/workloads/{}",
    "/operations/{}/",
    "/api/v1/operations?target={0}&kind={0}&done={0}&cursor={0}",
    "/api/v1/operations/{}",
    "/tokens/?x={}",
    "/latency/?topic={0}&range={0}&from={0}&until={0}",
    "/latency/?topic=fleet&range={0}",
    "/latency/events/?topic={0}",
    "/orgs/{}/explain/",
    "/views/?of={}",
    "/orgs/acme/explain/?request={0}&session={0}",
    "/latency/slowest/?topic={0}&direction={0}&most={0}",
    "/latency/slowest/?topic=fleet&from={0}&until={0}",
    "/dead-letters/?cause={0}&source={0}&page={0}",
    "/api/v1/dead-letters?cause={0}&source={0}&cursor={0}",
    "/api/v1/dead-letters/counts?days={0}",
    "/api/v1/slowest?topic=fleet&direction={0}&start={0}&seconds_max={0}",
    "/latency/?topic=fleet&from={0}&until={0}",
    "/api/v1/live?topic={0}&since={0}",
    "/fleet/?stamp={}",
    "/fleet/nodes/{}/",
    "/fleet/nodes/?q={0}&state={0}&stamp={0}&leaf={0}&label={0}&page={0}",
    "/fleet/boxes/?q={0}&page={0}",
    "/fleet/drivers/?q={0}&page={0}",
    "/api/v1/nodes?q={0}&state={0}&stamp={0}&leaf={0}&label={0}",
    "/static/{}",
    "/api/v1/orgs/{}",
    "/api/v1/audit?q={0}&org={0}&cursor={0}&since={0}&limit={0}",
    "/api/v1/audit/{}",
]
FORMS = {
    "/fleet/nodes/ax-1/state/": "state={0}&reason={0}",
    "/fleet/nodes/ax-1/labels/": "labels={0}&version={0}&reason={0}",
    "/fleet/join/": "kind={0}&note={0}&uses={0}&hours={0}",
    "/fleet/join/0123456789ab/revoke/": "x={0}",
    "/fleet/description/": "yaml={0}&file={0}&seen={0}&reason={0}&apply={0}",
    "/log-in/": "username={0}&password={0}&next={0}",
    "/account/password/": "current={0}&new={0}&again={0}",
    "/tokens/": "name={0}&scope={0}&org={0}&days={0}",
    "/tokens/0123456789ab/revoke/": "x={0}",
    "/new-user/": "username={0}&full_name={0}&email={0}&platform_role={0}&reason={0}",
    "/hand-over/": "text={0}&org={0}",
    "/alerts/bulk/": "verb={0}&alert={0}&username={0}&hours={0}&reason={0}&query={0}",
    "/users/vic/": "full_name={0}&email={0}&platform_role={0}&is_active={0}&reason={0}",
    "/alerts/silences/": "org={0}&matchers={0}&hours={0}&reason={0}",
    "/alerts/rules/evict-slow/": "objective_seconds={0}&enabled={0}&reason={0}",
    "/alerts/new-channel/": "name={0}&kind={0}&org={0}&address={0}&secret={0}&matchers={0}",
    "/alerts/7000000/acknowledge/": "reason={0}",
    "/alerts/7000000/": "text={0}",
    "/alerts/7000000/assign/": "username={0}",
    "/alerts/channels/7000000/": "name={0}&address={0}&secret={0}&min_severity={0}&matchers={0}",
    "/new-org/": "slug={0}&name={0}&reason={0}",
    "/orgs/acme/edit/": "name={0}&reason={0}",
    "/orgs/acme/delete/": "typed={0}&reason={0}",
    "/orgs/acme/policy/": (
        "ttl_last_use_seconds={0}&ttl_first_use_seconds={0}&tiers={0}&dram_bytes_max={0}&share={0}"
        "&priority={0}&displacement={0}&reason={0}&version={0}&model={0}&starts_at={0}&lasts={0}"
    ),
    "/orgs/acme/policy/preview/": "ttl_last_use_seconds={0}&tiers={0}&model={0}&starts_at={0}",
    "/orgs/acme/policy/model/": "model={0}",
    "/orgs/acme/policy/model/drop/": "model={0}",
    "/orgs/acme/policy/0/restore/": "reason={0}",
    "/orgs/acme/callers/": "name={0}",
    "/orgs/acme/purge/": "typed={0}&reason={0}&model={0}",
    "/policies/bulk/": "org=acme&ttl_last_use_seconds={0}&tiers={0}&reason={0}&token={0}&save=",
    "/policies/default/": "default-tiers={0}&limits-share_max={0}&reason={0}&version={0}",
    "/new-session/": "name={0}&org={0}&boxes={0}&path={0}&kib_per_token={0}&wait_minutes={0}"
    "&plan_token={0}&reason={0}",
    "/session-rules/": "path={0}&boxes_min={0}&boxes_increment={0}&boxes_max={0}&grant_percent={0}"
    "&replace_lost_after_seconds={0}"
    "&wait_for_rail_seconds={0}&reason={0}",
    "/orgs/acme/members/": "username={0}&role={0}&reason={0}",
}


@pytest.mark.slow
@pytest.mark.parametrize("bad", BAD, ids=lambda value: value[:12])
def test_no_address_answers_500(bad: str, people: People, browser_of: Callable[[User], Client]) -> None:
    browser = browser_of(people.platform_admin)
    statuses = {path: browser.get(path.format(bad)).status_code for path in PATHS}
    assert all(status < 500 for status in statuses.values()), statuses


@pytest.mark.slow
@pytest.mark.parametrize("bad", BAD, ids=lambda value: value[:12])
def test_no_form_answers_500(bad: str, people: People, browser_of: Callable[[User], Client]) -> None:
    make_world()
    browser = browser_of(people.platform_admin)
    make_alert("evict-slow", "org:acme", people.acme, pk=7_000_000)
    make_channel("pager", "http://127.0.0.1:9/hook", pk=7_000_000)
    statuses = {
        path: browser.post(
            path, body.format(bad), content_type="application/x-www-form-urlencoded"
        ).status_code
        for path, body in FORMS.items()
    }
    assert all(status < 500 for status in statuses.values()), statuses


@pytest.mark.parametrize(
    ("path", "field", "rule"),
    [
        ("/new-org/", "slug", SLUG_RULE),
        ("/new-session/", "name", SLUG_RULE),
        ("/new-user/", "username", NAME_RULE),
    ],
)
def test_a_form_says_what_a_name_may_be(
    path: str, field: str, rule: str, people: People, browser_of: Callable[[User], Client]
) -> None:
    page = browser_of(people.platform_admin).post(path, {field: "Mine!"})
    assert rule in page.content.decode()


@pytest.mark.parametrize(
    ("path", "field", "rule"),
    [("/orgs", "slug", SLUG_RULE), ("/models", "name", NAME_RULE)],
)
def test_the_api_says_what_a_name_may_be(
    path: str, field: str, rule: str, people: People, browser_of: Callable[[User], Client]
) -> None:
    """And not which regular expression it does not match."""
    answer = browser_of(people.platform_admin).post(
        f"/api/v1{path}", {field: "Mine!"}, content_type="application/json"
    )
    errors = {item["pointer"]: item["detail"] for item in answer.json()["errors"]}
    assert errors[f"/body/{field}"] == rule
