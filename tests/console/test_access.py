"""Who may call which route: every route, six kinds of people, held against one table.

A route that is not in the table fails the test, so none is ever forgotten. Numbers are statuses:
200/204/201 done, 302 sent on (for pages: to where it was done), 401/login not known, 403 known but
may not, 404 must not even learn that it exists, 4xx others: permitted, but the sample request is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from django.conf import settings
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from pytest_django import DjangoDbBlocker

from console.accounts.models import ApiToken, User
from console.accounts.principal import SYSTEM
from console.api.middleware import ADDRESSES
from console.audit.models import AuditEntry
from console.control.models import Target
from console.environment import PROJECT
from console.fleet.models import Brain, Driver
from console.operations.services import start
from console.orgs import services
from console.orgs.services import for_change
from console.policies import callers
from console.policies import services as policies
from console.sessions.changes.sizes import new_session
from console.sessions.models import QUOTAS, Job
from swdriver_shim.policy import OrgPolicies, Policy
from tests.conftest import People, issue_token, make_people
from tests.console.alerts.things import make_alert, make_channel, make_silence
from tests.console.control.drivers import join
from tests.console.fleet.worlds import make_world, new_token
from tests.console.operations import machines  # noqa: F401 - registers them
from tests.console.routing.brains import a_model, a_replica
from tests.console.workloads.workloads import a_workload, an_instance

KINDS = ("anonymous", "stranger", "viewer", "on_call", "org_admin", "platform_admin")


@dataclass(frozen=True)
class Case:
    method: str
    path: str
    expected: tuple[object, ...]  # by kind; see KINDS
    body: dict[str, object] | None = None
    headers: dict[str, str] | None = None


LOGIN = "login"


def everyone(status: object) -> tuple[object, ...]:
    return (status,) * 6


def known(status: object) -> tuple[object, ...]:
    return (LOGIN, *((status,) * 5))


def api_known(status: object) -> tuple[object, ...]:
    return (401, *((status,) * 5))


IDEMPOTENT = {"Idempotency-Key": "k-1"}
ANY = {"If-Match": "*"}
# The fleet: nothing to those without a role on the platform. Of the six only the platform admin has one.
FLEET = (LOGIN, 404, 404, 404, 404, 200)
API_FLEET = (401, 404, 404, 404, 404, 200)
NODE = {
    "control_url": "http://10.0.0.7:8410",
    "data_address": "tcp:10.0.0.7:8411",
    "software_version": "0.1.0",
    "protocol_min": 1,
    "protocol_max": 2,
    "memory_bytes": 1,
    "cpus": 1,
}
DRIVER = {"control_url": "http://10.0.0.9:8420", "software_version": "0.1.0"}
OWN: dict[str, object] = {"control_token": "t" * 20}
QUESTION = "name=swdriver_refill_seconds&fold=p99"
SESSION = (LOGIN, 404, 200, 200, 200, 200)
API_SESSION = (401, 404, 200, 200, 200, 200)
API_SESSION_CHANGE = (401, 404, 403, 403, 202, 202)
RULES = {
    "path": "prefer_rail",
    "refuse_spine": False,
    "wait_for_rail_seconds": 0,
    "boxes_min": 1,
    "boxes_increment": 1,
}

PAGES = {
    "home": Case("GET", "/", known(200)),
    "login": Case("GET", "/log-in/", (200, 302, 302, 302, 302, 302)),
    "logout": Case("POST", "/log-out/", everyone(302)),
    "account": Case("GET", "/account/", known(200)),
    "password": Case("GET", "/account/password/", known(200)),
    "tokens": Case("GET", "/tokens/", known(200)),
    "tokens-administered": Case("GET", "/tokens/administered/", (LOGIN, 200, 403, 403, 200, 200)),
    "token-revoke": Case("POST", "/tokens/0123456789ab/revoke/", known(404)),
    "users": Case("GET", "/users/", (LOGIN, 403, 403, 403, 403, 200)),
    "user-new": Case("GET", "/new-user/", (LOGIN, 403, 403, 403, 403, 200)),
    "user": Case("GET", "/users/vic/", (LOGIN, 403, 403, 403, 403, 200)),
    "user-revoke-credentials": Case(
        "POST", "/users/vic/revoke-credentials/", (LOGIN, 403, 403, 403, 403, 302)
    ),
    "user-reset": Case("POST", "/users/vic/reset-password/", (LOGIN, 403, 403, 403, 403, 200)),
    "orgs": Case("GET", "/orgs/", known(200)),
    "org-new": Case("GET", "/new-org/", (LOGIN, 403, 403, 403, 403, 200)),
    "org": Case("GET", "/orgs/acme/", (LOGIN, 404, 200, 200, 200, 200)),
    "org-edit": Case("GET", "/orgs/acme/edit/", (LOGIN, 404, 403, 403, 200, 200)),
    "org-delete": Case("POST", "/orgs/acme/delete/", (LOGIN, 404, 403, 403, 403, 302)),
    "org-member": Case(
        "POST", "/orgs/acme/members/", (LOGIN, 404, 403, 403, 302, 302), {"username": "sam", "role": 1}
    ),
    "org-member-remove": Case(
        "POST", "/orgs/acme/members/vic/remove/", (LOGIN, 404, 403, 403, 302, 302)
    ),
    "sessions": Case("GET", "/sessions/", known(200)),
    "session-new": Case("GET", "/new-session/", (LOGIN, 200, 403, 403, 200, 200)),
    "session": Case("GET", "/sessions/chat/", SESSION),
    "session-resize": Case("GET", "/sessions/chat/resize/", (LOGIN, 404, 403, 403, 200, 200)),
    "session-delete": Case("POST", "/sessions/chat/delete/", (LOGIN, 404, 403, 403, 302, 302)),
    "session-job-new": Case("GET", "/sessions/chat/new-job/", (LOGIN, 404, 403, 403, 200, 200)),
    "session-job-end": Case("POST", "/sessions/chat/jobs/serve/end/", (LOGIN, 404, 403, 403, 404, 404)),
    "session-move": Case("POST", "/sessions/chat/move/", (LOGIN, 404, 403, 302, 302, 302)),
    "session-restore-rails": Case(
        "GET", "/sessions/chat/restore-rails/", (LOGIN, 404, 403, 200, 200, 200)
    ),
    "session-rules": Case("GET", "/session-rules/", FLEET),
    "org-session-rules": Case("GET", "/orgs/acme/session-rules/", SESSION),
    "node-drain": Case("GET", "/fleet/nodes/ax-1/drain/", (LOGIN, 404, 404, 404, 404, 200)),
    "box-drain": Case("POST", "/fleet/boxes/cs-1/drain/", (LOGIN, 404, 404, 404, 404, 302)),
    "fleet-box-state": Case(
        "POST", "/fleet/boxes/cs-1/state/", (LOGIN, 404, 404, 404, 404, 302), {"state": "cordoned"}
    ),
    "node-upgrade": Case("POST", "/fleet/nodes/ax-1/upgrade/", (LOGIN, 404, 404, 404, 404, 302)),
    "operations": Case("GET", "/operations/", known(200)),
    "operation": Case("GET", "/operations/{operation}/", (LOGIN, 404, 200, 200, 200, 200)),
    "operation-cancel": Case(
        "POST", "/operations/{operation}/cancel/", (LOGIN, 404, 403, 302, 302, 302)
    ),
    "operation-retry": Case("POST", "/operations/{operation}/retry/", (LOGIN, 404, 403, 302, 302, 302)),
    "latency": Case("GET", "/latency/?topic=org:acme", (LOGIN, 404, 200, 200, 200, 200)),
    "explain": Case("GET", "/orgs/acme/explain/", (LOGIN, 404, 200, 200, 200, 200)),
    "views": Case("GET", "/views/", known(200)),
    "view-delete": Case("POST", "/views/7000000/delete/", known(404)),
    "latency-slowest": Case("GET", "/latency/slowest/?topic=org:acme", (LOGIN, 404, 200, 200, 200, 200)),
    "latency-events": Case("GET", "/latency/events/?topic=org:acme", (LOGIN, 404, 200, 200, 200, 200)),
    "fleet": Case("GET", "/fleet/", FLEET),
    "fleet-nodes": Case("GET", "/fleet/nodes/", FLEET),
    "fleet-node": Case("GET", "/fleet/nodes/ax-1/", FLEET),
    "fleet-node-state": Case(
        "POST",
        "/fleet/nodes/ax-1/state/",
        (LOGIN, 404, 404, 404, 404, 302),
        {"state": "cordoned", "reason": ""},
    ),
    "fleet-node-labels": Case(
        "POST", "/fleet/nodes/ax-1/labels/", FLEET, {"labels": "rack%3D7", "version": 99}
    ),
    "fleet-node-drain-store": Case(
        "POST", "/fleet/nodes/ax-1/stores/1/drain/", (LOGIN, 404, 404, 404, 404, 404)
    ),
    "fleet-boxes": Case("GET", "/fleet/boxes/", FLEET),
    "fleet-box": Case("GET", "/fleet/boxes/cs-1/", FLEET),
    "fleet-drivers": Case("GET", "/fleet/drivers/", FLEET),
    "fleet-driver": Case("GET", "/fleet/drivers/job-7/", FLEET),
    # To a daemon's page, which says that it has no claims.
    "fleet-driver-claims": Case("GET", "/fleet/drivers/job-7/claims/", (LOGIN, 404, 404, 404, 404, 302)),
    "fleet-driver-remove": Case("GET", "/fleet/drivers/job-7/remove/", (LOGIN, 404, 404, 404, 404, 200)),
    "fleet-driver-orgs": Case("GET", "/fleet/drivers/job-7/orgs/", (LOGIN, 404, 404, 404, 404, 200)),
    "fleet-join": Case("GET", "/fleet/join/", FLEET),
    "fleet-join-token-revoke": Case(
        "POST", "/fleet/join/{join_token}/revoke/", (LOGIN, 404, 404, 404, 404, 302)
    ),
    "fleet-authority": Case("GET", "/fleet/authority/", (LOGIN, 404, 404, 404, 404, 200)),
    "fleet-authority-rotate": Case("POST", "/fleet/authority/rotate/", (LOGIN, 404, 404, 404, 404, 302)),
    "fleet-description": Case("GET", "/fleet/description/", FLEET),
    "fleet-export": Case("GET", "/fleet/description/fleet.yaml", FLEET),
    "audit": Case("GET", "/audit/", known(200)),
    "audit-csv": Case("GET", "/audit/export.csv", known(200)),
    "audit-entry": Case("GET", "/audit/{entry}/", (LOGIN, 404, 404, 200, 200, 200)),
    "audit-undo": Case("POST", "/audit/{entry}/undo/", (LOGIN, 404, 404, 403, 302, 302)),
    "policy": Case("GET", "/orgs/acme/policy/", (LOGIN, 404, 200, 200, 200, 200)),
    "policy-preview": Case("POST", "/orgs/acme/policy/preview/", (LOGIN, 404, 403, 403, 200, 200)),
    "policy-reach": Case("GET", "/orgs/acme/policy/reach/", (LOGIN, 404, 200, 200, 200, 200)),
    "policy-model": Case(
        "POST", "/orgs/acme/policy/model/", (LOGIN, 404, 403, 403, 302, 302), {"model": "llama"}
    ),
    "policy-model-drop": Case(
        "POST", "/orgs/acme/policy/model/drop/", (LOGIN, 404, 403, 403, 404, 404), {"model": "llama"}
    ),
    "policy-default": Case("POST", "/orgs/acme/policy/default/", (LOGIN, 404, 403, 403, 302, 302)),
    "policy-history": Case("GET", "/orgs/acme/policy/history/", (LOGIN, 404, 200, 200, 200, 200)),
    "policy-restore": Case("POST", "/orgs/acme/policy/0/restore/", (LOGIN, 404, 403, 403, 302, 302)),
    "policy-unschedule": Case(
        "POST", "/orgs/acme/policy/scheduled/1/take-back/", (LOGIN, 404, 403, 403, 404, 404)
    ),
    "retention": Case("GET", "/orgs/acme/retention/", (LOGIN, 404, 403, 200, 200, 200)),
    "retention-csv": Case("GET", "/orgs/acme/retention/report.csv", (LOGIN, 404, 403, 200, 200, 200)),
    "retention-json": Case("GET", "/orgs/acme/retention/report.json", (LOGIN, 404, 403, 200, 200, 200)),
    "purge": Case("POST", "/orgs/acme/purge/", (LOGIN, 404, 403, 403, 200, 200)),
    "callers": Case("GET", "/orgs/acme/callers/", (LOGIN, 404, 403, 403, 200, 200)),
    "caller-remove": Case(
        "POST", "/orgs/acme/callers/0123456789ab/remove/", (LOGIN, 404, 403, 403, 404, 404)
    ),
    "policies": Case("GET", "/policies/", known(200)),
    "org-limits": Case("GET", "/orgs/acme/limits/", (LOGIN, 404, 200, 200, 200, 200)),
    "routing": Case("GET", "/routing/?org=acme", (LOGIN, 404, 200, 200, 200, 200)),
    "routing-models": Case("GET", "/routing/models/", FLEET),
    "routing-model-new": Case("GET", "/routing/new-model/", FLEET),
    "routing-model": Case("GET", "/routing/models/chat/", FLEET),
    "routing-model-edit": Case("GET", "/routing/models/chat/edit/", FLEET),
    "routing-model-remove": Case(
        "POST", "/routing/models/chat/remove/", (LOGIN, 404, 404, 404, 404, 302), {"typed": "chat"}
    ),
    "routing-replica-new": Case("GET", "/routing/models/chat/new-replica/", FLEET),
    "routing-replica": Case("GET", "/routing/models/chat/replicas/chat-1/", FLEET),
    "routing-replica-drain": Case(
        "POST", "/routing/models/chat/replicas/chat-1/drain/", (LOGIN, 404, 404, 404, 404, 302)
    ),
    "routing-replica-remove": Case(
        "POST", "/routing/models/chat/replicas/chat-1/remove/", (LOGIN, 404, 404, 404, 404, 302)
    ),
    "routing-brains": Case("GET", "/routing/brains/", FLEET),
    "routing-brain": Case("GET", "/routing/brains/east/", FLEET),
    "routing-brain-remove": Case(
        "POST", "/routing/brains/east/remove/", (LOGIN, 404, 404, 404, 404, 302), {"typed": "east"}
    ),
    "policies-bulk": Case("GET", "/policies/bulk/?org=acme", (LOGIN, 404, 403, 403, 200, 200)),
    "policies-cluster": Case("GET", "/policies/default/", (LOGIN, 403, 403, 403, 403, 200)),
    "hand-over": Case("GET", "/hand-over/?org=acme", (LOGIN, 404, 200, 200, 200, 200)),
    "search": Case("GET", "/search/?q=acme", known(200)),
    "health": Case("GET", "/-/health", everyone(200)),
    "health-live": Case("GET", "/-/health/live", everyone(200)),
    "versions": Case("GET", "/-/versions", (401, 200, 200, 200, 200, 200)),
    "metrics": Case("GET", "/metrics", (401, 403, 403, 403, 403, 200)),
    "dead-letters": Case("GET", "/dead-letters/", (LOGIN, 403, 403, 403, 403, 200)),
    "design": Case("GET", "/-/design", known(200)),
}
API = {
    ("GET", "openapi.json"): Case("GET", "/api/v1/openapi.json", everyone(200)),
    ("GET", "docs"): Case("GET", "/api/v1/docs", everyone(200)),
    ("GET", ""): Case("GET", "/api/v1/", everyone(404)),
    ("GET", "overview"): Case("GET", "/api/v1/overview?org=acme", (401, 404, 200, 200, 200, 200)),
    ("GET", "search"): Case("GET", "/api/v1/search?q=acme", api_known(200)),
    ("GET", "hand-over"): Case("GET", "/api/v1/hand-over?org=acme", (401, 404, 200, 200, 200, 200)),
    ("GET", "hand-over/notes"): Case("GET", "/api/v1/hand-over/notes", api_known(200)),
    ("POST", "hand-over/notes"): Case(
        "POST",
        "/api/v1/hand-over/notes",
        (401, 404, 403, 201, 201, 201),
        {"org": "acme", "text": "all is well"},
        IDEMPOTENT,
    ),
    ("GET", "me"): Case("GET", "/api/v1/me", api_known(200)),
    ("GET", "tokens"): Case("GET", "/api/v1/tokens", api_known(200)),
    ("POST", "tokens"): Case("POST", "/api/v1/tokens", api_known(201), {"name": "bot"}),
    ("DELETE", "tokens/<public_id>"): Case("DELETE", "/api/v1/tokens/0123456789ab", api_known(404)),
    ("DELETE", "users/<username>/credentials"): Case(
        "DELETE", "/api/v1/users/vic/credentials", (401, 403, 403, 403, 403, 200)
    ),
    ("GET", "orgs"): Case("GET", "/api/v1/orgs", api_known(200)),
    ("POST", "orgs"): Case(
        "POST",
        "/api/v1/orgs",
        (401, 403, 403, 403, 403, 201),
        {"slug": "initech", "name": "Initech"},
        IDEMPOTENT,
    ),
    ("GET", "orgs/<slug>"): Case("GET", "/api/v1/orgs/acme", (401, 404, 200, 200, 200, 200)),
    ("PATCH", "orgs/<slug>"): Case(
        "PATCH", "/api/v1/orgs/acme", (401, 404, 403, 403, 200, 200), {"name": "Acme Inc"}, ANY
    ),
    ("DELETE", "orgs/<slug>"): Case(
        # It has a session.
        "DELETE",
        "/api/v1/orgs/acme",
        (401, 404, 403, 403, 403, 409),
        None,
        {**ANY, **IDEMPOTENT},
    ),
    ("GET", "orgs/<slug>/members"): Case(
        "GET", "/api/v1/orgs/acme/members", (401, 404, 200, 200, 200, 200)
    ),
    ("PUT", "orgs/<slug>/members/<username>"): Case(
        "PUT", "/api/v1/orgs/acme/members/vic", (401, 404, 403, 403, 200, 200), {"role": "on-call"}
    ),
    ("DELETE", "orgs/<slug>/members/<username>"): Case(
        "DELETE", "/api/v1/orgs/acme/members/vic", (401, 404, 403, 403, 204, 204)
    ),
    ("GET", "dead-letters"): Case("GET", "/api/v1/dead-letters", (401, 403, 403, 403, 403, 200)),
    ("GET", "dead-letters/counts"): Case(
        "GET", "/api/v1/dead-letters/counts", (401, 403, 403, 403, 403, 200)
    ),
    ("GET", "metrics"): Case("GET", "/api/v1/metrics", api_known(200)),
    ("GET", "metrics/query"): Case(
        "GET", f"/api/v1/metrics/query?topic=org:acme&{QUESTION}", (401, 404, 200, 200, 200, 200)
    ),
    ("GET", "orgs/<slug>/requests"): Case(
        "GET", "/api/v1/orgs/acme/requests", (401, 404, 200, 200, 200, 200)
    ),
    ("POST", "orgs/<slug>/explain"): Case(
        "POST", "/api/v1/orgs/acme/explain", (401, 404, 200, 200, 200, 200), {"request": "r-7"}
    ),
    ("GET", "views"): Case("GET", "/api/v1/views", api_known(200)),
    ("POST", "views"): Case(
        "POST",
        "/api/v1/views",
        (401, 404, 201, 201, 201, 201),
        {"name": "Refills", "address": "/latency/", "share": "org:acme"},
    ),
    ("DELETE", "views/<number>"): Case("DELETE", "/api/v1/views/7000000", api_known(404)),
    ("GET", "slowest"): Case("GET", "/api/v1/slowest?topic=org:acme", (401, 404, 200, 200, 200, 200)),
    ("GET", "metrics/query.csv"): Case(
        "GET", f"/api/v1/metrics/query.csv?topic=fleet&{QUESTION}", (401, 404, 404, 404, 404, 200)
    ),
    ("GET", "live"): Case("GET", "/api/v1/live?topic=org:acme", (401, 404, 200, 200, 200, 200)),
    ("GET", "events"): Case("GET", "/api/v1/events?topic=org:acme", (401, 404, 200, 200, 200, 200)),
    ("GET", "operations"): Case("GET", "/api/v1/operations", api_known(200)),
    ("GET", "operations/<operation_id>"): Case(
        "GET", "/api/v1/operations/{operation}", (401, 404, 200, 200, 200, 200)
    ),
    ("DELETE", "operations/<operation_id>"): Case(
        "DELETE", "/api/v1/operations/{operation}", (401, 404, 403, 202, 202, 202)
    ),
    ("POST", "operations/<operation_id>/retry"): Case(
        "POST", "/api/v1/operations/{operation}/retry", (401, 404, 403, 409, 409, 409)
    ),
    ("GET", "nodes"): Case("GET", "/api/v1/nodes", API_FLEET),
    ("GET", "nodes/<name>"): Case("GET", "/api/v1/nodes/ax-1", API_FLEET),
    ("PUT", "nodes/<name>/state"): Case(
        "PUT", "/api/v1/nodes/ax-1/state", API_FLEET, {"state": "cordoned"}
    ),
    ("PUT", "nodes/<name>/retiring-stores/<store>/drain"): Case(
        "PUT", "/api/v1/nodes/ax-1/retiring-stores/1/drain", (401, 404, 404, 404, 404, 404), {}
    ),
    ("PATCH", "nodes/<name>"): Case(
        "PATCH", "/api/v1/nodes/ax-1", API_FLEET, {"labels": {"rack": "7"}}, ANY
    ),
    # Whoever calls these is known by a join token, or by what follows from its own token.
    ("POST", "nodes/<name>/join"): Case(
        "POST", "/api/v1/nodes/ax-1/join", everyone(401), {**NODE, **OWN}
    ),
    ("POST", "nodes/<name>/heartbeat"): Case(
        "POST", "/api/v1/nodes/ax-1/heartbeat", everyone(401), {**NODE}
    ),
    ("POST", "drivers/<name>/join"): Case(
        "POST", "/api/v1/drivers/job-7/join", everyone(401), {**DRIVER, **OWN}
    ),
    ("POST", "drivers/<name>/heartbeat"): Case(
        "POST", "/api/v1/drivers/job-7/heartbeat", everyone(401), {**DRIVER}
    ),
    ("POST", "brains/<name>/join"): Case(
        "POST", "/api/v1/brains/east/join", everyone(401), {**DRIVER, **OWN}
    ),
    ("POST", "drivers/<name>/erased"): Case(
        "POST", "/api/v1/drivers/job-7/erased", everyone(401), {"erased": True}
    ),
    ("POST", "brains/<name>/heartbeat"): Case(
        "POST", "/api/v1/brains/east/heartbeat", everyone(401), {**DRIVER}
    ),
    ("POST", "brains/<name>/certificate"): Case(
        "POST", "/api/v1/brains/east/certificate", everyone(401), {"certificate_request": "x"}
    ),
    ("GET", "brains"): Case("GET", "/api/v1/brains", API_FLEET),
    ("GET", "brains/<name>"): Case("GET", "/api/v1/brains/east", API_FLEET),
    ("DELETE", "brains/<name>"): Case(
        "DELETE", "/api/v1/brains/east", (401, 404, 404, 404, 404, 204), None, {**ANY, **IDEMPOTENT}
    ),
    ("GET", "models"): Case("GET", "/api/v1/models", API_FLEET),
    ("POST", "models"): Case(
        "POST",
        "/api/v1/models",
        (401, 404, 404, 404, 404, 201),
        {"name": "code", "model": "acme/code", "tokens_max": 4096, "orgs": ["acme"]},
        IDEMPOTENT,
    ),
    ("GET", "models/<name>"): Case("GET", "/api/v1/models/chat", API_FLEET),
    ("PUT", "models/<name>"): Case(
        "PUT",
        "/api/v1/models/chat",
        API_FLEET,
        {"model": "acme/chat", "tokens_max": 4096},
        {**ANY, **IDEMPOTENT},
    ),
    ("DELETE", "models/<name>"): Case(
        "DELETE", "/api/v1/models/chat", (401, 404, 404, 404, 404, 204), None, {**ANY, **IDEMPOTENT}
    ),
    ("POST", "models/<name>/replicas"): Case(
        "POST",
        "/api/v1/models/chat/replicas",
        (401, 404, 404, 404, 404, 201),
        {"name": "chat-2", "url": "http://10.0.0.22:8000"},
        IDEMPOTENT,
    ),
    ("GET", "models/<name>/replicas/<replica>"): Case(
        "GET", "/api/v1/models/chat/replicas/chat-1", API_FLEET
    ),
    ("PATCH", "models/<name>/replicas/<replica>"): Case(
        "PATCH",
        "/api/v1/models/chat/replicas/chat-1",
        API_FLEET,
        {"draining": True},
        {**ANY, **IDEMPOTENT},
    ),
    ("DELETE", "models/<name>/replicas/<replica>"): Case(
        "DELETE",
        "/api/v1/models/chat/replicas/chat-1",
        (401, 404, 404, 404, 404, 204),
        None,
        {**ANY, **IDEMPOTENT},
    ),
    ("GET", "orgs/<slug>/models"): Case(
        "GET", "/api/v1/orgs/acme/models", (401, 404, 200, 200, 200, 200)
    ),
    ("GET", "orgs/<slug>/limits"): Case(
        "GET", "/api/v1/orgs/acme/limits", (401, 404, 200, 200, 200, 200)
    ),
    ("PUT", "orgs/<slug>/limits"): Case(
        "PUT",
        "/api/v1/orgs/acme/limits",
        (401, 404, 403, 403, 403, 200),
        {"weight": 200},
        {**ANY, **IDEMPOTENT},
    ),
    ("POST", "nodes/<name>/certificate"): Case(
        "POST", "/api/v1/nodes/ax-1/certificate", everyone(401), {"certificate_request": "x"}
    ),
    ("POST", "drivers/<name>/certificate"): Case(
        "POST", "/api/v1/drivers/job-7/certificate", everyone(401), {"certificate_request": "x"}
    ),
    ("GET", "authority"): Case("GET", "/api/v1/authority", (401, 404, 404, 404, 404, 200)),
    ("POST", "authority/rotate"): Case(
        "POST", "/api/v1/authority/rotate", (401, 404, 404, 404, 404, 202), {"reason": "because"}
    ),
    ("GET", "boxes"): Case("GET", "/api/v1/boxes", API_FLEET),
    ("GET", "boxes/<name>"): Case("GET", "/api/v1/boxes/cs-1", API_FLEET),
    ("GET", "leaves"): Case("GET", "/api/v1/leaves", API_FLEET),
    ("GET", "leaves/<name>"): Case("GET", "/api/v1/leaves/leaf-1", API_FLEET),
    ("GET", "spine-links"): Case("GET", "/api/v1/spine-links", API_FLEET),
    ("GET", "spine-links/<name>"): Case("GET", "/api/v1/spine-links/leaf-1-up", API_FLEET),
    ("GET", "drivers"): Case("GET", "/api/v1/drivers", API_FLEET),
    ("GET", "targets"): Case("GET", "/api/v1/targets", API_FLEET),
    ("GET", "drivers/<name>"): Case("GET", "/api/v1/drivers/job-7", API_FLEET),
    ("GET", "fleet/description"): Case("GET", "/api/v1/fleet/description", API_FLEET),
    ("PUT", "fleet/description"): Case(
        "PUT", "/api/v1/fleet/description", API_FLEET, {"yaml": "stamps: {}"}, ANY
    ),
    ("GET", "join-tokens"): Case("GET", "/api/v1/join-tokens", API_FLEET),
    ("POST", "join-tokens"): Case(
        "POST", "/api/v1/join-tokens", (401, 404, 404, 404, 404, 201), {"kind": "node"}
    ),
    ("DELETE", "join-tokens/<public_id>"): Case(
        "DELETE", "/api/v1/join-tokens/{join_token}", (401, 404, 404, 404, 404, 204)
    ),
    ("GET", "sessions"): Case("GET", "/api/v1/sessions", api_known(200)),
    ("POST", "sessions"): Case(
        "POST",
        "/api/v1/sessions",
        (401, 404, 403, 403, 202, 202),
        {"name": "new", "org": "acme", "boxes": 1},
        IDEMPOTENT,
    ),
    ("GET", "sessions/<name>"): Case("GET", "/api/v1/sessions/chat", API_SESSION),
    ("DELETE", "sessions/<name>"): Case(
        "DELETE", "/api/v1/sessions/chat", API_SESSION_CHANGE, None, {**ANY, **IDEMPOTENT}
    ),
    ("POST", "sessions/<name>/resize"): Case(
        "POST",
        "/api/v1/sessions/chat/resize",
        API_SESSION_CHANGE,
        {"boxes": 1},
        {**ANY, **IDEMPOTENT},
    ),
    ("GET", "sessions/<name>/jobs"): Case("GET", "/api/v1/sessions/chat/jobs", API_SESSION),
    # There is no such driver, job, stream, or nothing to bring back.
    ("POST", "sessions/<name>/jobs"): Case(
        "POST",
        "/api/v1/sessions/chat/jobs",
        (401, 404, 403, 403, 404, 404),
        {"name": "serve", "driver": "nobody"},
        {**ANY, **IDEMPOTENT},
    ),
    ("DELETE", "sessions/<name>/jobs/<job>"): Case(
        "DELETE",
        "/api/v1/sessions/chat/jobs/serve",
        (401, 404, 403, 403, 404, 404),
        None,
        {**ANY, **IDEMPOTENT},
    ),
    ("GET", "sessions/<name>/streams"): Case("GET", "/api/v1/sessions/chat/streams", API_SESSION),
    ("GET", "sessions/<name>/memory"): Case("GET", "/api/v1/sessions/chat/memory", API_SESSION),
    ("POST", "sessions/<name>/move"): Case(
        "POST",
        "/api/v1/sessions/chat/move",
        (401, 404, 403, 404, 404, 404),
        {"stream": "job7.full.0", "node": "ax-1"},
        {**ANY, **IDEMPOTENT},
    ),
    ("POST", "sessions/<name>/restore-rails"): Case(
        "POST",
        "/api/v1/sessions/chat/restore-rails",
        (401, 404, 403, 409, 409, 409),
        {},
        {**ANY, **IDEMPOTENT},
    ),
    ("POST", "boxes/<name>/drain"): Case(
        "POST", "/api/v1/boxes/cs-1/drain", (401, 404, 404, 404, 404, 202), {}, IDEMPOTENT
    ),
    ("PUT", "boxes/<name>/state"): Case(
        "PUT", "/api/v1/boxes/cs-1/state", (401, 404, 404, 404, 404, 200), {"state": "cordoned"}
    ),
    ("POST", "nodes/<name>/drain"): Case(
        "POST", "/api/v1/nodes/ax-1/drain", (401, 404, 404, 404, 404, 202), {}, IDEMPOTENT
    ),
    ("POST", "nodes/<name>/upgrade"): Case(
        "POST", "/api/v1/nodes/ax-1/upgrade", (401, 404, 404, 404, 404, 202), {}, IDEMPOTENT
    ),
    # That driver is a daemon: no claims are made for it.
    ("GET", "drivers/<name>/claims-key"): Case(
        "GET", "/api/v1/drivers/job-7/claims-key", (401, 404, 404, 404, 404, 409)
    ),
    ("POST", "drivers/<name>/claims-key/rotate"): Case(
        "POST", "/api/v1/drivers/job-7/claims-key/rotate", (401, 404, 404, 404, 404, 409), {}
    ),
    ("POST", "drivers/<name>/claims"): Case(
        "POST", "/api/v1/drivers/job-7/claims", (401, 404, 404, 404, 404, 409), {"org": "acme"}
    ),
    ("POST", "drivers/<name>/remove"): Case(
        "POST", "/api/v1/drivers/job-7/remove", (401, 404, 404, 404, 404, 202), {}, IDEMPOTENT
    ),
    ("GET", "drivers/<name>/orgs"): Case("GET", "/api/v1/drivers/job-7/orgs", API_FLEET),
    ("GET", "drivers/<name>/redundancy"): Case("GET", "/api/v1/drivers/job-7/redundancy", API_FLEET),
    ("PATCH", "drivers/<name>/orgs"): Case(
        "PATCH", "/api/v1/drivers/job-7/orgs", API_FLEET, {"orgs": ["acme"]}, {**ANY, **IDEMPOTENT}
    ),
    ("GET", "session-rules"): Case("GET", "/api/v1/session-rules", API_FLEET),
    ("PUT", "session-rules"): Case("PUT", "/api/v1/session-rules", API_FLEET, RULES, ANY),
    ("GET", "orgs/<slug>/session-rules"): Case("GET", "/api/v1/orgs/acme/session-rules", API_SESSION),
    ("PUT", "orgs/<slug>/session-rules"): Case(
        "PUT", "/api/v1/orgs/acme/session-rules", (401, 404, 403, 403, 200, 200), RULES, ANY
    ),
    ("GET", "audit"): Case("GET", "/api/v1/audit", api_known(200)),
    ("GET", "audit/<entry_id>"): Case("GET", "/api/v1/audit/{entry}", (401, 404, 404, 200, 200, 200)),
    ("POST", "audit/<entry_id>/undo"): Case(
        "POST", "/api/v1/audit/{entry}/undo", (401, 404, 404, 403, 200, 200), {}
    ),
    ("GET", "orgs/<slug>/policy"): Case(
        "GET", "/api/v1/orgs/acme/policy", (401, 404, 200, 200, 200, 200)
    ),
    ("PUT", "orgs/<slug>/policy"): Case(
        "PUT",
        "/api/v1/orgs/acme/policy",
        (401, 404, 403, 403, 200, 200),
        {"policy": {"ttl_last_use_seconds": 60}, "reason": "GDPR"},
        {**ANY, **IDEMPOTENT},
    ),
    ("POST", "orgs/<slug>/policy:preview"): Case(
        "POST",
        "/api/v1/orgs/acme/policy:preview",
        (401, 404, 200, 200, 200, 200),
        {"policy": {"ttl_last_use_seconds": 60}},
    ),
    ("GET", "orgs/<slug>/policy/versions"): Case(
        "GET", "/api/v1/orgs/acme/policy/versions", (401, 404, 200, 200, 200, 200)
    ),
    ("GET", "orgs/<slug>/policy/versions/<number>"): Case(
        "GET", "/api/v1/orgs/acme/policy/versions/1", (401, 404, 404, 404, 404, 404)
    ),
    ("POST", "orgs/<slug>/policy/versions/<number>/restore"): Case(
        "POST",
        "/api/v1/orgs/acme/policy/versions/0/restore",
        (401, 404, 403, 403, 200, 200),
        {"reason": "as before"},
        {**ANY, **IDEMPOTENT},
    ),
    ("GET", "policies/cluster"): Case("GET", "/api/v1/policies/cluster", api_known(200)),
    ("PUT", "policies/cluster"): Case(
        "PUT",
        "/api/v1/policies/cluster",
        (401, 403, 403, 403, 403, 200),
        {"default": {}, "limits": {"priority_max": 50}, "reason": "contract"},
        {**ANY, **IDEMPOTENT},
    ),
    ("GET", "orgs/<slug>/policy/scheduled"): Case(
        "GET", "/api/v1/orgs/acme/policy/scheduled", (401, 404, 200, 200, 200, 200)
    ),
    ("POST", "orgs/<slug>/policy/scheduled"): Case(
        "POST",
        "/api/v1/orgs/acme/policy/scheduled",
        (401, 404, 403, 403, 422, 422),  # it is over
        {"policy": {}, "starts_at": "2020-01-01T00:00:00Z", "reason": "x"},
        IDEMPOTENT,
    ),
    ("DELETE", "orgs/<slug>/policy/scheduled/<number>"): Case(
        "DELETE", "/api/v1/orgs/acme/policy/scheduled/1", (401, 404, 403, 403, 404, 404)
    ),
    ("POST", "policies/bulk"): Case(
        "POST",
        "/api/v1/policies/bulk",
        (401, 404, 403, 403, 200, 200),
        {"orgs": ["acme"], "changes": {"share": 7}, "reason": "x"},
        IDEMPOTENT,
    ),
    ("GET", "orgs/<slug>/retention"): Case(
        "GET", "/api/v1/orgs/acme/retention", (401, 404, 403, 200, 200, 200)
    ),
    ("GET", "orgs/<slug>/purges"): Case(
        "GET", "/api/v1/orgs/acme/purges", (401, 404, 403, 200, 200, 200)
    ),
    ("POST", "orgs/<slug>/purge"): Case(
        "POST", "/api/v1/orgs/acme/purge", (401, 404, 403, 403, 202, 202), {"reason": "x"}, IDEMPOTENT
    ),
    ("GET", "signing-keys"): Case("GET", "/api/v1/signing-keys", everyone(200)),
    ("GET", "orgs/<slug>/callers"): Case(
        "GET", "/api/v1/orgs/acme/callers", (401, 404, 403, 403, 200, 200)
    ),
    ("POST", "orgs/<slug>/callers"): Case(
        "POST", "/api/v1/orgs/acme/callers", (401, 404, 403, 403, 201, 201), {"name": "vllm"}
    ),
    ("DELETE", "orgs/<slug>/callers/<public_id>"): Case(
        "DELETE", "/api/v1/orgs/acme/callers/0123456789ab", (401, 404, 403, 403, 404, 404)
    ),
}

WORKLOAD: dict[str, object] = {
    "name": "code",
    "org": "acme",
    "model": "acme/code",
    "tokens_max": 4096,
    "engine": {"kind": "emulator"},
}
BUCKET_KEY: dict[str, object] = {"access_key_id": "AKIA", "secret_access_key": "none"}
WORKLOAD_FORM: dict[str, object] = {"revision": "1", "typed": "talk"}
OF_ADMINS = (LOGIN, 404, 403, 403, 200, 200)
OF_ON_CALL = (LOGIN, 404, 403, 302, 302, 302)
API_OF_ADMINS = (401, 404, 403, 403, 200, 200)
API_OF_ON_CALL = (401, 404, 403, 200, 200, 200)
PAGES |= {
    "workloads": Case("GET", "/workloads/", known(200)),
    "tokenizer-archive": Case("GET", f"/-/tokenizers/{'0' * 64}/talk-0/wrong", everyone(404)),
    "tokenizers": Case("GET", "/tokenizers/", known(200)),
    "tokenizer-delete": Case("POST", "/tokenizers/7000000/delete/", known(404)),
    "buckets": Case("GET", "/buckets/", known(200)),
    "bucket": Case("GET", "/buckets/7000000/", known(404)),
    "bucket-delete": Case("POST", "/buckets/7000000/delete/", known(404)),
    "workload-new": Case("GET", "/new-workload/", (LOGIN, 200, 403, 403, 200, 200)),
    "workload": Case("GET", "/workloads/talk/", SESSION),
    "workload-edit": Case("GET", "/workloads/talk/edit/", OF_ADMINS),
    "workload-scale": Case("GET", "/workloads/talk/scale/", OF_ADMINS),
    "workload-restart": Case("POST", "/workloads/talk/restart/", OF_ON_CALL),
    "workload-pause": Case("POST", "/workloads/talk/pause/", OF_ON_CALL),
    "workload-resume": Case("POST", "/workloads/talk/resume/", OF_ON_CALL),
    "workload-undo": Case("POST", "/workloads/talk/undo/", OF_ON_CALL, WORKLOAD_FORM),
    "workload-delete": Case(
        "POST", "/workloads/talk/delete/", (LOGIN, 404, 403, 403, 302, 302), WORKLOAD_FORM
    ),
    "workload-revision": Case("GET", "/workloads/talk/revisions/1/", SESSION),
    "workload-instance": Case("GET", "/workloads/talk/instances/talk-0-r1-0000/", SESSION),
}
API |= {
    ("GET", "workloads"): Case("GET", "/api/v1/workloads", api_known(200)),
    ("POST", "workloads"): Case(
        "POST", "/api/v1/workloads", (401, 404, 403, 403, 201, 201), {"spec": WORKLOAD}, IDEMPOTENT
    ),
    ("GET", "workloads/<name>"): Case("GET", "/api/v1/workloads/talk", API_SESSION),
    # It can't be called something else.
    ("PUT", "workloads/<name>"): Case(
        "PUT",
        "/api/v1/workloads/talk",
        (401, 404, 403, 403, 422, 422),
        {"spec": WORKLOAD},
        {**ANY, **IDEMPOTENT},
    ),
    ("PATCH", "workloads/<name>"): Case(
        "PATCH",
        "/api/v1/workloads/talk",
        API_OF_ADMINS,
        {"patch": {"tokens_max": 1024}},
        {**ANY, **IDEMPOTENT},
    ),
    ("DELETE", "workloads/<name>"): Case(
        "DELETE",
        "/api/v1/workloads/talk",
        (401, 404, 403, 403, 202, 202),
        None,
        {**ANY, **IDEMPOTENT},
    ),
    ("POST", "workloads/<name>/scale"): Case(
        "POST",
        "/api/v1/workloads/talk/scale",
        API_OF_ADMINS,
        {"replicas": 1},
        {**ANY, **IDEMPOTENT},
    ),
    **{
        ("POST", f"workloads/<name>/{action}"): Case(
            "POST", f"/api/v1/workloads/talk/{action}", API_OF_ON_CALL, {}, {**ANY, **IDEMPOTENT}
        )
        for action in ("restart", "pause", "resume")
    },
    # It has no earlier one.
    ("POST", "workloads/<name>/undo"): Case(
        "POST",
        "/api/v1/workloads/talk/undo",
        (401, 404, 403, 409, 409, 409),
        {},
        {**ANY, **IDEMPOTENT},
    ),
    # Nobody is here for long enough to have uploaded one, and a body of no bytes is none.
    ("GET", "tokenizers"): Case("GET", "/api/v1/tokenizers", api_known(200)),
    ("POST", "tokenizers"): Case(
        "POST", "/api/v1/tokenizers?name=x&org=acme", (401, 404, 403, 403, 422, 422)
    ),
    ("GET", "tokenizers/<number>"): Case("GET", "/api/v1/tokenizers/7000000", api_known(404)),
    ("DELETE", "tokenizers/<number>"): Case(
        "DELETE",
        "/api/v1/tokenizers/7000000",
        (401, 404, 404, 404, 404, 404),
        None,
        IDEMPOTENT,
    ),
    # Nobody has stored one before.
    ("GET", "buckets"): Case("GET", "/api/v1/buckets", api_known(200)),
    ("POST", "buckets"): Case(
        "POST",
        "/api/v1/buckets",
        (401, 404, 403, 403, 201, 201),
        {"name": "models", "org": "acme", **BUCKET_KEY},
        IDEMPOTENT,
    ),
    ("GET", "buckets/<number>"): Case("GET", "/api/v1/buckets/7000000", api_known(404)),
    ("PUT", "buckets/<number>"): Case(
        "PUT", "/api/v1/buckets/7000000", api_known(404), BUCKET_KEY, {**ANY, **IDEMPOTENT}
    ),
    ("DELETE", "buckets/<number>"): Case(
        "DELETE", "/api/v1/buckets/7000000", api_known(404), None, {**ANY, **IDEMPOTENT}
    ),
    ("GET", "workloads/<name>/revisions/<number>"): Case(
        "GET", "/api/v1/workloads/talk/revisions/1", API_SESSION
    ),
    **{
        ("GET", f"workloads/<name>/{what}"): Case("GET", f"/api/v1/workloads/talk/{what}", API_SESSION)
        for what in ("revisions", "instances", "rollouts", "events")
    },
    # There is no Cluster Server.
    ("GET", "workloads/<name>/logs"): Case(
        "GET",
        "/api/v1/workloads/talk/logs?instance=talk-0-r1-0000",
        (401, 404, 503, 503, 503, 503),
    ),
}

# Of acme: an alert, a silence and a channel of this number, which no sequence reaches.
# Nobody listens where the channel leads.
PAGES |= {
    "alerts": Case("GET", "/alerts/", known(200)),
    "alert": Case("GET", "/alerts/7000000/", (LOGIN, 404, 200, 200, 200, 200)),
    "alert-acknowledge": Case(
        "POST", "/alerts/7000000/acknowledge/", (LOGIN, 404, 403, 302, 302, 302), {"reason": "on it"}
    ),
    "alert-unacknowledge": Case(
        "POST", "/alerts/7000000/unacknowledge/", (LOGIN, 404, 403, 302, 302, 302)
    ),
    "alert-assign": Case(
        "POST", "/alerts/7000000/assign/", (LOGIN, 404, 403, 302, 302, 302), {"username": "carl"}
    ),
    "alert-fix": Case("POST", "/alerts/7000000/fix/", (LOGIN, 404, 403, 404, 404, 404)),  # it has none
    "alerts-bulk": Case(
        "POST",
        "/alerts/bulk/",
        (LOGIN, 404, 403, 302, 302, 302),
        {"verb": "acknowledge", "alert": 7000000},
    ),
    "alert-history": Case("GET", "/alerts/history/", known(200)),
    "alert-silences": Case("GET", "/alerts/silences/", known(200)),
    "alert-silence-end": Case("POST", "/alerts/silences/7000000/end/", (LOGIN, 404, 403, 302, 302, 302)),
    "alert-rules": Case("GET", "/alerts/rules/", known(200)),
    "alert-rule": Case("GET", "/alerts/rules/evict-slow/?org=acme", (LOGIN, 404, 200, 200, 200, 200)),
    "alert-channels": Case("GET", "/alerts/channels/", known(200)),
    "alert-channel-new": Case("GET", "/alerts/new-channel/", (LOGIN, 403, 403, 403, 403, 200)),
    "alert-channel": Case("GET", "/alerts/channels/7000000/", (LOGIN, 404, 200, 200, 200, 200)),
    "alert-channel-test": Case(
        "POST", "/alerts/channels/7000000/test/", (LOGIN, 404, 403, 403, 403, 302)
    ),
    "alert-channel-delete": Case(
        "POST", "/alerts/channels/7000000/delete/", (LOGIN, 404, 403, 403, 403, 302)
    ),
}
API |= {
    ("GET", "alerts"): Case("GET", "/api/v1/alerts", api_known(200)),
    ("GET", "alerts/<alert_id>"): Case("GET", "/api/v1/alerts/7000000", (401, 404, 200, 200, 200, 200)),
    ("POST", "alerts/bulk"): Case(
        "POST",
        "/api/v1/alerts/bulk",
        (401, 404, 403, 200, 200, 200),
        {"verb": "acknowledge", "alerts": [7_000_000]},
        IDEMPOTENT,
    ),
    ("GET", "alert-statistics"): Case("GET", "/api/v1/alert-statistics", api_known(200)),
    ("GET", "alerts/<alert_id>/suggested-fixes"): Case(
        "GET", "/api/v1/alerts/7000000/suggested-fixes", (401, 404, 200, 200, 200, 200)
    ),
    ("POST", "alerts/<alert_id>/acknowledge"): Case(
        "POST", "/api/v1/alerts/7000000/acknowledge", (401, 404, 403, 200, 200, 200), {}
    ),
    ("POST", "alerts/<alert_id>/unacknowledge"): Case(
        "POST", "/api/v1/alerts/7000000/unacknowledge", (401, 404, 403, 200, 200, 200), {}
    ),
    ("POST", "alerts/<alert_id>/comments"): Case(
        "POST", "/api/v1/alerts/7000000/comments", (401, 404, 403, 201, 201, 201), {"text": "hm"}
    ),
    ("PUT", "alerts/<alert_id>/assignee"): Case(
        "PUT", "/api/v1/alerts/7000000/assignee", (401, 404, 403, 200, 200, 200), {"username": "carl"}
    ),
    ("GET", "silences"): Case("GET", "/api/v1/silences", api_known(200)),
    ("POST", "silences"): Case(
        "POST",
        "/api/v1/silences",
        (401, 404, 403, 201, 201, 201),
        {
            "org": "acme",
            "matchers": ["rule=evict-slow"],
            "starts_at": "2099-01-01T00:00:00Z",
            "ends_at": "2099-01-02T00:00:00Z",
            "reason": "planned",
        },
        IDEMPOTENT,
    ),
    ("GET", "silences/<silence_id>"): Case(
        "GET", "/api/v1/silences/7000000", (401, 404, 200, 200, 200, 200)
    ),
    ("DELETE", "silences/<silence_id>"): Case(
        "DELETE", "/api/v1/silences/7000000", (401, 404, 403, 200, 200, 200), None, ANY
    ),
    ("GET", "alert-rules"): Case("GET", "/api/v1/alert-rules", api_known(200)),
    ("GET", "alert-rules/<rule_slug>"): Case(
        "GET", "/api/v1/alert-rules/evict-slow?org=acme", (401, 404, 200, 200, 200, 200)
    ),
    ("PUT", "alert-rules/<rule_slug>/thresholds"): Case(
        "PUT",
        "/api/v1/alert-rules/evict-slow/thresholds?org=acme",
        (401, 404, 403, 403, 200, 200),
        {"values": {"objective_seconds": 0.5}},
        ANY,
    ),
    ("GET", "alert-channels"): Case("GET", "/api/v1/alert-channels", api_known(200)),
    ("POST", "alert-channels"): Case(
        "POST",
        "/api/v1/alert-channels",
        (401, 403, 403, 403, 403, 201),
        {"name": "hook", "kind": "webhook", "address": "http://127.0.0.1:9/x"},
        IDEMPOTENT,
    ),
    ("GET", "alert-channels/<channel_id>"): Case(
        "GET", "/api/v1/alert-channels/7000000", (401, 404, 200, 200, 200, 200)
    ),
    ("PUT", "alert-channels/<channel_id>"): Case(
        "PUT",
        "/api/v1/alert-channels/7000000",
        (401, 404, 403, 403, 403, 200),
        {"name": "new name"},
        ANY,
    ),
    ("DELETE", "alert-channels/<channel_id>"): Case(
        "DELETE", "/api/v1/alert-channels/7000000", (401, 404, 403, 403, 403, 204), None, ANY
    ),
    ("POST", "alert-channels/<channel_id>/test"): Case(
        "POST", "/api/v1/alert-channels/7000000/test", (401, 404, 403, 403, 403, 200)
    ),
    ("GET", "alert-channels/<channel_id>/notifications"): Case(
        "GET", "/api/v1/alert-channels/7000000/notifications", (401, 404, 200, 200, 200, 200)
    ),
}

# A question that is too long for an address.
BY_PROCESSES = ("/join", "/heartbeat", "/certificate", "/erased")
ASKS = {("POST", "orgs/<slug>/policy:preview"), ("POST", "orgs/<slug>/explain")}
# What people change; agents and drivers come with something else than tokens of users.
CHANGES = [
    (method, path)
    for method, path in API
    if method != "GET" and not path.endswith(BY_PROCESSES)
    if method != "GET" and not path.endswith(BY_PROCESSES) and (method, path) not in ASKS
]


def routes(patterns: list[URLPattern | URLResolver]) -> set[str]:
    """The names of the pages, and the paths of the API below /api/v1/."""
    names = set()
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            names |= {f"api:{inner.pattern}" for inner in pattern.url_patterns}
        else:
            names.add(str(pattern.name))
    return names


def test_every_route_is_in_the_table() -> None:
    in_table = set(PAGES) | {f"api:{path}" for _, path in API}
    found = {re.sub("<(str|uuid):", "<", name) for name in routes(get_resolver(ADDRESSES).url_patterns)}
    assert found == in_table


def test_every_method_of_the_api_is_in_the_table() -> None:
    from console.api.v1 import api

    documented = {
        (method.upper(), path.removeprefix("/api/v1/").replace("{", "<").replace("}", ">"))
        for path, operations in api.get_openapi_schema()["paths"].items()
        for method in operations
    }
    hidden = {("GET", "openapi.json"), ("GET", "docs"), ("GET", "")}
    assert documented == set(API) - hidden


@dataclass(frozen=True)
class Scene:
    """What all tests find: people, things of acme's, and who has logged in or has a token."""

    people: People
    names: dict[str, object]  # what stands in the paths of the tables
    cookies: dict[str, str]  # by kind of people, of their browsers
    tokens: dict[str, str]

    def browser(self, kind: str) -> Client:
        client = Client()
        if kind != "anonymous":
            client.cookies[settings.SESSION_COOKIE_NAME] = self.cookies[kind]
        return client

    def api(self, kind: str) -> Client:
        if kind == "anonymous":
            return Client()
        return Client(headers={"authorization": f"Bearer {self.tokens[kind]}"})


