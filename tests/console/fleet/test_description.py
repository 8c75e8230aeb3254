"""Descriptions of fleets: read, written, compared, imported, taken back."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import CommandError, call_command
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from console.accounts.principal import SYSTEM, Refused
from console.audit import services as audit
from console.audit.models import AuditEntry
from console.control.documents import Compiler
from console.control.models import Change
from console.environment import PROJECT
from console.fleet import nodes
from console.fleet.descriptions import changes, tier2
from console.fleet.descriptions.changes import Moved, apply, current, difference, preview
from console.fleet.descriptions.document import Things, Wrong, dump, parse
from console.fleet.models import Box, Leaf, Nic, Node, SpineLink, Stamp
from console.fleet.nodes import Impossible
from console.operations import services as operations
from console.sessions.changes import box_drains, drains
from console.sessions.models import Session, SessionBox
from telemetry.models import Event
from tests.conftest import People
from tests.console.fleet.worlds import World, refreshed

FLEET = """
stamps:
  east:
    leaves:
      leaf-1: {spine_links: {leaf-1-up: {spine: spine-1, gbits: 400}}}
      leaf-2:
    nodes:
      ax-1:
        nics: {eth0: {leaf: leaf-1}, eth1: {leaf: leaf-2, wio: 8, gbits: 200}}
        memory: 512G
        shards_max: 6
        tier2: {kind: posix, path: /mnt/kv, cap: 2048G, shared: false}
        labels: {rack: "7"}
      ax-2: {nics: {eth0: {leaf: leaf-2}}}
    boxes:
      cs-1:
        memory: 44G
        domains:
          - {wio: 8, leaves: [leaf-1]}
          - {wio: 6, leaves: [leaf-2, leaf-1]}
  west: {}
