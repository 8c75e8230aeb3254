"""The console's authority: its roots, what it issues to whom, and how a root is replaced."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from django.db import connection, transaction
from django.db.utils import IntegrityError
from django.http import Http404
from django.test import Client
from django.utils import timezone

from console.accounts.principal import Refused
from console.audit.models import AuditEntry
from console.authority import capabilities, client, services
from console.authority.models import Authority, State
from console.authority.services import Following
from console.authority.views import SHOWN_MAX, named
from console.environment import PROJECT
from console.fleet.membership import heartbeats, joins
from console.fleet.membership.certification import certify
from console.fleet.models import Driver, Node, Watch
from console.fleet.nodes import Impossible, InProgress
from console.orgs import services as orgs
from console.policies import callers
from kvss_agent.process.membership import credential
from kvss_agent.security.certificates import (
    Role,
    is_issued_by,
    peer_of,
    read_authorities,
    read_certificate,
)
from kvss_agent.security.identity import ProcessIdentity
from telemetry.credentials import password
from tests.conftest import People
from tests.console.fleet.worlds import (
    CONTROL_TOKEN,
    DRIVER_FACTS,
    FACTS,
    PLUGGED,
    World,
    make_world,
    new_token,
    refreshed,
)

OF_AX_2 = credential(CONTROL_TOKEN, "node:ax-2")


@pytest.fixture
def world(db: None) -> World:
    return make_world()


@pytest.fixture
def own(tmp_path: Path) -> ProcessIdentity:
    return ProcessIdentity.load(tmp_path, "node:whoever")


def joined(own: ProcessIdentity) -> Node:
    request = own.certificate_request()
    return joins.join_node(new_token(), "ax-2", CONTROL_TOKEN, FACTS, PLUGGED, request)


def at_once(before: timedelta = services.SETTLE) -> None:
    Authority.objects.update(state_since=timezone.now() - before)


def test_its_key_is_sealed_and_in_no_trail(db: None) -> None:
    services.bundle()
    with connection.cursor() as cursor:
        cursor.execute("SELECT key, certificate FROM authority_authority")
        [(key, certificate)] = cursor.fetchall()
    assert "PRIVATE KEY" not in key
    assert "BEGIN CERTIFICATE" in certificate
    assert "PRIVATE KEY" in str(Authority.objects.get().key)
    assert "PRIVATE KEY" not in str([entry.after for entry in AuditEntry.objects.all()])


def test_a_certificate_is_made_from_what_has_joined_and_not_from_what_a_request_says(
    world: World, own: ProcessIdentity
) -> None:
    joined(own)
    issued = certify(Role.NODE, "ax-2", OF_AX_2, own.certificate_request())
    assert issued
    certificate = read_certificate(issued.certificate)
    peer = peer_of(certificate)
    assert peer
    assert (peer.topic, certificate.public_key()) == ("node:ax-2", own.key.public_key())
    assert "whoever" not in certificate.subject.rfc4514_string()
    assert is_issued_by(certificate, read_authorities(issued.bundle.authorities))
    life = certificate.not_valid_after_utc - timezone.now()
    assert timedelta(days=6) < life <= timedelta(days=7)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert not constraints.value.ca


def test_only_who_is_known_by_its_heartbeats_gets_one_and_only_for_its_key(
    world: World, own: ProcessIdentity, tmp_path: Path
) -> None:
    joined(own)
    request = own.certificate_request()
    for kind, name, shown in (
        (Role.NODE, "ax-2", "tgh_nonsense"),
        (Role.NODE, "ax-2", credential(CONTROL_TOKEN, "driver:ax-2")),
        (Role.NODE, "ax-1", OF_AX_2),
        (Role.DRIVER, "ax-2", OF_AX_2),
        (Role.NODE, "nobody", OF_AX_2),
    ):
        assert certify(kind, name, shown, request) is None
    other = ProcessIdentity.load(tmp_path / "other", "node:ax-2")
    with pytest.raises(Impossible, match="another key"):
        certify(Role.NODE, "ax-2", OF_AX_2, other.certificate_request())
    with pytest.raises(Impossible, match="certificate request"):
        certify(Role.NODE, "ax-2", OF_AX_2, "nonsense")


def test_one_that_joined_before_there_were_keys_binds_its_key_once(
    world: World, own: ProcessIdentity, tmp_path: Path
) -> None:
    node = joins.join_node(new_token(), "ax-2", CONTROL_TOKEN, FACTS, PLUGGED)
    assert node.public_key == ""
    assert certify(Role.NODE, "ax-2", OF_AX_2, own.certificate_request())
    assert refreshed(node).public_key == own.public_key_pem
    assert AuditEntry.objects.filter(action="node.key", object_id="ax-2").count() == 1
    other = ProcessIdentity.load(tmp_path / "other", "node:ax-2")
    with pytest.raises(Impossible, match="another key"):
        certify(Role.NODE, "ax-2", OF_AX_2, other.certificate_request())


def test_who_has_joined_anew_elsewhere_counts_and_the_former_one_does_not(
    world: World, own: ProcessIdentity, tmp_path: Path
) -> None:
    joined(own)
    Node.objects.filter(name="ax-2").update(state="lost", held_state="ready")
    new = ProcessIdentity.load(tmp_path / "new", "node:ax-2")
    joins.join_node(new_token(), "ax-2", "n" * 32, FACTS, PLUGGED, new.certificate_request())
    assert certify(Role.NODE, "ax-2", OF_AX_2, own.certificate_request()) is None
    shown = credential("n" * 32, "node:ax-2")
    assert certify(Role.NODE, "ax-2", shown, new.certificate_request())
    node = Node.objects.get(name="ax-2")
    assert client.server_name(node.public_key) == client.server_name(new.public_key_pem)
    assert client.server_name(node.public_key) != client.server_name(own.public_key_pem)


@pytest.mark.django_db(transaction=True)
def test_of_many_that_need_the_first_root_at_once_one_makes_it() -> None:
    together, digests = threading.Barrier(4), set()

    def need() -> None:
        together.wait(30)
        digests.add(services.bundle().digest)
        connection.close()

    threads = [threading.Thread(target=need) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(digests) == 1
    assert Authority.objects.count() == 1


def test_there_is_one_that_signs(db: None) -> None:
    services.bundle()
    row = Authority.objects.get()
    row.pk, row.fingerprint = None, "f" * 64
    with pytest.raises(IntegrityError):
        row.save()


def follow(node: Node) -> None:
    """Its next heartbeats say that it believes what it should."""
    Node.objects.filter(pk=node.pk).update(trusts=services.bundle().digest)


def test_a_root_is_replaced_in_steps_that_wait_for_all_that_are_alive(
    world: World, own: ProcessIdentity, people: People
) -> None:
    node = joined(own)
    lost = ProcessIdentity.load(own.state_dir / "lost", "driver:lost")
    request = lost.certificate_request()
    joins.join_driver(new_token("driver"), "gone", CONTROL_TOKEN, DRIVER_FACTS, None, request)
    Driver.objects.filter(name="gone").update(lost_at=timezone.now())
    follow(node)
    before, first = services.bundle(), services.issue(Role.NODE, "ax-2", own.public_key_pem)
    context = client.context()
    services.advance()
    assert services.bundle() == before, "nothing is due"

    made = services.begin_rotation(people.principal("platform_admin"), "because")
    entry = AuditEntry.objects.get(action="authority.rotate")
    assert (entry.reason, entry.actor_name) == ("because", people.platform_admin.username)
    with pytest.raises(InProgress, match="already"):
        services.begin_rotation(people.principal("platform_admin"))
    announced = services.bundle()
    assert len(read_authorities(announced.authorities)) == 2
    issued = services.issue(Role.NODE, "ax-2", own.public_key_pem)
    assert is_issued_by(read_certificate(issued.certificate), read_authorities(before.authorities))
    at_once()
    services.advance()
    assert services.bundle() == announced, "ax-2 has not heard of it"
    assert services.following().behind == ["node ax-2"]

    follow(node)
    services.advance()
    signing = services.bundle()
    assert len(read_authorities(signing.authorities)) == 2
    assert signing.digest != announced.digest, "so that everybody renews"
    issued = services.issue(Role.NODE, "ax-2", own.public_key_pem)
    assert not is_issued_by(read_certificate(issued.certificate), read_authorities(before.authorities))
    assert is_issued_by(read_certificate(first.certificate), read_authorities(signing.authorities))
    assert client.context() is not context, "also the console itself"

    follow(node)
    services.advance()
    assert services.bundle() == signing, "what the console has begun is let finish"
    at_once()
    services.advance()
    after = read_authorities(services.bundle().authorities)
    assert [x509.Certificate.fingerprint(one, one.signature_hash_algorithm).hex() for one in after] == [  # type: ignore[arg-type]
        made.fingerprint
    ]
    assert not is_issued_by(read_certificate(first.certificate), after)
    removed = Authority.objects.get(state=State.REMOVED)
    assert removed.key == ""
    follow(node)
    services.advance()
    assert Authority.objects.filter(state=State.SIGNING).get() == made


def test_nobody_waits_for_a_node_in_maintenance_that_is_off_and_the_page_says_so(
    world: World, own: ProcessIdentity, people: People, browser_of: Callable[..., Client]
) -> None:
    node, now = joined(own), timezone.now()
    Node.objects.filter(pk=node.pk).update(state="maintenance")
    gone = ProcessIdentity.load(own.state_dir / "gone", "driver:gone").certificate_request()
    joins.join_driver(new_token("driver"), "gone", CONTROL_TOKEN, DRIVER_FACTS, None, gone)
    Driver.objects.filter(name="gone").update(lost_at=now)
    services.begin_rotation(people.principal("platform_admin"))
    at_once()
    Watch.objects.create(pk=1, listening_since=now - timedelta(hours=1), swept_at=now)
    assert services.following().behind == ["node ax-2"], "it is in maintenance, and is heard of"

    long_ago = now - timedelta(seconds=heartbeats.lost_after() + 1)
    Node.objects.filter(pk=node.pk).update(last_heartbeat_at=long_ago)
    Watch.objects.update(listening_since=now)
    assert services.following().behind == ["node ax-2"], "the console was away itself"
    Watch.objects.update(listening_since=now - timedelta(hours=1))
    assert services.following() == Following(0, [], ["node ax-2", "driver gone"])
    admin = people.platform_admin
    page = browser_of(admin).get("/fleet/authority/").content.decode()
    assert "Not waited for, because lost or in maintenance: node ax-2, driver gone." in page
    services.advance()
    at_once()
    services.advance()
    assert Authority.objects.filter(state=State.REMOVED).exists()

    Node.objects.filter(pk=node.pk).update(last_heartbeat_at=timezone.now())
    assert services.following().behind == ["node ax-2"], "it is back, and asks for a certificate"


def test_a_root_that_ends_soon_is_replaced_by_itself(db: None) -> None:
    services.bundle()
    Authority.objects.update(expires_at=timezone.now() + timedelta(days=364))
    services.advance()
    assert Authority.objects.filter(state=State.NEXT).count() == 1
    services.advance()
    at_once()
    services.advance()
    services.advance()
    at_once()
    services.advance()
    assert list(Authority.objects.values_list("state", flat=True)) == ["removed", "signing"]


def test_only_platform_admins_see_and_replace_it(people: People) -> None:
    for name in ("platform_on_call", "platform_viewer", "org_admin", "stranger"):
        with pytest.raises((Refused, Http404)):
            services.begin_rotation(people.principal(name))
        with pytest.raises((Refused, Http404)):
            services.visible_authorities(people.principal(name))
    assert services.visible_authorities(people.principal("platform_admin")).count() == 1


def test_who_asks_while_one_is_being_replaced_is_told_that_waiting_helps(
    people: People, api_of: Callable[..., Client]
) -> None:
    api = api_of(people.platform_admin)
    assert api.post("/api/v1/authority/rotate", {}, content_type="application/json").status_code == 202
    again = api.post("/api/v1/authority/rotate", {}, content_type="application/json")
    assert (again.status_code, again.json()["reason"]) == (409, "InProgress")


def test_credentials_of_each_kind_begin_in_a_way_of_their_own_that_the_docs_list(
    world: World, own: ProcessIdentity, people: People, token_of: Callable[..., str]
) -> None:
    node = joined(own)
    driver = Driver(name="job7", public_key=own.public_key_pem)
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        _, caller = callers.add_caller(people.principal("org_admin"), org, name="engine")
    made = [
        token_of(people.viewer, read_only=True),
        token_of(people.viewer),
        new_token(),
        OF_AX_2,
        password(CONTROL_TOKEN, "node:ax-2"),
        caller,
        capabilities.for_move(driver, node, shard="job7.full.0", source="unix:/old", slots=1),
    ]
    prefixes = [str(one).partition("_")[0] for one in made]
    assert len(set(prefixes)) == len(made)
    listed = re.findall(r"^\| `(tg[a-z])_…` ", (PROJECT / "docs/tokens.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(prefixes)


def test_of_many_processes_some_are_named_and_the_others_counted() -> None:
    assert named(["ax1", "ax2"]) == "ax1, ax2"
    assert named([f"ax{number}" for number in range(SHOWN_MAX + 1)]).endswith("ax49 and 1 more")