@pytest.fixture(scope="module")
def scene(rows_of_module: None, django_db_blocker: DjangoDbBlocker) -> Scene:
    with django_db_blocker.unblock():
        people = make_people()
        names: dict[str, object] = {
            "entry": change(people),
            "operation": operation(people),
            "join_token": fleet_and_token(),
        }
        new_session("chat", people.acme, 1).save()  # which has no box of that fleet yet
        an_instance(a_workload(people.acme))
        make_alert("evict-slow", "org:acme", people.acme, pk=7_000_000)
        make_silence(["rule=evict-slow"], people.acme, pk=7_000_000)
        make_channel("pager", "http://127.0.0.1:9/hook", people.acme, pk=7_000_000)
        known = [kind for kind in KINDS if kind != "anonymous"]
        cookies = {kind: cookie(getattr(people, kind)) for kind in known}
        return Scene(
            people, names, cookies, {kind: issue_token(getattr(people, kind)) for kind in known}
        )


def change(people: People) -> int:
    """One of acme's that can be undone."""
    with transaction.atomic():
        admin = people.principal("platform_admin")
        services.update_org(admin, for_change(admin, "acme"), name="Acme Ltd")
    return AuditEntry.objects.latest("id").pk


def operation(people: People) -> str:
    """One of acme's, which is running."""
    with transaction.atomic():
        begun = start(SYSTEM, "tests.waits", "session:other", "Wait", plan={}, org_id=people.acme.pk)
    return str(begun.pk)