"""


NODE = "stamps:\n  a:\n    nodes:\n      n: {{nics: {{e: {{leaf: l}}}}, tier2: {}}}\n    leaves: {{l: }}"


def test_a_description_says_what_there_is() -> None:
    things = parse(FLEET)
    assert things["node", "ax-1"] == {
        "stamp": "east",
        "nics": {
            "eth0": {"leaf": "leaf-1", "wio": 16, "gbits": 100},
            "eth1": {"leaf": "leaf-2", "wio": 8, "gbits": 200},
        },
        "memory": "512 GiB",
        "shards_max": 6,
        "tier2": {"kind": "posix", "cap": "2 TiB", "path": "/mnt/kv", "shared": False},
        "labels": {"rack": "7"},
    }
    assert things["box", "cs-1"]["memory"] == "44 GiB"
    assert things["box", "cs-1"]["domains"][1] == {"wio": 6, "leaves": ["leaf-1", "leaf-2"]}
    assert things["spine link", "leaf-1-up"] == {"leaf": "leaf-1", "spine": "spine-1", "gbits": 400}
    assert parse(dump(things)) == things


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "The description is empty"),
        ("stamps: [", "line 2: "),
        ("stamps: 7", "line 1, stamps: this should be a mapping"),
        ("stamp: {}", "'stamp' is not known here; known are stamps"),
        ("stamps:\n  East: {}", "line 2, stamps: 'East' is no name"),
        ("stamps:\n  a: {}\n  a: {}", "line 3, stamps: a name is a text, and stands here once"),
        ("stamps:\n  a: {nodes: {n: {}}}", "line 2, stamps.a.nodes.n: a node needs a NIC"),
        (NODE.format("{kind: posix, cap: 1T}"), "tier2: tier 2 of kind posix needs an absolute path"),
        (NODE.format("{kind: posix, path: kv, cap: 1T}"), "needs an absolute path, not 'kv'"),
        (
            NODE.format("{kind: s3, cap: 1T}"),
            "line 4, stamps.a.nodes.n.tier2: tier 2 of kind s3",
        ),
        (
            NODE.format("{kind: s3, bucket: b, cap: 1T, path: /k}"),
            "is of kind posix, and this is s3",
        ),
        (NODE.format("{kind: tape, cap: 1T}"), "'tape' is no kind of tier 2: posix or s3"),
        (NODE.format("{kind: posix, path: /k}"), "`cap` is missing"),
        (
            NODE.format("{kind: posix, path: /k, cap: much}"),
            "'much' is not a size. Write 512MiB or 64GiB",
        ),
        (NODE.format("{kind: posix, path: /k, cap: 1T, shared: maybe}"), "should be true or false"),
        (NODE.format("{kind: posix, path: /k, cap: 1T, secret: x}"), "'secret' is not known here"),
        (
            NODE.format("{kind: posix, path: /k, cap: 1T, front: /n}"),
            "front: this should be a map",
        ),
        (NODE.format("{kind: posix, path: /k, cap: 1T, front: {path: /n}}"), "front: `cap` is missing"),
        (
            NODE.format("{kind: posix, path: /k, cap: 1T, front: {path: /n, cap: 1T, writes: up}}"),
            "front.writes: 'up' should be one of through, back, displaced",
        ),
        (
            NODE.format("{kind: posix, path: /k, cap: 1T, front: {path: /k/n, cap: 1T}}"),
            "the front of tier 2 and the store behind it lie within each other",
        ),
        (
            "stamps:\n  a:\n    nodes:\n      n: {nics: {e: {leaf: far}}}",
            "line 4, stamps.a.nodes.n.nics.e: there is no leaf far",
        ),
        (
            "stamps:\n  a: {leaves: {l: {}}}\n  b: {nodes: {n: {nics: {e: {leaf: l}}}}}",
            "leaf l is of stamp a, this of b",
        ),
        (
            "stamps: {a: {leaves: {l: {}}, nodes: {n: {memory: much, nics: {e: {leaf: l}}}}}}",
            "nodes.n.memory: 'much' is not a size. Write 512MiB or 64GiB",
        ),
        (
            "stamps: {a: {leaves: {l: {}}, nodes: {n: {memory: 2PiB, nics: {e: {leaf: l}}}}}}",
            "nodes.n.memory: '2PiB' is not from 1 B to 1 PiB",
        ),
        ("stamps: {a: {leaves: {l: {}}, boxes: {b: {domains: []}}}}", "has 1 to 4 domains, this has 0"),
        (
            "stamps: {a: {leaves: {l: {}}, boxes: {b: {domains: [{wio: 0, leaves: [l]}]}}}}",
            "domains[0].wio: '0' should be a whole number from 1",
        ),
        (
            "stamps: {a: {leaves: {l: {}}, boxes: {b: {domains: [{wio: 1, leaves: [l, l]}]}}}}",
            "each on a leaf of its own",
        ),
        ("stamps: {a: {leaves: {l: {}}}, b: {leaves: {l: {}}}}", "a leaf of that name already, line 1"),
        (
            "stamps: {a: {leaves: {l: {}}, nodes: {n: {labels: {'N!': x}, nics: {e: {leaf: l}}}}}}",
            "is no name of a label",
        ),
        ("stamps: {a: {leaves: {l: {spine_links: {u: {gbits: 4}}}}}}", "`spine` is missing"),
        ("stamps: &x {a: *x}", "aliases"),
        ("[" * 100_000, "nested more deeply"),
        ("stamps: " + " " * (4 << 20), "at most"),
        ("\x00", "This is no YAML"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, said: str) -> None:
    with pytest.raises(Wrong) as raised:
        parse(text)
    assert said in str(raised.value)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(Wrong) as raised:
        parse("stamps:\n  a: {nodes: {n: {}, m: {}}, boxes: {b: {}}}")
    assert len(raised.value.problems) == 3


NAMES = st.text("abc019._-", min_size=1, max_size=6).filter(lambda name: name[0] not in "._-")
WORDS = NAMES | st.sampled_from(["stamps", "leaves", "nodes", "nics", "boxes", "domains", "leaf"])


@pytest.mark.slow
@given(st.text(max_size=200) | st.recursive(WORDS, lambda more: st.dictionaries(WORDS, more)).map(str))
def test_whatever_is_thrown_at_it_it_is_wrong_with_a_sentence_or_read(text: str) -> None:
    try:
        things = parse(text)
    except Wrong:
        return
    assert parse(dump(things)) == things


@given(st.sets(NAMES, min_size=1, max_size=4), st.sets(NAMES, max_size=6))
def test_what_is_written_is_read_as_it_was(leaves: set[str], names: set[str]) -> None:
    things: Things = {("stamp", "on"): {}}
    for leaf in leaves:
        things["leaf", leaf] = {"stamp": "on"}
    for number, name in enumerate(sorted(names)):
        leaf = sorted(leaves)[number % len(leaves)]
        nics = {"no": {"leaf": leaf, "wio": 1 + number, "gbits": 100}}
        things["node", name] = {"stamp": "on", "nics": nics, "memory": f"{1 + number} B"}
        things["box", name] = {"stamp": "on", "domains": [{"wio": 1, "leaves": [leaf]}]}
    assert parse(dump(things)) == things


def test_applying_makes_the_fleet_that_and_again_changes_nothing(db: None) -> None:
    found = apply(SYSTEM, FLEET, reason="first")
    assert found.counted() == {"added": 8, "changed": 0, "removed": 0, "refused": 0}
    assert current() == parse(FLEET)
    assert apply(SYSTEM, FLEET).changes == []
    assert apply(SYSTEM, changes.export(SYSTEM)).changes == []
    assert AuditEntry.objects.filter(action="fleet.import").count() == 1
    assert Event.objects.get(kind="fleet.import").topics == ["fleet", "node:ax-1", "node:ax-2"]
    node = Node.objects.get(name="ax-1")
    assert (node.memory_bytes, node.shards_max, node.state) == (512 << 30, 6, "lost")


def test_what_differs_is_said_before_it_is_done(db: None) -> None:
    apply(SYSTEM, FLEET)
    changed = FLEET.replace("512G", "1T").replace("  west: {}", "").replace("wio: 6", "wio: 7")
    changed = changed.replace("ax-2", "ax-3")
    found, _ = preview(SYSTEM, changed)
    told = {(one.kind, one.name): one.what for one in found.changes}
    assert told == {
        ("stamp", "west"): "removed",
        ("node", "ax-1"): "changed",
        ("node", "ax-2"): "removed",
        ("node", "ax-3"): "added",
        ("box", "cs-1"): "changed",
    }
    [change] = [one for one in found.changes if one.name == "ax-1"]
    assert change.differences == [("memory", "512 GiB", "1 TiB")]
    assert current() == parse(FLEET)
    versions = dict(Node.objects.values_list("name", "version"))
    apply(SYSTEM, changed)
    assert current() == parse(changed)
    assert Node.objects.get(name="ax-1").version == versions["ax-1"] + 1
    assert not Stamp.objects.filter(name="west").exists()


def test_what_agents_report_is_no_part_of_it_and_stays(world: World) -> None:
    apply(SYSTEM, changes.export(SYSTEM).replace("ax-1:", "ax-1:\n        memory: 2T"))
    node = refreshed(world.here)
    assert (node.memory_bytes, node.cpus, node.state) == (2 << 40, 64, "ready")
    assert node.control_token
    apply(SYSTEM, changes.export(SYSTEM).replace("memory: 2 TiB", "shards_max: 3"))
    assert (refreshed(world.here).memory_bytes, refreshed(world.here).shards_max) == (1 << 40, 3)


@pytest.fixture
def streams_on_ax_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(kind: nodes.Kind, names: Collection[str]) -> dict[str, int]:
        return {"ax-1": 3} if kind == "node" and "ax-1" in names else {}

    monkeypatch.setattr(nodes, "_streams", [tell])


def test_nothing_is_done_where_streams_would_lose_their_path(
    world: World, streams_on_ax_1: None
) -> None:
    before = changes.export(SYSTEM)
    without = dump({thing: said for thing, said in current().items() if thing != ("node", "ax-1")})
    for text in (without, before.replace("wio: 16", "wio: 4")):
        found, _ = preview(SYSTEM, text)
        assert [change.refused for change in found.refused] == ["3 streams run there. Drain it first."]
        with pytest.raises(Impossible, match="3 streams run there"):
            apply(SYSTEM, text)
        assert changes.export(SYSTEM) == before
    apply(SYSTEM, before.replace("ax-1:", "ax-1:\n        memory: 2T"))  # that hurts no stream


def test_what_somebody_has_not_seen_is_not_overwritten(world: World) -> None:
    _, seen = preview(SYSTEM, FLEET)
    apply(SYSTEM, changes.export(SYSTEM) + "  north: {}\n")
    with pytest.raises(Moved):
        apply(SYSTEM, FLEET, seen=seen)
    _, seen = preview(SYSTEM, FLEET)
    apply(SYSTEM, FLEET, seen=seen)
    assert current() == parse(FLEET)


def test_an_import_can_be_taken_back_as_long_as_nothing_has_moved(people: People) -> None:
    admin = people.principal("platform_admin")
    apply(admin, FLEET)
    first = current()
    apply(admin, FLEET.replace("512G", "1T").replace("  west: {}", "  north: {}"))
    entry = AuditEntry.objects.filter(action="fleet.import").latest("id")
    audit.undo(admin, entry, "")
    assert current() == first
    apply(admin, FLEET.replace("512G", "2T"))
    entry = AuditEntry.objects.filter(action="fleet.import").latest("id")
    apply(admin, FLEET.replace("512G", "3T"))
    with pytest.raises(audit.CannotUndo, match="node ax-1 has changed since"):
        audit.undo(admin, entry, "")


@pytest.mark.slow
def test_a_thousand_nodes_are_imported_in_few_queries(
    db: None, django_assert_max_num_queries: Any
) -> None:
    lines = [
        f"      ax-{index}: {{nics: {{eth0: {{leaf: leaf-{index % 20}}}}}}}" for index in range(1000)
    ]
    leaves = ", ".join(f"leaf-{index}: {{}}" for index in range(20))
    text = "\n".join(["stamps:", "  east:", f"    leaves: {{{leaves}}}", "    nodes:", *lines])
    with django_assert_max_num_queries(60):
        apply(SYSTEM, text)
    assert Node.objects.count() == Nic.objects.count() == 1000
    with django_assert_max_num_queries(10):
        current()


def test_the_command_imports_exports_and_says_what_is_wrong(db: None, tmp_path: Path) -> None:
    file, said = tmp_path / "fleet.yaml", io.StringIO()
    file.write_text(FLEET)
    call_command("fleet", "import", str(file), "--dry-run", stdout=said)
    assert "+ node ax-1" in said.getvalue()
    assert not Stamp.objects.exists()
    call_command("fleet", "import", str(file), stdout=said)
    assert "8 added" in said.getvalue()
    out = io.StringIO()
    call_command("fleet", "export", stdout=out)
    assert parse(out.getvalue()) == parse(FLEET)
    file.write_text("stamps:\n  East: {}")
    with pytest.raises(CommandError, match="line 2, stamps: 'East' is no name"):
        call_command("fleet", "import", str(file))


def test_over_rest(people: People, api_of: Callable[..., Client]) -> None:
    api = api_of(people.platform_admin)
    place = "/api/v1/fleet/description"

    def put(yaml: str, if_match: str = "*", query: str = "") -> tuple[int, dict[str, object]]:
        answer = api.put(
            f"{place}{query}",
            {"yaml": yaml},
            content_type="application/json",
            headers={"If-Match": if_match},
        )
        return answer.status_code, answer.json()

    status, answer = put(FLEET, query="?validate_only=true")
    assert (status, answer["applied"], len(answer["changes"])) == (200, False, 8)  # type: ignore[arg-type]
    assert not Box.objects.exists()
    tag = api.get(place)["ETag"]
    assert put(FLEET, tag)[0] == 200
    assert put(FLEET.replace("512G", "1T"), tag)[0] == 412
    status, answer = put("stamps:\n  East: {}")
    assert (status, answer["reason"]) == (422, "InvalidRequest")
    assert "line 2" in str(answer["errors"])
    assert parse(api.get(place).json()["yaml"]) == parse(FLEET)
    assert (Leaf.objects.count(), SpineLink.objects.count()) == (2, 1)


def test_the_etag_of_a_description_matches_whatever_it_says_of_nodes(
    people: People, api_of: Callable[..., Client]
) -> None:
    """PostgreSQL keeps the keys of a JSON object in an order of its own."""
    text = FLEET.replace('labels: {rack: "7"}', 'labels: {zone: a, rack: "7"}')
    apply(SYSTEM, text)
    api, place = api_of(people.platform_admin), "/api/v1/fleet/description"
    got = api.get(place)
    body = {"yaml": got.json()["yaml"].replace("512 GiB", "256GiB")}
    seen = {"If-Match": got["ETag"]}
    put = api.put(place, body, content_type="application/json", headers=seen)
    assert put.status_code == 200, put.content
    assert [change["name"] for change in put.json()["changes"]] == ["ax-1"]
    late = api.put(place, body, content_type="application/json", headers=seen)
    assert late.status_code == 412, "somebody has changed it since"


def test_only_a_platform_admin_imports(people: People) -> None:
    for name in ("platform_viewer", "platform_on_call"):
        assert changes.export(people.principal(name))
        with pytest.raises(Refused):
            preview(people.principal(name), FLEET)
        with pytest.raises(Refused):
            apply(people.principal(name), FLEET)


def test_the_difference_of_two_fleets_is_pure() -> None:
    assert difference({}, {}).changes == []


@pytest.mark.django_db
def test_other_spellings_of_the_same_size_are_no_difference() -> None:
    apply(SYSTEM, FLEET)
    node = Node.objects.get(name="ax-1")
    Node.objects.filter(pk=node.pk).update(
        declared=node.declared | {"tier2": node.declared["tier2"] | {"cap": "2T"}}
    )
    spelled = FLEET.replace("512G", "512GiB").replace("2048G", str(2 << 40))
    assert preview(SYSTEM, spelled)[0].changes == []
    assert "cap: 2 TiB" in changes.export(SYSTEM)


@pytest.mark.django_db
def test_a_front_of_tier_2_is_described_told_and_shown(people: People, client: Client) -> None:
    admin = people.principal("platform_admin")
    front = "{path: /nvme/kv, cap: 512G, writes: back}"
    text = FLEET.replace("cap: 2048G, shared: false", f"cap: 2048G, front: {front}")
    apply(admin, text)
    said = Node.objects.get(name="ax-1").declared["tier2"]
    assert said["front"] == {"path": "/nvme/kv", "cap": "512 GiB", "writes": "back"}
    told = json.loads(Compiler("node").compile("ax-1", {}).content)["tier2"]
    assert told["front"] == {"path": "/nvme/kv", "cap_bytes": 512 << 30, "writes": "back"}
    exported = changes.export(SYSTEM)
    assert preview(SYSTEM, exported)[0].changes == []
    assert parse(exported)["node", "ax-1"]["tier2"] == said
    client.force_login(people.platform_admin)
    page = " ".join(client.get("/fleet/nodes/ax-1", follow=True).content.decode().split())
    assert "<code>/nvme/kv</code>" in page
    assert "at most 512 GiB, writes back" in page


@pytest.mark.django_db
def test_gb_is_a_power_of_ten(people: People) -> None:
    apply(people.principal("platform_admin"), FLEET.replace("512G", "512GB"))
    assert Node.objects.get(name="ax-1").memory_bytes == 512 * 10**9


@pytest.mark.django_db
def test_agents_are_told_of_the_tier_2_that_is_described(people: People) -> None:
    admin = people.principal("platform_admin")

    def tier2(name: str) -> Any:
        """Without what policies add of orgs."""
        found = json.loads(Compiler("node").compile(name, {}).content).get("tier2")
        return found and {what: found[what] for what in found if not what.startswith("org_")}

    apply(admin, FLEET)
    kept = {"kind": "posix", "path": "/mnt/kv", "shared": False, "cap_bytes": 2 << 40}
    assert kept.items() <= tier2("ax-1").items()  # beside what policies say of it
    assert tier2("ax-2") is None
    assert not Change.objects.exists(), "nobody is there to be told"
    apply(admin, FLEET.replace("2048G", "1T"))
    assert Change.objects.get().targets == [["node", "ax-1"]]
    assert tier2("ax-1")["cap_bytes"] == 1 << 40
    audit.undo(admin, AuditEntry.objects.latest("id"), "")
    assert tier2("ax-1") == kept


def test_what_a_session_needs_is_not_removed(world: World) -> None:
    session = Session.objects.create(name="prod", boxes_desired=1, boxes_min=1, boxes_increment=1)
    SessionBox.objects.create(session=session, box=world.box)
    before = current()
    without = dump({thing: said for thing, said in before.items() if thing != ("box", "cs-1")})
    told = "It is of session prod. Shrink or delete that first."
    assert [change.refused for change in preview(SYSTEM, without)[0].refused] == [told]
    with pytest.raises(Impossible, match=told):
        apply(SYSTEM, without)
    assert current() == before


def test_a_box_that_is_being_drained_is_not_removed(world: World) -> None:
    box_drains.drain(SYSTEM, "cs-1")
    without = dump({thing: said for thing, said in current().items() if thing != ("box", "cs-1")})
    with pytest.raises(Impossible, match="“Drain box cs-1” is not done yet"):
        apply(SYSTEM, without)


def test_a_node_that_is_being_upgraded_is_not_removed(world: World) -> None:
    upgraded = drains.upgrade(SYSTEM, "ax-1")
    while operations.advance(upgraded.pk):
        pass
    without = dump({thing: said for thing, said in current().items() if thing != ("node", "ax-1")})
    with pytest.raises(Impossible, match="“Upgrade ax-1” is not done yet"):
        apply(SYSTEM, without)


SNIPPET = re.compile(r"`(?:tier2|front): (\{[^`…]*\})`")


def test_what_docs_say_of_tier_2_is_known_to_a_description() -> None:
    pages = [*(PROJECT / "docs").glob("*.md"), *(PROJECT / "docs" / "runbooks").glob("*.md")]
    found = [
        (page.name, one)
        for page in pages
        for one in [
            *map(yaml.safe_load, SNIPPET.findall(page.read_text())),
            *({name: None} for name in re.findall(r"`(\w+)` of `tier2`", page.read_text())),
        ]
    ]
    assert {name for name, _ in found} >= {"tier2-near-cap.md", "tier2-front-waiting.md", "sessions.md"}
    known = {*tier2.FIELDS, *tier2.FRONT_FIELDS, tier2.FRONT}
    assert [(name, one) for name, one in found if not one.keys() <= known] == []
    assert {one["writes"] for _, one in found if "writes" in one} <= set(tier2.WRITES)
