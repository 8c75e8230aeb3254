"""Certificates of processes that have joined."""

from __future__ import annotations

from django.db import transaction

from console.accounts.principal import SYSTEM
from console.audit.services import Subject, record
from console.authority.services import Issued, issue
from console.fleet.membership.joins import is_its, shown_of
from console.fleet.models import MODELS, Brain, Driver, Node, topic
from console.fleet.nodes import Impossible
from kvss_agent.security.certificates import Role
from kvss_agent.security.identity import Unusable, requested_key
from telemetry.events import note


def certify(kind: Role, name: str, shown: str, certificate_request: str) -> Issued | None:
    """A certificate for a process that has joined, for the key that was bound then. None where that is
    nobody's. Raises Impossible for another key.

    One that joined before there were keys has its key bound by the first request, once.
    """
    joined = MODELS[kind].objects.filter(name=name).first()
    if joined is None or joined.joined_at is None or not is_its(joined, shown):
        return None
    try:
        key = requested_key(certificate_request)
    except Unusable as error:
        raise Impossible(str(error)) from error
    if not joined.public_key:
        _bind(joined, shown, key)
    elif joined.public_key != key:
        raise Impossible(
            f"{name} has joined with another key. Put the key back into its state directory; or, if it "
            "is lost, stop the process, and join again once it counts as lost."
        )
    return issue(kind, name, key)


@transaction.atomic
def _bind(joined: Node | Driver | Brain, shown: str, key: str) -> None:
    found = type(joined).objects.select_for_update(no_key=True).get(pk=joined.pk)
    if not is_its(found, shown) or found.public_key not in ("", key):
        raise Impossible(f"{found.name} has joined with another key meanwhile.")
    if found.public_key:
        return
    found.public_key = key
    found.version += 1
    found.save()
    kind = found.KIND
    entry = record(SYSTEM, f"{kind}.key", Subject(kind, found.name, found.name), after=shown_of(found))
    sentence = f"{found.name} has a key now: it had joined before there were any."
    note(f"{kind}.key", [topic(found)], sentence, {"audit_entry": entry.pk}, entry.at)