def fleet_and_token() -> str:
    """A fleet, and a token to join it with."""
    make_world()
    Driver.objects.create(name="job-7")
    a_replica(a_model())
    Brain.objects.create(name="east")
    return new_token().public_id


def cookie(user: User) -> str:
    """Of a browser in which they have logged in."""
    client = Client()
    client.force_login(user)
    return client.cookies[settings.SESSION_COOKIE_NAME].value


@pytest.fixture
def people(db: None, scene: Scene) -> People:
    return scene.people


@pytest.fixture
def names(db: None, scene: Scene) -> dict[str, object]:
    return scene.names


@contextmanager
def taken_back() -> Iterator[None]:
    """Whatever is changed in here: the next one finds all as it was."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


@pytest.mark.parametrize("name", PAGES)
def test_pages(
    name: str,
    scene: Scene,
    db: None,
) -> None:
    case = PAGES[name]
    answers: dict[str, object] = {}
    for kind in KINDS:
        with taken_back():
            response = scene.browser(kind).generic(
                case.method,
                case.path.format(**scene.names),
                data="&".join(f"{key}={value}" for key, value in (case.body or {}).items()),
                content_type="application/x-www-form-urlencoded",
            )
        is_log_in = response.headers.get("Location", "").startswith("/log-in/?next=")
        answers[kind] = LOGIN if is_log_in and response.status_code == 302 else response.status_code
    assert answers == dict(zip(KINDS, case.expected, strict=True))


@pytest.mark.parametrize("route", API, ids=" ".join)
def test_api(
    route: tuple[str, str],
    scene: Scene,
    db: None,
) -> None:
    case = API[route]
    answers: dict[str, object] = {}
    for kind in KINDS:
        with taken_back():
            response = scene.api(kind).generic(
                case.method,
                case.path.format(**scene.names),
                data="" if case.body is None else json.dumps(case.body),
                content_type="application/json",
                headers=case.headers or {},
            )
        answers[kind] = response.status_code
    assert answers == dict(zip(KINDS, case.expected, strict=True))


# Docs of roles

HELD = {
    "org": {"viewer": "viewer", "on-call": "on_call", "org admin": "org_admin"},
    "platform": {
        "viewer": "platform_viewer",
        "on-call": "platform_on_call",
        "platform admin": "platform_admin",
    },
}
# Of these the samples are of what is not there, and so nobody is refused.
UNTOLD = {
    ("DELETE", "tokens/<public_id>"),
    ("DELETE", "views/<number>"),
    ("DELETE", "tokenizers/<number>"),
    ("PUT", "buckets/<number>"),
    ("DELETE", "buckets/<number>"),
}


def told(case: Case, scene: Scene, token: str) -> tuple[int, str]:
    """The status of an answer, and the sentence of a refusal. Nothing is changed."""
    with taken_back():
        response = Client(headers={"authorization": f"Bearer {token}"}).generic(
            case.method,
            case.path.format(**scene.names),
            data="" if case.body is None else json.dumps(case.body),
            content_type="application/json",
            headers=case.headers or {},
        )
    refusal = response.json()["detail"] if response.status_code >= 400 else ""
    return response.status_code, refusal


def least_role(case: Case, scene: Scene, tokens: dict[str, str], scope: str) -> str:
    """The first role of an org, or of the platform, that may do it."""
    not_there = told(case, scene, tokens["stranger"])
    for role, kind in HELD[scope].items():
        status, refusal = told(case, scene, tokens[kind])
        if status not in (401, 403) and (status != 404 or (status, refusal) != not_there):
            return role
    return "nobody"


def test_docs_say_which_role_each_change_needs(scene: Scene, db: None) -> None:
    """`docs/roles.md` is compared with what each role is answered."""
    kinds = {"stranger", *HELD["org"].values(), *HELD["platform"].values()}
    tokens = {kind: issue_token(getattr(scene.people, kind)) for kind in kinds}
    page = (PROJECT / "docs" / "roles.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \| (`.*`) \|$", page, re.MULTILINE)
    documented = {
        (method, path.replace("{", "<").replace("}", ">")): (org, platform)
        for org, platform, requests in rows
        for method, path in re.findall(r"`([A-Z]+) /([^`]+)`", requests)
    }
    found = {
        route: tuple(least_role(API[route], scene, tokens, scope) for scope in HELD)
        for route in CHANGES
        if route not in UNTOLD
    }
    assert {route: roles for route, roles in documented.items() if route not in UNTOLD} == found
    assert documented.keys() >= UNTOLD
    rules = API["PUT", "orgs/<slug>/session-rules"]
    of_fields = re.findall(r"^\| `(\w+_quota)` [^|]+ \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert of_fields == [
        (
            name,
            *(
                least_role(replace(rules, body=RULES | {name: 5}), scene, tokens, scope)
                for scope in HELD
            ),
        )
        for name in QUOTAS
    ]


@pytest.mark.parametrize(("method", "path"), CHANGES, ids=str)
def test_a_token_that_may_only_read_changes_nothing(
    method: str,
    path: str,
    people: People,
    names: dict[str, object],
    api_of: Callable[..., Client],
) -> None:
    case = API[method, path]
    response = api_of(people.platform_admin, read_only=True).generic(
        method,
        case.path.format(**names),
        data="" if case.body is None else json.dumps(case.body),
        content_type="application/json",
        headers=case.headers or {},
    )
    assert response.status_code == 403, response.content[:500]
    assert "only read" in response.json()["detail"]


def longest_texts(method: str, path: str) -> dict[str, str]:
    """Every free text that the body of an operation takes, as long as it may be."""
    from console.api.v1 import api

    schema = api.get_openapi_schema()
    found = schema["paths"][f"/api/v1/{path.replace('<', '{').replace('>', '}')}"][method.lower()]
    body = found.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    named = schema["components"]["schemas"].get(body.get("$ref", "").rpartition("/")[2], {})
    return {
        name: "x" * one["maxLength"]
        for name, one in named.get("properties", {}).items()
        if one.get("type") == "string" and "maxLength" in one and "pattern" not in FORMED.get(name, one)
    }


# By name: what has a pattern, and takes any text of one line, or of several, all the same.
FORMED: dict[str, dict[str, str]] = {"reason": {}, "note": {}, "text": {}, "name": {}}


@pytest.mark.parametrize(("method", "path"), CHANGES, ids=str)
def test_whoever_has_the_longest_name_changes_what_they_may(
    method: str,
    path: str,
    people: People,
    names: dict[str, object],
    scene: Scene,
) -> None:
    """By a token with the longest name, and with every text as long as it may be."""
    case = API[method, path]
    client = scene.api("platform_admin")
    User.objects.filter(pk=people.platform_admin.pk).update(username="a" * 63)
    ApiToken.objects.update(name="t" * 120)
    body = {**longest_texts(method, path), **(case.body or {})}
    response = client.generic(
        method,
        case.path.format(**names),
        data="" if case.body is None else json.dumps(body),
        content_type="application/json",
        headers=case.headers or {},
    )
    assert response.status_code == case.expected[KINDS.index("platform_admin")], response.content[:500]


def test_a_token_of_one_org_is_a_stranger_everywhere_else(
    people: People, api_of: Callable[..., Client]
) -> None:
    client = api_of(people.platform_admin, org=people.acme)
    assert client.get("/api/v1/orgs/acme").status_code == 200
    assert client.get("/api/v1/orgs/globex").status_code == 404
    assert [org["slug"] for org in client.get("/api/v1/orgs").json()["items"]] == ["acme"]
    made = client.post(
        "/api/v1/orgs",
        {"slug": "new", "name": "New"},
        content_type="application/json",
        headers=IDEMPOTENT,
    )
    assert made.status_code == 403


def of_globex(people: People) -> None:
    """One of everything that another org has, each called by its name."""
    admin, org = people.principal("stranger"), people.globex
    held = new_session("globex-chat", org, 1)
    held.save()
    driver = join("globex-driver", "http://127.0.0.1:9")
    Job.objects.create(session=held, name="globex-job", driver=driver)
    Target.objects.create(kind="driver", name=driver.name, generation=1, problem="it is globex's")
    with transaction.atomic():
        for_change(admin, org.slug)
        wanted = OrgPolicies(policy=Policy(share=7))
        policies.set_policy(admin, org, wanted, reason="because of globex")
        callers.add_caller(admin, org, name="engine of globex")
        start(SYSTEM, "tests.waits", "org:globex", "Wait for globex", plan={}, org_id=org.pk)
    make_alert("evict-slow", "org:globex", org)
    make_silence(["rule=globex"], org)
    make_channel("globex-pager", "http://127.0.0.1:9/globex", org)


@pytest.mark.slow
def test_nobody_reads_anything_of_another_org_anywhere(
    people: People,
    names: dict[str, object],
    browser_of: Callable[..., Client],
    api_of: Callable[..., Client],
) -> None:
    of_globex(people)
    told = {}
    for client, cases in ((browser_of(people.org_admin), PAGES), (api_of(people.org_admin), API)):
        for case in [one for one in cases.values() if one.method == "GET"]:
            answer = client.get(case.path.format(**names))
            text = "" if answer.streaming else answer.content.decode()  # the trail's list has its own
            if (place := text.lower().find("globex")) >= 0:
                told[case.path] = text[max(0, place - 200) : place + 100]
    assert told == {}
    shown = browser_of(people.stranger).get("/orgs/globex/policy/").content.decode()
    assert "globex-driver" in shown, "their own people do"
