"""Create the demo: its fleet, orgs, policies and sessions, through the same services that people use.

It is created only where there is no fleet yet, so changes that people make stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec
from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.audit.models import AuditEntry
from console.demo import places, story, tokenizer
from console.fleet.descriptions import changes
from console.fleet.membership import tokens
from console.fleet.models import Driver, Node, Stamp
from console.fleet.services import reachable_drivers, reachable_nodes
from console.operations import services as operations
from console.operations.models import Operation
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies import callers
from console.policies import services as policies
from console.policies.models import Caller
from console.policies.org_keys import tags_by_org
from console.routing import services as models
from console.routing.models import Replica, ServedModel
from console.sessions import rules, services
from console.sessions.changes import jobs, sizes
from console.sessions.models import Job, Session
from console.stack.keys import write_private
from swdriver_shim.desired import token_hash
from swdriver_shim.policy import OrgPolicies
from telemetry.topics import of_session

REASON: Final = "the demo of make up"
CALLER: Final = "demo"
JOINS_MAX: Final = 1000
JOINING_SECONDS_MAX: Final = 3600  # sessions wait for nodes to join
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('demo'))"


@transaction.atomic
def seed() -> bool:
    """Create the demo unless there is a fleet; returns whether it was created."""
    with connection.cursor() as cursor:
        cursor.execute(_LOCK)
    if Stamp.objects.exists():
        return False
    changes.apply(SYSTEM, story.fleet(places.tier2(settings.STATE_DIR)), reason=REASON)
    for one in story.ORGS:
        if not Org.objects.filter(slug=one.slug).exists():
            orgs.create_org(SYSTEM, slug=one.slug, name=one.name, reason=REASON)
            org = orgs.for_change(SYSTEM, one.slug)
            policies.set_policy(SYSTEM, org, OrgPolicies(policy=one.policy), reason=one.why)
    cluster = rules.for_change(SYSTEM, None)
    rules.set_rules(SYSTEM, cluster, {"grant_percent": story.GRANT_PERCENT}, reason=story.WHY_NOT_ALL)
    for served in story.SERVED:
        session = sizes.new_session(served.session, None, 1, bytes_per_token=served.bytes_per_token)
        sizes.create(SYSTEM, session, wait_seconds=JOINING_SECONDS_MAX, reason=REASON)
    return True


def write_down(state: Path) -> None:
    """Write join tokens, models of drivers and callers' tokens to files. Invalid tokens are replaced."""
    each = (places.directory_of(state, name) for name in (*places.NODES, *places.DRIVERS, places.BRAIN))
    for directory in (*each, places.tier2(state)):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for served in story.SERVED:
        places.model(state, served.driver).write_bytes(msgspec.json.encode(served.spec))
    tokenizer.write(places.tokenizer(state))
    for kind in ("node", "driver", "brain"):
        path = places.join_token(state, kind)
        if not path.exists() or tokens.authenticate(path.read_text()) is None:
            expires_at = timezone.now() + timedelta(hours=tokens.LIFETIME_HOURS_MAX)
            _, text = tokens.issue(SYSTEM, kind=kind, uses=JOINS_MAX, expires_at=expires_at, note=REASON)
            write_private(path, text)
    for one in story.ORGS:
        path = places.caller_token(state, one.slug)
        if Org.objects.filter(slug=one.slug).exists() and not _is_known(path):
            write_private(path, _new_caller(one.slug))


def _is_known(path: Path) -> bool:
    return path.exists() and Caller.objects.filter(token_sha256=token_hash(path.read_text())).exists()


@transaction.atomic
def _new_caller(slug: str) -> str:
    """Replace the caller, whose token is not known."""
    org = orgs.for_change(SYSTEM, slug)
    for former in callers.callers_of(org).filter(name=CALLER):
        callers.remove_caller(SYSTEM, org, former.public_id, reason=REASON)
    _, text = callers.add_caller(SYSTEM, org, name=CALLER, reason=REASON)
    return text


@transaction.atomic
def has_job(served: story.Served) -> bool:
    """Whether the driver is a job of its session. Starts the job once all nodes have joined, so that
    streams get rails; not if a person has ended it."""
    driver = reachable_drivers().filter(name=served.driver).first()
    if driver is None or Job.objects.filter(driver=driver).exists():
        return driver is not None
    nodes = Node.objects.filter(name__in=places.NODES)
    if nodes.exclude(pk__in=reachable_nodes()).exists():
        return False
    target = of_session(served.session)
    session = Session.objects.filter(name=served.session, deleting=False).first()
    has_ended = Operation.objects.filter(target=target, kind="session.end-job").exists()
    if session is None or has_ended or operations.running_on(target):
        return False
    held = services.for_change(SYSTEM, served.session)
    slugs = {one.slug for one in story.ORGS}
    ours = Org.objects.filter(slug__in=slugs).values_list("slug", flat=True)  # but for those deleted
    jobs.start_job(SYSTEM, held, served.driver, driver, orgs=list(ours), reason=REASON)
    return True


@transaction.atomic
def serve_models(state: Path, urls: Mapping[str, str]) -> None:
    """Have brains serve the demo's models, once: what people remove stays away. Replicas that are there
    follow their engines, by driver, to other ports."""
    with connection.cursor() as cursor:
        cursor.execute(_LOCK)
    for served in story.MODELS:
        was_made = AuditEntry.objects.filter(action="model.add", object_id=served.name, reason=REASON)
        if not was_made.exists() and not ServedModel.objects.filter(name=served.name).exists():
            values = {
                "model": served.model,
                "tokens_max": story.CONTEXT_TOKENS,
                "tokenizer": str(places.tokenizer(state).resolve()),
            }
            models.add_model(SYSTEM, name=served.name, values=values, orgs=None, reason=REASON)
    for served in story.SERVED:
        url = urls[served.driver]
        replica = Replica.objects.filter(model__name=served.name, name=served.driver).first()
        if replica is not None:
            values = {"url": url, **_driver_of(served, replica)}
            models.update_replica(SYSTEM, replica, values=values, reason=REASON)
        elif model := _not_given_before(served):
            values = {"url": url, **_driver_of(served, None)}
            models.add_replica(SYSTEM, model, name=served.driver, values=values, reason=REASON)


def _not_given_before(served: story.Served) -> ServedModel | None:
    """The model, unless it had this replica once, and somebody has removed it."""
    given = f"{served.name}/{served.driver}"
    if AuditEntry.objects.filter(action="replica.add", object_id=given, reason=REASON).exists():
        return None
    return ServedModel.objects.filter(name=served.name).first()


def _driver_of(served: story.Served, replica: Replica | None) -> dict[str, Driver]:
    """The driver, once it has joined; a replica that has one keeps it."""
    if replica is not None and replica.driver is not None:
        return {}
    driver = Driver.objects.filter(name=served.driver).first()
    return {"driver": driver} if driver else {}


@transaction.atomic
def give_driver(served: story.Served) -> None:
    """Tell brains of the driver of a replica as soon as it has joined."""
    replica = Replica.objects.filter(model__name=served.name, name=served.driver, driver=None).first()
    if replica is not None and (values := _driver_of(served, replica)):
        models.update_replica(SYSTEM, replica, values=values, reason=REASON)


def orgs_by_salt() -> dict[str, str]:
    """As brains call orgs before engines: by the tag of what they store."""
    return {tag: org.slug for org, tags in tags_by_org(list(Org.objects.all())) for tag in tags}
