"""Stores that a node had: in its document until its agent, a real one here, has found them empty."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.test import Client

from console.accounts.principal import SYSTEM
from console.audit.models import AuditEntry
from console.audit.services import undo
from console.control import rounds
from console.control import services as control
from console.control.documents import Compiler
from console.fleet import retired_stores
from console.fleet.descriptions import changes, tier2
from console.fleet.models import Node, Removed, RetiringStore
from console.fleet.nodes import Impossible
from console.orgs.models import Org
from console.orgs.services import for_change
from console.policies.org_keys import keys_of
from console.policies.services import set_policy
from kvss_agent.security.identity import ProcessIdentity
from swdriver_shim.keys import isolation_tag
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.conftest import People
from tests.console.fleet.worlds import World
from tests.html import compact
from tests.kvss_agent.process import AgentProcess, agent
from tests.live import wait_until

pytestmark = pytest.mark.django_db

FLEET = """
stamps:
  east:
    leaves:
      leaf-1: {{spine_links: {{leaf-1-up: {{spine: spine-1, gbits: 400}}}}}}
      leaf-2:
    nodes:
      ax-1: {{nics: {{eth0: {{leaf: leaf-1}}}}{}}}
      ax-2: {{nics: {{eth0: {{leaf: leaf-2}}}}}}
    boxes:
      cs-1:
        domains:
          - {{wio: 8, leaves: [leaf-2]}}
          - {{wio: 8, leaves: [leaf-1]}}
          - {{wio: 8, leaves: [leaf-2]}}
          - {{wio: 8, leaves: [leaf-1]}}
