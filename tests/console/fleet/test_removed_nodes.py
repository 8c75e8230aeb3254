"""What drivers are told of nodes that were removed from the fleet: nobody waits for their memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from django.db.models import Max
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.alerts.state.snapshot import take_snapshot as known
from console.control.models import Change, Target
from console.fleet import retired_stores
from console.fleet.descriptions import changes
from console.fleet.membership import joins
from console.fleet.models import JoinToken, Node, Removed, RetiringStore
from console.fleet.nodes import Impossible
from console.sessions.desired import agents_removed
from kvss_agent.security.identity import ProcessIdentity, fingerprint
from swdriver_shim.desired import Desired
from telemetry.models import Source
from tests.console.fleet.worlds import CONTROL_TOKEN, FACTS, World, new_token

pytestmark = pytest.mark.django_db

FLEET = """
stamps:
  east:
    leaves:
      leaf-1: {{spine_links: {{leaf-1-up: {{spine: spine-1, gbits: 400}}}}}}
      leaf-2:
    nodes:
      {}ax-2: {{nics: {{eth0: {{leaf: leaf-2}}}}}}
    boxes:
      cs-1:
        domains:
          - {{wio: 8, leaves: [leaf-2]}}
          - {{wio: 8, leaves: [leaf-1]}}
          - {{wio: 8, leaves: [leaf-2]}}
          - {{wio: 8, leaves: [leaf-1]}}
"""
WITH_IT = "ax-1: {nics: {eth0: {leaf: leaf-1}}}\n      "


def describe(node: str) -> None:
    changes.apply(SYSTEM, FLEET.format(node))


def told() -> dict[str, Any]:
    return dict(agents_removed())


def test_a_node_that_is_removed_is_waited_for_no_more_until_it_joins_again(world: World) -> None:
    before = new_token()
    describe(WITH_IT)
    assert told() == {}  # a field that older drivers refuse is not there without need
    describe("")
    assert not Node.objects.filter(name="ax-1").exists()
    assert told() == {"agents_removed": [FACTS.data_address]}
    assert "agents_removed" in {field.name for field in msgspec.structs.fields(Desired)}
    describe(WITH_IT)
    assert told() == {"agents_removed": [FACTS.data_address]}  # its place is there, and nobody in it
    with pytest.raises(Impossible, match="ax-1 was removed from the fleet"):
        joins.join_node(before, "ax-1", CONTROL_TOKEN, FACTS)
    joins.join_node(new_token(), "ax-1", CONTROL_TOKEN, FACTS)
    assert told() == {}


def test_who_removes_a_node_vouches_for_all_machines_that_had_its_name(
    world: World, tmp_path: Path
) -> None:
    """Each had another key, and so other memory. That another machine comes vouches for none."""
    facts = replace(FACTS, data_address="tls:10.0.0.7:8411")
    first, second = (ProcessIdentity.load(tmp_path / name, "node:ax-1") for name in ("1st", "2nd"))

    def join(machine: ProcessIdentity, token: JoinToken) -> str:
        """Under the name, as one of this key. What drivers know it by."""
        key, request = fingerprint(machine.public_key_pem), machine.certificate_request()
        Node.objects.filter(name="ax-1").update(state="lost", held_state="ready")
        joins.join_node(token, "ax-1", key[:32], facts, certificate_request=request)
        return f"{facts.data_address}#{key}"

    before = new_token()
    describe(WITH_IT)
    gone = [FACTS.data_address, join(first, before), join(second, before)]
    assert told() == {}
    with pytest.raises(Impossible, match="ax-1 was replaced by another machine"):
        join(first, before)
    describe("")
    assert told() == {"agents_removed": sorted(gone)}
    describe(WITH_IT)
    assert join(second, new_token()) == gone[2]
    assert told() == {"agents_removed": sorted(gone[:2])}


def test_of_machines_that_had_one_name_the_last_ones_are_remembered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent whose state directory is lost has another key at each start."""
    monkeypatch.setattr(joins, "REPLACED_MAX", 2)
    describe(WITH_IT)
    for number in range(5):
        Node.objects.filter(name="ax-1").update(state="lost", held_state="ready")
        facts = replace(FACTS, data_address=f"10.0.0.{number}:8411")
        joins.join_node(new_token(), "ax-1", f"{number}" * 32, facts)
    remembered = Removed.objects.filter(name="ax-1", was_replaced=True)
    assert [one.data_address for one in remembered] == ["10.0.0.3:8411", "10.0.0.2:8411"]


