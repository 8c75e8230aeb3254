"""Brains join, are watched and removed; and receipts of purges wait for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone

from console.authority.services import following
from console.control import rounds
from console.control import services as control
from console.control.models import Kind, Target
from console.fleet.membership import joins, telemetry_users
from console.fleet.membership.certification import certify
from console.fleet.membership.facts import BrainFacts
from console.fleet.membership.liveness import find_lost
from console.fleet.membership.tokens import digest
from console.fleet.models import Brain, Removed, Watch
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.operations.models import Operation
from console.orgs import services as orgs
from console.policies.evidence import purges
from console.policies.models import PurgeConfirmation, PurgeReceipt
from console.routing import brains
from kvss_agent.process.membership import credential
from kvss_agent.security.certificates import Role, peer_of, read_certificate
from kvss_agent.security.confirmations import PURPOSE
from kvss_agent.security.identity import ProcessIdentity, verify
from telemetry.models import Source
from tests.conftest import People
from tests.console.fleet.worlds import CONTROL_TOKEN, new_token
from tests.console.policies.purges import finished
from tests.console.routing.brains import FakeBrain, a_model

pytestmark = pytest.mark.django_db
FACTS = BrainFacts("http://10.0.0.9:8430", "0.1.0", api_url="https://brain.example.org")
SHOWN = credential(CONTROL_TOKEN, "brain:east")


def test_a_brain_joins_beats_and_gets_a_certificate_of_its_own(db: None, tmp_path: Path) -> None:
    own = ProcessIdentity.load(tmp_path, "brain:east")
    request = own.certificate_request()
    joins.join_brain(new_token("brain"), "east", CONTROL_TOKEN, FACTS, request)
    assert joins.beats("east", SHOWN, FACTS)
    assert not joins.beats("east", "tgh_wrong", FACTS)
    moved = replace(FACTS, api_url="https://other.example.org")
    assert joins.beats("east", SHOWN, moved)
    assert Brain.objects.get().api_url == "https://other.example.org"
    issued = certify(Role.BRAIN, "east", SHOWN, request)
    assert issued is not None
    peer = peer_of(read_certificate(issued.certificate))
    assert peer is not None
    assert (peer.role, peer.name) == (Role.BRAIN, "east")
    assert following().behind == ["brain east"], "until it says that it believes the authority"


def test_each_kind_of_token_lets_its_kind_in(db: None) -> None:
    with pytest.raises(Impossible, match="lets a driver join, and not a brain"):
        joins.join_brain(new_token("driver"), "east", CONTROL_TOKEN, FACTS)


def test_nobody_takes_the_name_of_a_brain_that_is_alive(db: None) -> None:
    joins.join_brain(new_token("brain"), "east", CONTROL_TOKEN, FACTS)
    with pytest.raises(Impossible, match="is taken, and alive"):
        joins.join_brain(new_token("brain"), "east", "u" * 32, FACTS)


def test_a_silent_brain_is_lost_and_comes_back(brain: FakeBrain) -> None:
    now, long_ago = timezone.now(), timezone.now() - timedelta(hours=1)
    Watch.objects.create(pk=1, listening_since=long_ago, swept_at=now)
    Source.objects.create(
        name="w",
        kind="web",
        topic="web:w",
        process_id=1,
        sequence=1,
        seen_at=now,
        started_at=long_ago,
    )
    Brain.objects.update(last_heartbeat_at=long_ago, heartbeat_sha256=digest(SHOWN))
    assert find_lost(now) == 1
    assert Brain.objects.get().lost_at is not None
    assert joins.beats("east", SHOWN, FACTS)
    assert Brain.objects.get().lost_at is None


def test_a_brain_has_redis_users_of_its_own(brain: FakeBrain) -> None:
    users = [name for name, _ in telemetry_users._wanted(0)]
    assert users == ["brain:east", "brain-reader:east"]


def test_a_removed_brain_is_forgotten_and_does_not_come_back_by_itself(
    people: People, api_of: Callable[..., Client]
) -> None:
    token = new_token("brain")
    joins.join_brain(token, "east", CONTROL_TOKEN, FACTS)
    Target.objects.create(kind=Kind.BRAIN, name="east", generation=3)
    answer = api_of(people.platform_admin).delete(
        "/api/v1/brains/east", headers={"if-match": "*", "idempotency-key": "k"}
    )
    assert answer.status_code == 204
    assert not Brain.objects.exists()
    assert not Target.objects.filter(kind=Kind.BRAIN).exists()
    assert not joins.beats("east", SHOWN, FACTS)
    assert "was removed from the fleet" in joins.why_unknown("brain", "east", SHOWN)
    with pytest.raises(Impossible, match="was removed from the fleet"):
        joins.join_brain(token, "east", CONTROL_TOKEN, FACTS)


# Purges


def purge(people: People) -> Operation:
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        return purges.purge(people.principal("org_admin"), org, reason="ended")


def advanced(operation: Operation) -> Operation:
    while operations.advance(operation.pk):
        pass
    operation.refresh_from_db()
    return operation


@pytest.fixture
def told(people: People, brain: FakeBrain) -> FakeBrain:
    a_model()
    assert rounds.push([control.ALL_BRAINS]) == 0
    return brain


def test_a_receipt_waits_for_brains_and_has_what_they_signed(people: People, told: FakeBrain) -> None:
    told.confirms = False
    operation = advanced(purge(people))
    assert not operation.done
    assert operation.message.startswith("a brain: The document that names the new epoch")
    assert [one.pk for one in operations.waiting_for("brain:east")] == [operation.pk]
    told.confirms = True
    assert finished(operation).state == "succeeded"
    receipt = PurgeReceipt.objects.get()
    assert receipt.places["brains"]["east"]["entries"] == 12
    assert (receipt.columns, receipt.files) == (0, 0), "a brain stores no columns"
    question = told.asked[-1]
    assert (question.org, question.epoch) == ("acme", 2)
    [kept] = PurgeConfirmation.objects.filter(identity="brain:east")
    assert verify(
        told.identity.public_key_pem,
        PURPOSE + bytes(kept.payload),
        bytes(kept.signature),
    )


def test_a_brain_that_was_removed_is_waited_for_no_more_and_the_receipt_says_so(
    people: People, told: FakeBrain
) -> None:
    told.confirms = False
    operation = advanced(purge(people))
    with transaction.atomic():
        found = brains.for_change(people.principal("platform_admin"), "east")
        brains.remove_brain(people.principal("platform_admin"), found, reason="dead")
    assert Removed.objects.get().kind == "brain"
    assert finished(operation).state == "succeeded"
    [removed] = PurgeReceipt.objects.get().places["removed"]
    assert (removed["kind"], removed["name"]) == ("brain", "east")


def test_another_process_key_confirms_nothing(people: People, told: FakeBrain, tmp_path: Path) -> None:
    told.identity = ProcessIdentity.load(tmp_path / "other", "brain:east")
    operation = advanced(purge(people))
    assert not operation.done
    assert "not signed with its key" in operation.message


def test_a_brain_that_was_never_told_anything_has_nothing_to_confirm(
    people: People, brain: FakeBrain
) -> None:
    assert finished(purge(people)).state == "succeeded"
    assert not brain.asked