"""


def describe(path: Path | str | None, **more: object) -> None:
    said = f", tier2: {json.dumps({'kind': 'posix', 'path': str(path), 'cap': '1G', **more})}"
    changes.apply(SYSTEM, FLEET.format(said if path else ""))


def told() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Compiler("node").compile("ax-1", {}).content)
    return found


def may_stay(people: People, slug: str) -> str:
    """The tag of an org that may store there: what is of nobody, or of who may not, goes at once."""
    admin = people.principal("org_admin")
    with transaction.atomic():
        policies = OrgPolicies(policy=Policy(tiers=Tiers.TIER2))
        set_policy(admin, for_change(admin, slug), policies, reason="stays")
    org = Org.objects.get(slug=slug)
    return isolation_tag(slug, bytes(keys_of([org])[org.pk].secret)).hex()


@pytest.fixture
def there(world: World, tmp_path: Path) -> Iterator[AgentProcess]:
    """The agent of ax-1."""
    with agent(tmp_path / "agent") as running:
        Node.objects.filter(name="ax-1").update(
            control_url=str(running.http.base_url),
            control_token=(running.directory / "token").read_text().strip(),
            public_key=ProcessIdentity.load(running.directory, "node:ax-1").public_key_pem,
        )
        yield running


@pytest.mark.slow
def test_a_store_stays_in_the_document_until_its_agent_has_found_it_empty(
    there: AgentProcess, tmp_path: Path, people: People, api_of: Callable[..., Client]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    acme = may_stay(people, "acme")
    removed = Removed.objects.create(kind="node", name="ax-0", stores=[f"posix:{old}", "s3:eu/kv"])
    describe(old)
    rounds.push([control.ALL_NODES])
    wait_until("it is used", old.exists)
    left = old / ("0" * 32) / acme / "00" / f"{'00' * 16}.s"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(4096))
    describe(new)
    [said] = told()["retiring"]
    assert (said["path"], said["cap_bytes"]) == (str(old), 1 << 30)
    assert "org_ttl_seconds" in said, "what lies there expires as it does elsewhere"

    def look() -> dict[str, Any]:
        rounds.reconcile()
        retired_stores.look()
        found: dict[str, Any] = api.get("/api/v1/nodes/ax-1").json()
        return found

    api = api_of(people.platform_admin)
    wait_until("its files are counted", lambda: look()["retiring_stores"][0]["files"] == 1)
    page = api.get("/api/v1/nodes/ax-1").json()["retiring_stores"][0]
    assert (page["place"], page["state"], page["bytes"]) == (f"posix:{old}", "retiring", 4096)
    place = f"/api/v1/nodes/ax-1/retiring-stores/{page['id']}/drain"
    viewer = api_of(people.platform_on_call)
    assert viewer.put(place, {}, content_type="application/json").status_code == 403
    assert api.put(place, {"reason": "x"}, content_type="application/json").status_code == 200
    wait_until("it is gone", lambda: look()["retiring_stores"] == [])
    assert not left.exists()
    assert "retiring" not in told()
    removed.refresh_from_db()
    assert removed.stores == ["s3:eu/kv"], "of a node that had shared it, too"
    assert AuditEntry.objects.filter(action="node.drain_store").count() == 1


def test_a_page_says_what_is_left_and_lets_an_admin_remove_it(
    world: World, people: People, browser_of: Callable[..., Client]
) -> None:
    store = RetiringStore.objects.create(
        node=world.here,
        place="posix:/mnt/old",
        said={"kind": "posix", "path": "/mnt/old", "cap": "1G"},
        since=world.here.state_since,
        state="retiring",
        files=3,
        bytes=12288,
    )
    admin = browser_of(people.platform_admin)
    page = compact(admin.get("/fleet/nodes/ax-1/"))
    assert "posix:/mnt/old" in page
    for said in ("Retired tier-2 locations", "3 files, 12 KiB", "expire and are purged"):
        assert said in page
    viewed = compact(browser_of(people.platform_viewer).get("/fleet/nodes/ax-1/"))
    assert "Delete files" in page
    assert "Delete files" not in viewed
    admin.post(f"/fleet/nodes/ax-1/stores/{store.pk}/drain/")
    assert b"deleting files" in admin.get("/fleet/nodes/ax-1/").content


def test_a_difference_says_what_becomes_of_the_store_before(world: World) -> None:
    Node.objects.filter(name="ax-1").update(public_key="a key")
    describe("/mnt/old")
    described = FLEET.format(", tier2: {kind: posix, path: /mnt/new, cap: 1G}")
    found, _ = changes.preview(SYSTEM, described)
    [change] = found.changes
    assert "/mnt/old is retiring" in change.follows
    changes.apply(SYSTEM, described)
    other_size, _ = changes.preview(SYSTEM, described.replace("1G", "2G"))
    assert [one.follows for one in other_size.changes] == [""]


def test_without_tier_2_the_store_before_is_retiring_and_a_path_put_back_is_in_use(
    world: World, people: People
) -> None:
    Node.objects.update(public_key="a key")
    describe("/mnt/a")
    assert not RetiringStore.objects.exists(), "nothing was before"
    describe("/mnt/a/", cap="2G")
    assert not RetiringStore.objects.exists(), "it is the same place"
    describe(None)
    assert [store.place for store in RetiringStore.objects.all()] == ["posix:/mnt/a"]
    assert "tier2" not in told()
    describe("/mnt/a")
    assert not RetiringStore.objects.exists()
    describe("/mnt/b")
    undo(people.principal("platform_admin"), AuditEntry.objects.latest("id"), "")
    assert [store.place for store in RetiringStore.objects.all()] == ["posix:/mnt/b"]


@pytest.mark.parametrize("front", ["/mnt/a", "/mnt/a/", "/mnt/a/front", "/mnt"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_front_is_not_where_an_earlier_store_is_emptied(
    world: World, front: str, is_new: object
) -> None:
    """Its files would be removed with those of the store, also if that is retiring from now on only."""
    Node.objects.update(public_key="a key")
    describe("/mnt/a")
    if not is_new:
        describe("/srv/b")
    before = Node.objects.get(name="ax-1").declared
    with pytest.raises(Impossible, match=r"^.*The front /mnt\S* is where its earlier store /mnt/a"):
        describe("/srv/b", front={"path": front, "cap": "1M"})
    assert Node.objects.get(name="ax-1").declared == before
    describe("/srv/b", front={"path": "/mnt/abc", "cap": "1M"})


def test_nodes_that_have_not_joined_have_no_files(world: World) -> None:
    Node.objects.filter(name="ax-1").update(
        joined_at=None, heartbeat_sha256=None, control_url="", state="lost", held_state="ready"
    )
    describe("/mnt/a")
    describe("/mnt/b")
    assert not RetiringStore.objects.exists()


def test_a_change_whose_files_nobody_would_look_after_is_refused(world: World) -> None:
    describe("/mnt/a")
    with pytest.raises(Impossible, match="Update the agent, and let it join again"):
        describe("/mnt/b")
    Node.objects.update(public_key="a key")
    with pytest.raises(Impossible, match="/mnt/a/deeper and its earlier store /mnt/a lie within"):
        describe("/mnt/a/deeper")
    for number in range(retired_stores.STORES_MAX):
        describe(f"/mnt/n{number}")
    with pytest.raises(Impossible, match="8 earlier stores of it are not empty yet"):
        describe("/mnt/c")


@pytest.mark.slow
def test_what_an_agent_says_of_an_earlier_document_is_not_believed(
    there: AgentProcess, tmp_path: Path
) -> None:
    """It has found the store empty; since then it was used again, and is retiring anew."""
    old, new = tmp_path / "old", tmp_path / "new"
    describe(old)
    describe(new)
    rounds.reconcile()

    def is_empty() -> bool:
        rounds.reconcile()
        return bool([one for one in there.observed()["tier2"]["retiring"] if one["state"] == "empty"])

    wait_until("it is empty", is_empty)
    describe(old)
    describe(new)
    retired_stores.look()
    assert RetiringStore.objects.count() == 1
    wait_until("it is told", lambda: rounds.reconcile() == 0)

    def is_gone() -> bool:
        retired_stores.look()
        return not RetiringStore.objects.exists()

    wait_until("it is empty again", is_gone)


@pytest.mark.slow
def test_a_disk_of_its_own_that_is_empty_says_nothing_of_anothers(
    there: AgentProcess, tmp_path: Path
) -> None:
    """It only has the same path."""
    old, new = tmp_path / "old", tmp_path / "new"
    removed = Removed.objects.create(kind="node", name="ax-0", stores=[f"posix:{old}"])
    describe(old, shared=False)
    describe(new)

    def is_gone() -> bool:
        rounds.reconcile()
        retired_stores.look()
        return not RetiringStore.objects.exists()

    wait_until("it is empty", is_gone)
    removed.refresh_from_db()
    assert removed.stores == [f"posix:{old}"]


# Places where other nodes store, too


def posix(path: str, **more: Any) -> dict[str, Any]:
    return {"kind": "posix", "path": path, "cap": "1G", **more}


def s3(bucket: str, prefix: str = "", **more: Any) -> dict[str, Any]:
    return {
        "kind": "s3",
        "bucket": bucket,
        "cap": "1G",
        **({"prefix": prefix} if prefix else {}),
        **more,
    }


def described(**tiers2: dict[str, Any] | None) -> str:
    """The fleet, with what is said of tier 2 of ax_1 and ax_2; of ax_3, it is there as well."""
    text = FLEET.format("")
    for name, said in tiers2.items():
        node = name.replace("_", "-")
        more = f", tier2: {json.dumps(said)}" if said else ""
        leaf = "leaf-1" if name == "ax_1" else "leaf-2"
        bare = f"      {node}: {{nics: {{eth0: {{leaf: {leaf}}}}}}}\n"
        with_it = f"      {node}: {{nics: {{eth0: {{leaf: {leaf}}}}}{more}}}\n"
        text = (
            text.replace(bare, with_it)
            if bare in text
            else text.replace("    boxes:", f"{with_it}    boxes:")
        )
    return text


@pytest.fixture
def knows(world: World) -> None:
    """Agents that look after stores. ax-1 has joined, and ax-2 has not."""
    Node.objects.update(public_key="a key")


def leave(old: dict[str, Any], other: dict[str, Any] | None) -> RetiringStore:
    """ax-1 had this store, and ax-2 has the other one."""
    changes.apply(SYSTEM, described(ax_1=old, ax_2=other))
    changes.apply(SYSTEM, described(ax_1=None, ax_2=other))
    return RetiringStore.objects.get()


def drain(store: RetiringStore, **more: Any) -> RetiringStore:
    return retired_stores.drain(SYSTEM, store.node, store.pk, **more)


@pytest.mark.parametrize(
    ("one", "other", "may"),
    [
        (posix("/mnt/kv"), posix("/mnt/kv"), True),
        (posix("/mnt/kv"), posix("/mnt//./kv/x/.."), True),
        (posix("/mnt/kv"), posix("//mnt/kv/deeper"), True),
        (posix("/mnt/kv/deeper"), posix("/mnt/kv"), True),
        (posix("/mnt/kv"), posix("/"), True),
        (posix("/mnt/kv"), posix("/mnt/kv2"), False),
        (posix("/mnt/kv", shared=False), posix("/mnt/kv"), True),
        (posix("/mnt/kv", shared=False), posix("/mnt/kv", shared=False), False),
        (posix("/mnt/kv"), s3("mnt", "kv"), False),
        (s3("kv"), s3("kv"), True),
        (s3("kv", region="eu-central-1"), s3("kv"), True),
        (s3("kv", "a"), s3("kv", "/a/b/"), True),
        (s3("kv", "a"), s3("kv"), True),
        (s3("kv", "a"), s3("kv", "ab"), False),
        (s3("kv"), s3("kv", endpoint="https://s3.example.org"), False),
        (
            s3("kv", endpoint="https://s3.example.org/"),
            s3("kv", endpoint="https://s3.example.org"),
            True,
        ),
        (s3("kv", shared=False), s3("kv", shared=False), True),
    ],
)
def test_places_whose_files_may_be_the_same(
    one: dict[str, Any], other: dict[str, Any], *, may: bool
) -> None:
    assert tier2.may_share_files(one, other) is may
    assert tier2.may_share_files(other, one) is may


@pytest.mark.usefixtures("knows")
def test_files_of_other_nodes_are_removed_only_if_somebody_says_so(
    people: People, api_of: Callable[..., Client]
) -> None:
    store = leave(posix("/mnt/kv"), posix("/mnt/kv/deeper"))
    place = f"/api/v1/nodes/ax-1/retiring-stores/{store.pk}/drain"
    api = api_of(people.platform_admin)
    answer = api.put(place, {}, content_type="application/json")
    assert (answer.status_code, "tier 2 of ax-2" in answer.json()["detail"]) == (409, True)
    store.refresh_from_db()
    assert not store.is_drained
    assert not AuditEntry.objects.filter(action="node.drain_store").exists()
    answer = api.put(place, {"also_others": True}, content_type="application/json")
    assert answer.json()["retiring_stores"][0]["drains"] is True
    entry = AuditEntry.objects.get(action="node.drain_store")
    assert entry.after == {"place": "posix:/mnt/kv", "also_of": ["ax-2"]}


@pytest.mark.usefixtures("knows")
def test_a_bucket_that_may_be_the_one_in_use_by_another_name_is_drained_only_if_somebody_says_so() -> (
    None
):
    """The agent can't tell, and would empty the store in use."""
    changes.apply(SYSTEM, described(ax_1=s3("kv", endpoint="https://10.0.0.1")))
    changes.apply(SYSTEM, described(ax_1=s3("kv", "a", endpoint="https://s3.example.org")))
    [store] = RetiringStore.objects.all()
    with pytest.raises(Impossible, match="tier 2 of ax-1"):
        drain(store)
    assert drain(store, also_others=True).is_drained