def test_a_place_where_nobody_ever_was_is_removed_without_a_word(world: World) -> None:
    describe("")
    before = told()
    changes.apply(SYSTEM, FLEET.format("").replace("ax-2", "ax-3"))
    assert told() == before


def test_a_node_that_was_removed_is_not_missed(world: World) -> None:
    now = timezone.now()
    for number, name in enumerate(("ax-1", "ax-2")):
        Source.objects.create(
            name=name,
            kind="agent",
            topic=f"node:{name}",
            version="0.1.0",
            host="h",
            process_id=number,
            started_at=now,
            sequence=1,
            seen_at=now,
        )
    assert {"node:ax-1", "node:ax-2"} <= set(known(now).last_seen)
    describe("")
    found = known(now)
    assert "node:ax-1" not in {*found.last_seen, *found.joined}
    assert "node:ax-2" in found.last_seen


def test_a_shared_store_of_its_is_remembered_until_another_node_has_it(world: World) -> None:
    def stores() -> list[str]:
        return [name for name, _ in retired_stores.forgotten(world.here.created_at)]

    shared = "tier2: {kind: s3, bucket: kv, cap: 1T}"
    describe(WITH_IT.replace("}}}", f"}}}}, {shared}}}"))
    RetiringStore.objects.create(
        node=world.here,
        place="posix:/mnt/disk",
        said={"kind": "posix", "path": "/mnt/disk", "cap": "1T", "shared": False},
        since=world.here.created_at,
    )
    assert stores() == []
    describe("")
    assert stores() == ["ax-1"], "a disk of its own went with it"
    described = FLEET.format("").replace("ax-2: {", f"ax-2: {{{shared}, ")
    changes.apply(SYSTEM, described)
    assert stores() == []


@pytest.mark.parametrize(
    ("has_joined_again", "is_drained", "left"),
    [
        (False, False, ["posix:/mnt/kv"]),  # any agent may say so
        (True, False, []),
        (False, True, []),  # an admin had it remove the files
    ],
)
def test_an_agent_vouches_for_its_own_files_and_for_those_that_an_admin_had_it_remove(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_joined_again: bool,
    is_drained: bool,
    left: list[str],
) -> None:
    keys = [_key(tmp_path / name) for name in ("ax-0", "ax-1")]
    removed = Removed.objects.create(
        kind="node", name="ax-0", public_key=keys[0], stores=["posix:/mnt/kv"]
    )
    Node.objects.filter(name="ax-1").update(public_key=keys[not has_joined_again])
    last = Change.objects.aggregate(last=Max("pk"))["last"] or 0
    Target.objects.update_or_create(kind="node", name="ax-1", defaults={"generation": 1, "change": last})
    RetiringStore.objects.create(
        node=world.here,
        place="posix:/mnt/kv",
        said={"kind": "posix", "path": "/mnt/kv", "cap": "1G"},
        since=world.here.created_at,
        is_drained=is_drained,
    )
    stores = {"retiring": [{"place": "posix:/mnt/kv", "state": "empty"}]}
    answer = {"generation": 1, "observed_generation": 1, "tier2": stores}
    monkeypatch.setattr(retired_stores, "ask_all", lambda _: [httpx.Response(200, json=answer)])
    assert retired_stores.look() == 0
    removed.refresh_from_db()
    assert removed.stores == left


def _key(directory: Path) -> str:
    directory.mkdir()
    return ProcessIdentity.load(directory, "node:ax").public_key_pem
