"""Claims for engines: the key that gateways sign them with, and single ones for trying an engine out.

Each use is recorded: whoever has the key, or a claim, is an org to that engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
from django.db import transaction
from django.utils import timezone

from console.accounts.principal import Principal
from console.accounts.roles import Role
from console.audit.services import Subject, record
from console.control.services import ALL_BRAINS, changed, claims_key_of, new_claims_key
from console.fleet import services
from console.fleet.models import Driver
from console.fleet.nodes import Impossible
from console.orgs.services import get_org
from swdriver_shim.adapters.claims import mint
from swdriver_shim.policy import AS_USUAL, Rules
from telemetry.topics import of_source


@dataclass(frozen=True, slots=True)
class Claim:
    text: str
    expires_at: datetime


def engine(principal: Principal, name: str) -> Driver:
    """An engine, for platform admins who may change something: a token that only reads does not get what
    opens more. Raises Http404, Refused, and Impossible for a daemon."""
    principal.check_may_change()
    services.check_fleet(principal, Role.PLATFORM_ADMIN)
    driver = services.get(services.visible_drivers(principal), name)
    if not driver.engine:
        raise Impossible(
            f"{driver.name} is a daemon: its callers authenticate with tokens of their orgs, not with "
            "claims."
        )
    return driver


@transaction.atomic
def read_key(principal: Principal, name: str) -> bytes:
    """Raises as `engine`."""
    driver = engine(principal, name)
    sentence = "The key for claims was read."
    record(principal, "driver.claims-key.read", _about(driver), after={}, sentence=sentence)
    return claims_key_of(driver.name)


@transaction.atomic
def rotate_key(principal: Principal, name: str, *, reason: str = "") -> bytes:
    """A new key, with which alone claims are good as soon as the engine is told. Raises as `engine`."""
    driver = engine(principal, name)
    key = new_claims_key(driver.name)
    sentence = "The key for claims was rotated."
    about = _about(driver)
    record(principal, "driver.claims-key.rotate", about, after={}, reason=reason, sentence=sentence)
    told = [("driver", driver.name), ALL_BRAINS]
    changed(told, sentence, topic=of_source("driver", driver.name))
    return key


@transaction.atomic
def sign(
    principal: Principal,
    name: str,
    slug: str,
    *,
    seconds: int,
    rules: Rules = AS_USUAL,
    reason: str = "",
) -> Claim:
    """A claim of this org. Raises as `engine`, and Http404 for an org that they may not see."""
    driver, org = engine(principal, name), get_org(principal, slug)
    after = {"org": org.slug, "seconds": seconds, "rules": msgspec.to_builtins(rules)}
    sentence = f"A claim of {org.slug} was signed."
    about = _about(driver, org.pk)
    record(principal, "driver.claim", about, after=after, reason=reason, sentence=sentence)
    now = int(timezone.now().timestamp())
    text = mint(claims_key_of(driver.name), driver.name, org.slug, rules, seconds=seconds, now=now)
    return Claim(text, datetime.fromtimestamp(now, UTC) + timedelta(seconds=seconds))


def _about(driver: Driver, org_id: int | None = None) -> Subject:
    return Subject("driver", driver.name, driver.name, org_id, [of_source("driver", driver.name)])