@pytest.mark.usefixtures("knows")
def test_disks_of_their_own_are_drained_without_asking() -> None:
    own = posix("/mnt/disk", shared=False)
    drain(leave(own, own))
    entry = AuditEntry.objects.get(action="node.drain_store")
    assert entry.after == {"place": "posix:/mnt/disk"}


@pytest.mark.usefixtures("knows")
def test_stores_that_others_no_longer_use_do_not_keep_one_from_being_drained() -> None:
    Node.objects.filter(name="ax-2").update(
        joined_at="2026-01-01T00:00Z", heartbeat_sha256=b"", control_url="x"
    )
    changes.apply(SYSTEM, described(ax_1=posix("/mnt/kv"), ax_2=posix("/mnt/kv")))
    changes.apply(SYSTEM, described())
    first, second = RetiringStore.objects.order_by("node__name")
    drain(first)
    drain(second)


@pytest.mark.usefixtures("knows")
def test_a_page_names_the_nodes_whose_files_would_go(
    people: People, browser_of: Callable[..., Client]
) -> None:
    store = leave(posix("/mnt/kv"), posix("/mnt/kv"))
    admin = browser_of(people.platform_admin)
    page = admin.get("/fleet/nodes/ax-1/").content.decode()
    assert "tier 2 of ax-2" in page
    assert 'name="also_others"' in page
    place = f"/fleet/nodes/ax-1/stores/{store.pk}/drain/"
    assert b"tier 2 of ax-2" in admin.post(place, follow=True).content
    store.refresh_from_db()
    assert not store.is_drained
    admin.post(place, {"also_others": "on"})
    store.refresh_from_db()
    assert store.is_drained


@pytest.mark.usefixtures("knows")
def test_a_place_that_is_being_emptied_is_nobody_elses_until_it_is() -> None:
    kv = posix("/mnt/kv")
    drain(leave(kv, None))
    for arriving in ({"ax_2": kv}, {"ax_3": posix("/mnt/kv/deeper")}):
        with pytest.raises(Impossible, match="/mnt/kv is being emptied for ax-1"):
            changes.apply(SYSTEM, described(**arriving))
    changes.apply(SYSTEM, described(ax_1=kv, ax_2=kv))  # it is in use again


@pytest.mark.usefixtures("knows")
def test_who_is_there_already_stays_while_a_place_is_emptied() -> None:
    drain(leave(posix("/mnt/kv"), posix("/mnt/kv")), also_others=True)
    changes.apply(SYSTEM, described(ax_2=posix("/mnt/kv", durable=True)))
