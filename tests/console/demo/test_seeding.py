"""The demo is made once, as people would make it; what people change of it stays so."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.test import override_settings

from console.accounts.principal import SYSTEM
from console.audit.models import AuditEntry
from console.demo import places, real, seeding, story
from console.fleet import desired
from console.fleet.membership import tokens
from console.fleet.models import Box, Node, Stamp
from console.operations.models import Operation
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies import callers
from console.policies import services as policies
from console.workloads.models import Workload

pytestmark = pytest.mark.django_db


def test_there_are_a_fleet_orgs_with_policies_and_workloads_that_wait_for_nodes() -> None:
    assert seeding.seed()
    assert sorted(Node.objects.values_list("name", flat=True)) == list(places.NODES)
    assert Box.objects.count() == len(story.BOXES)
    for one in story.ORGS:
        held = policies.active_policy(Org.objects.get(slug=one.slug))
        assert held.policy == one.policy
        assert held.version
    made = {one.name: one for one in Workload.objects.all()}
    assert {name: one.replicas for name, one in made.items()} == {"chat": 2, "code": 1}
    assert {one.orgs_said for one in made.values()} == {"all"}
    assert set(Operation.objects.values_list("kind", flat=True)) == {"session.create"}
    assert AuditEntry.objects.filter(action="org.create", reason=seeding.REASON).count() == 3


def test_it_is_made_once_and_what_people_remove_stays_away() -> None:
    seeding.seed()
    entries = AuditEntry.objects.count()
    assert not seeding.seed()
    orgs.delete_org(SYSTEM, orgs.for_change(SYSTEM, "archive"))
    assert not seeding.seed()
    assert not Org.objects.filter(slug="archive").exists()
    assert AuditEntry.objects.count() == entries + 1


def test_a_fleet_that_is_there_is_left_alone() -> None:
    Stamp.objects.create(name="ours")
    assert not seeding.seed()
    assert not Node.objects.exists()
    assert not Org.objects.exists()


def test_tokens_are_kept_while_they_are_good_and_made_anew_when_they_are_not(tmp_path: Path) -> None:
    seeding.seed()
    seeding.write_down(tmp_path)
    node = places.join_token(tmp_path, "node")
    caller = places.caller_token(tmp_path, "foundry")
    for path in (node, caller):
        assert path.stat().st_mode & 0o777 == 0o600
    first = node.read_text(), caller.read_text()
    seeding.write_down(tmp_path)
    assert (node.read_text(), caller.read_text()) == first

    known = tokens.authenticate(first[0])
    assert known
    tokens.revoke(SYSTEM, known.public_id)
    org = orgs.for_change(SYSTEM, "foundry")
    [held] = callers.callers_of(org)
    callers.remove_caller(SYSTEM, org, held.public_id)
    seeding.write_down(tmp_path)
    assert tokens.authenticate(node.read_text())
    assert caller.read_text() != first[1]
    caller.unlink()
    seeding.write_down(tmp_path)
    assert callers.callers_of(org).count() == 1, "one whose token nobody knows is of no use"


def test_its_nodes_have_a_tier_2_in_the_state_directory(tmp_path: Path) -> None:
    with override_settings(STATE_DIR=tmp_path):
        seeding.seed()
    assert desired.tier2("ax-1")["tier2"]["path"] == str(tmp_path / "demo" / "tier2")


def test_a_real_engine_has_a_workload_and_a_box_beside_the_demo_once(tmp_path: Path) -> None:
    with override_settings(STATE_DIR=tmp_path):
        seeding.seed()
        assert real.serve()
        assert not real.serve()
    made = Workload.objects.get(name=real.NAME)
    assert made.spec().engine.kind == "vllm"
    assert Box.objects.count() == len(story.BOXES) + 1
    assert made.spec().boxes == 1


def test_sockets_have_to_fit_into_the_state_directory() -> None:
    assert places.fits(Path("/a/short/one"))
    assert not places.fits(Path("/a/long/one") / ("x" * 100))
