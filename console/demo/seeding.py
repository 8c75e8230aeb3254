"""Create the demo: its fleet, orgs, policies and workloads, through the same services that people use.

It is created only where there is no fleet yet, so changes that people make stay.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Final

from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.demo import places, story, tokenizer
from console.fleet.descriptions import changes
from console.fleet.membership import tokens
from console.fleet.models import Stamp
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies import callers
from console.policies import services as policies
from console.policies.models import Caller
from console.sessions import rules
from console.stack.keys import write_private
from console.workloads import changes as workloads
from console.workloads.spec import RolloutSpec, TokenizerSource, WorkloadSpec
from swdriver_shim.desired import token_hash
from swdriver_shim.policy import OrgPolicies
from workload_manager.spec import EngineSpec

REASON: Final = "the demo of make up"
CALLER: Final = "demo"
JOINS_MAX: Final = 1000
TTFT_RATIO_MAX: Final = 100.0
JOINING_SECONDS_MAX: Final = 3600  # sessions wait for nodes to join
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('demo'))"


@transaction.atomic
def seed() -> bool:
    """Create the demo unless there is a fleet; returns whether it was created."""
    with connection.cursor() as cursor:
        cursor.execute(_LOCK)
    if Stamp.objects.exists():
        return False
    tokenizer.write(places.tokenizer(settings.STATE_DIR))
    changes.apply(SYSTEM, story.fleet(places.tier2(settings.STATE_DIR)), reason=REASON)
    for one in story.ORGS:
        if not Org.objects.filter(slug=one.slug).exists():
            orgs.create_org(SYSTEM, slug=one.slug, name=one.name, reason=REASON)
            org = orgs.for_change(SYSTEM, one.slug)
            policies.set_policy(SYSTEM, org, OrgPolicies(policy=one.policy), reason=one.why)
    cluster = rules.for_change(SYSTEM, None)
    rules.set_rules(SYSTEM, cluster, {"grant_percent": story.GRANT_PERCENT}, reason=story.WHY_NOT_ALL)
    folder = str(places.tokenizer(settings.STATE_DIR).resolve())
    for served in story.SERVED:
        spec = WorkloadSpec(
            name=served.name,
            model=served.model,
            replicas=served.replicas,
            tokens_max=story.CONTEXT_TOKENS,
            engine=EngineSpec(kind="emulator", emulator=served.emulator),
            tokenizer=TokenizerSource(folder=folder),
            # Times say nothing on a machine that does much else.
            rollout=RolloutSpec(ttft_ratio_max=TTFT_RATIO_MAX),
        )
        workloads.create(SYSTEM, spec, wait_seconds=JOINING_SECONDS_MAX, reason=REASON)
    return True


def write_down(state: Path) -> None:
    """Write join tokens and API keys of orgs to files. Invalid tokens are replaced."""
    each = (places.directory_of(state, name) for name in (*places.NODES, places.BRAIN))
    for directory in (*each, places.tier2(state)):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for kind in ("node", "brain"):
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
