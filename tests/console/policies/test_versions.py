"""Promise 9 for policies: every change is one version, one audit row and one event; undo is exact."""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import unescape

import pytest
from django.core.exceptions import ValidationError
from django.db import DatabaseError, connection, transaction
from django.test import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from console.accounts.models import User
from console.accounts.principal import SYSTEM, Refused
from console.accounts.roles import Role
from console.audit import services as audit
from console.audit.models import AuditEntry
from console.audit.services import CannotUndo
from console.control.models import Change
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies import documents, services
from console.policies.documents import ClusterPolicies, Limits, Malformed
from console.policies.models import PolicyInForce, PolicyVersion
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from telemetry.models import Event
from tests.conftest import People
from tests.console.sessions.fleets import make_driver

pytestmark = pytest.mark.django_db


def save(people: People, reason: str = "asked for", by: str = "org_admin", **policy: object) -> None:
    principal = people.principal(by)
    policies = OrgPolicies(policy=Policy(**policy))  # type: ignore[arg-type]
    with transaction.atomic():
        services.set_policy(principal, orgs.for_change(principal, "acme"), policies, reason=reason)


def limit(people: People, **limits: object) -> None:
    told = ClusterPolicies(limits=Limits(**limits))  # type: ignore[arg-type]
    services.set_cluster(people.principal("platform_admin"), told, reason="a contract")


def test_a_change_is_one_version_one_audit_row_one_event_and_is_told_to_drivers(
    people: People, rows_of_audit: Callable[[], int]
) -> None:
    make_driver("job7")
    save(people, "GDPR", ttl_last_use_seconds=600)
    [version] = PolicyVersion.objects.all()
    [entry] = AuditEntry.objects.all()
    [event] = Event.objects.all()
    change, of_nodes = Change.objects.order_by("pk")
    assert (version.number, version.author_name, version.reason) == (1, "olga", "GDPR")
    assert (entry.action, entry.actor_name, entry.reason) == ("policy.set", "olga", "GDPR")
    assert [path for path, _, _ in entry.changes]
    assert entry.before == {"version": 0, "policies": None}
    assert (entry.after or {})["policies"]["policy"]["ttl_last_use_seconds"] == 600
    assert (event.kind, sorted(event.topics)) == ("policy.set", ["fleet", "org:acme"])
    assert version.change == change
    assert change.targets == [["driver", "job7"]], "which serves all orgs"
    assert of_nodes.targets == [["node", "*"]]  # files in tier 2 may lie for as long, too
    save(people, "again", ttl_last_use_seconds=600)  # the same changes nothing
    assert (rows_of_audit(), PolicyVersion.objects.count(), Change.objects.count()) == (1, 1, 2)


def test_buttons_replace_no_version_that_their_page_has_not_shown(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    olga, policy = browser_of(people.org_admin), "/orgs/acme/policy/"
    buttons = [f"{policy}default/", f"{policy}1/restore/", f"{policy}model/drop/"]
    with transaction.atomic():
        principal = people.principal("org_admin")
        both = OrgPolicies(policy=Policy(share=7), models={"llama": Policy(share=8)})
        services.set_policy(principal, orgs.for_change(principal, "acme"), both, reason="first")
    shown = olga.get(policy).content.decode() + olga.get(f"{policy}history/").content.decode()
    assert shown.count('name="version" value="1"') == 3, "the form, and two buttons of the page"
    with transaction.atomic():
        both = OrgPolicies(policy=Policy(share=9), models=both.models)
        services.set_policy(principal, orgs.for_change(principal, "acme"), both, reason="an audit")
    for button in buttons:
        refused = olga.post(button, {"version": 1, "model": "llama"}, follow=True).content.decode()
        assert "Nothing was changed. Meanwhile olga saved version 2: an audit." in refused
        assert services.active_policy(people.acme).number == 2
    assert 'name="version" value="2"' in olga.get(f"{policy}history/").content.decode()
    for number, button in enumerate(reversed(buttons), start=2):
        olga.post(button, {"version": number, "model": "llama"})
        assert services.active_policy(people.acme).number == number + 1


def test_who_has_looked_at_a_newer_policy_may_save(
    people: People, browser_of: Callable[..., Client]
) -> None:
    olga, policy = browser_of(people.org_admin), "/orgs/acme/policy/"
    form = {"tiers": "dram", "priority": 35, "displacement": "default", "reason": "a test", "version": 0}
    assert olga.post(policy, form | {"share": 7}).status_code == 302
    incomplete = olga.post(policy, form | {"share": 8, "reason": ""}).content.decode()
    assert 'name="version" value="0"' in incomplete, "nothing has said yet that there is a newer one"
    refused = olga.post(policy, form | {"share": 8}).content.decode()
    assert "Compare it with your changes, then save again." in refused
    assert refused.count('name="version" value="1"') == refused.count('name="version"')
    assert services.active_policy(people.acme).policies.policy.share == 7
    assert olga.post(policy, form | {"share": 8, "version": 1}).status_code == 302
    assert services.active_policy(people.acme).policies.policy.share == 8


def test_the_page_gives_no_more_models_a_policy_of_their_own_than_rest(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    """Who has more already can change and delete them."""
    olga, policy = browser_of(people.org_admin), "/orgs/acme/policy/"
    sentence = "At most 50 models can have a policy of their own. Delete one first."
    fields = {"tiers": "dram", "share": 7, "priority": 35, "displacement": "default", "reason": "a test"}

    def models() -> set[str]:
        return {*services.active_policy(people.acme).said.models}

    def save_page(model: str, **more: str) -> str:
        form = fields | {"version": services.active_policy(people.acme).number, "model": model}
        return olga.post(policy, form | more, follow=True).content.decode()

    def have(count: int) -> None:
        with transaction.atomic():
            principal = people.principal("org_admin")
            many = OrgPolicies(policy=Policy(), models={f"m{n}": Policy() for n in range(count)})
            services.set_policy(principal, orgs.for_change(principal, "acme"), many, reason="many")

    have(49)
    assert sentence not in save_page("last")
    assert "last" in models()
    assert sentence in save_page("another")
    assert sentence in save_page("another", starts_at="2099-01-01T00:00")
    assert sentence in olga.post(f"{policy}preview/", fields | {"model": "another"}).content.decode()
    chosen = olga.post(f"{policy}model/", {"model": "another"}, follow=True)
    assert sentence in chosen.content.decode()
    assert chosen.redirect_chain == [(policy, 302)]
    have(52)
    for model in ("m3", ""):
        assert sentence not in save_page(model)
        assert services.active_policy(people.acme).said.of(model).share == 7
    assert sentence in save_page("another")
    olga.post(
        f"{policy}model/drop/", {"version": services.active_policy(people.acme).number, "model": "m0"}
    )
    assert models() == {f"m{n}" for n in range(1, 52)}


def test_the_history_names_what_each_version_changed(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    save(people, "GDPR", ttl_last_use_seconds=600)
    save(people, "again", ttl_last_use_seconds=300)
    page = browser_of(people.org_admin).get("/orgs/acme/policy/history/").content.decode()
    assert 'aria-label="Changes in version 2"' in page
    assert 'aria-label="Changes in version 1"' in page


def test_times_out_of_bounds_are_refused_as_times(
    people: People, browser_of: Callable[[User], Client]
) -> None:
    admin = browser_of(people.platform_admin)
    for path, field in (
        ("/orgs/acme/policy/preview/", "ttl_last_use_seconds"),
        ("/policies/default/", "limits-ttl_first_use_seconds_max"),
    ):
        for wrong in ("500d", "0"):
            page = unescape(admin.post(path, {field: wrong}).content.decode())
            assert f"'{wrong}' is not from 1 s to 400 d." in page, path


policies = st.builds(
    OrgPolicies,
    policy=st.builds(
        Policy,
        ttl_first_use_seconds=st.none() | st.integers(1, 1_000_000),
        ttl_last_use_seconds=st.none() | st.integers(1, 1_000_000),
        tiers=st.sampled_from(list(Tiers)),
        dram_bytes_max=st.none() | st.integers(0, 1 << 60),
        share=st.integers(1, 1000),
        scrub=st.booleans(),
    ),
    models=st.dictionaries(
        st.text(
            st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=9
        ),
        st.builds(Policy, priority=st.integers(0, 100)),
        max_size=3,
    ),
)


@pytest.mark.slow
@settings(max_examples=40)
@given(before=policies, after=policies)
def test_promise_9_undo_restores_the_policy_byte_for_byte(
    before: OrgPolicies, after: OrgPolicies
) -> None:
    with transaction.atomic():
        org = Org.objects.create(slug="undone", name="Undone")
        admin = SYSTEM
        services.set_policy(admin, org, before, reason="one")
        first = services.active_policy(org).document
        services.set_policy(admin, org, after, reason="two")
        if before != after:
            entry = AuditEntry.objects.latest("id")
            undone = audit.undo(admin, entry, "")
            held = services.active_policy(org)
            assert held.document.encode() == first.encode()
            assert (held.number, held.version and held.version.same_as) == (3, 1)
            assert undone.undoes_id == entry.pk
            assert AuditEntry.objects.filter(object_type="policy").count() == 3
        transaction.set_rollback(True)


def test_the_first_change_can_be_undone_to_the_default(people: People) -> None:
    save(people, ttl_last_use_seconds=600)
    audit.undo(people.principal("org_admin"), AuditEntry.objects.get(), "")
    held = services.active_policy(people.acme)
    assert (held.number, held.own, held.policy) == (2, None, Policy())


def test_what_was_changed_again_is_not_undone(people: People) -> None:
    save(people, ttl_last_use_seconds=600)
    entry = AuditEntry.objects.get()
    save(people, ttl_last_use_seconds=60)
    with pytest.raises(CannotUndo, match="changed again"):
        audit.undo(people.principal("org_admin"), entry, "")


@pytest.mark.parametrize("reason", ["", "   "])
def test_a_change_without_a_reason_is_refused(reason: str, people: People) -> None:
    with pytest.raises(ValidationError, match="Say why"):
        save(people, reason, ttl_last_use_seconds=600)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE policies_policyversion SET document = 'null'",
        "UPDATE policies_policyversion SET reason = 'x'",
        """INSERT INTO policies_policyversion (org_id, number, document, author_name, reason, made_at)
        SELECT org_id, 9, '[1]', '', 'x', now() FROM policies_policyversion""",
        "UPDATE policies_policyinforce SET org_id = (SELECT id FROM orgs_org WHERE slug = 'globex')",
    ],
)
def test_the_database_refuses_to_change_a_version(statement: str, people: People) -> None:
    save(people, ttl_last_use_seconds=600)
    with pytest.raises(DatabaseError, match=r"never changed|policy_version_document|of its own org"):
        connection.cursor().execute(statement)


# Limits


@pytest.mark.parametrize(
    ("limits", "policy", "field"),
    [
        ({"ttl_last_use_seconds_max": 600}, {"ttl_last_use_seconds": 601}, "ttl_last_use_seconds"),
        ({"ttl_last_use_seconds_max": 600}, {"ttl_last_use_seconds": None}, "ttl_last_use_seconds"),
        ({"ttl_first_use_seconds_max": 60}, {}, "ttl_first_use_seconds"),
        ({"tiers_max": Tiers.DRAM}, {"tiers": Tiers.TIER2}, "tiers"),
        ({"dram_bytes_max": 100}, {}, "dram_bytes_max"),
        ({"tier2_bytes_max": 100}, {"tier2_bytes_max": 101}, "tier2_bytes_max"),
        ({"share_max": 100}, {"share": 101}, "share"),
        ({"priority_max": 50}, {"priority": 51}, "priority"),
    ],
)
def test_nobody_crosses_a_limit(
    limits: dict[str, object], policy: dict[str, object], field: str, people: People
) -> None:
    default = Limits(**limits).held(Policy())  # type: ignore[arg-type]
    told = ClusterPolicies(default=default, limits=Limits(**limits))  # type: ignore[arg-type]
    services.set_cluster(people.principal("platform_admin"), told, reason="a contract")
    for by in ("org_admin", "platform_admin"):
        with pytest.raises(ValidationError) as caught:
            save(people, by=by, **policy)  # type: ignore[arg-type]
        assert f"policy/{field}" in caught.value.message_dict
    # And the database itself says the same, whatever code asks.
    document = documents.write(OrgPolicies(policy=Policy(**policy)))  # type: ignore[arg-type]
    version = PolicyVersion.objects.create(
        org=people.acme, number=1, document=document, author_name="", reason="x"
    )
    with pytest.raises(DatabaseError, match="limits forbid"), transaction.atomic():
        PolicyInForce.objects.create(org=people.acme, version=version)


def test_what_was_saved_under_wider_limits_is_held_to_new_ones(people: People) -> None:
    save(people, ttl_last_use_seconds=86_400)
    told = ClusterPolicies(
        default=Policy(ttl_last_use_seconds=60), limits=Limits(ttl_last_use_seconds_max=600)
    )
    services.set_cluster(people.principal("platform_admin"), told, reason="a contract")
    held = services.active_policy(people.acme)
    assert held.is_held_back
    assert (held.said.policy.ttl_last_use_seconds, held.policy.ttl_last_use_seconds) == (86_400, 600)
    assert services.active_policy(people.globex).policy.ttl_last_use_seconds == 60


def test_the_default_is_within_the_limits_and_only_a_platform_admin_sets_them(people: People) -> None:
    told = ClusterPolicies(limits=Limits(ttl_last_use_seconds_max=60))
    with pytest.raises(ValidationError, match="from the last use"):
        services.set_cluster(people.principal("platform_admin"), told, reason="x")
    with pytest.raises(Refused):
        services.set_cluster(people.principal("org_admin"), ClusterPolicies(), reason="x")


def test_a_change_of_the_cluster_is_undone_byte_for_byte(people: People) -> None:
    limit(people, share_max=500)
    first = services.cluster()
    limit(people, share_max=900)
    audit.undo(people.principal("platform_admin"), AuditEntry.objects.latest("id"), "")
    again = services.cluster()
    assert first.version
    assert again.version
    assert (again.number, again.version.document) == (3, first.version.document)


# Races


@pytest.mark.django_db(transaction=True)
def test_two_admins_who_save_at_once_make_two_versions_in_order(people: People) -> None:
    """Each waits for the other's row; neither is lost, and there is one audit row for each."""
    start = threading.Barrier(2)
    failed: list[BaseException] = []

    def one(seconds: int) -> None:
        try:
            start.wait(30)
            save(people, f"by {seconds}", ttl_last_use_seconds=seconds)
        except BaseException as error:  # noqa: BLE001 - it is told in the test's own thread
            failed.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=one, args=[seconds]) for seconds in (60, 120)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    versions = list(services.versions_of(people.acme))
    assert [version.number for version in versions] == [2, 1]
    held = services.active_policy(people.acme)
    assert held.version == versions[0]
    assert f"by {held.policy.ttl_last_use_seconds}" == versions[0].reason
    entries = AuditEntry.objects.filter(action="policy.set").order_by("id")
    assert [(entry.before or {})["version"] for entry in entries] == [0, 1]


# Documents


def test_a_document_spells_out_every_field_so_that_no_default_changes_it() -> None:
    text = documents.write(OrgPolicies())
    assert all(f'"{name}"' in text for name in Policy.__struct_fields__)
    assert documents.read_org(text) == OrgPolicies()


@pytest.mark.parametrize(
    ("raw", "at"),
    [
        ({"policy": {"ttl_last_use_seconds": 0}}, "policy/ttl_last_use_seconds"),
        ({"policy": {"ttl_last_use_seconds": "soon"}}, "policy/ttl_last_use_seconds"),
        ({"policy": {"tiers": "tape"}}, "policy/tiers"),
        ({"policy": {"redundant_from_priority": 101}}, "policy/redundant_from_priority"),
        ({"policy": {"redundant_from_priority": -1}}, "policy/redundant_from_priority"),
        ({"policy": {"ttl": 5}}, "policy"),
        ({"policies": {}}, ""),
    ],
)
def test_what_is_no_policy_is_refused_with_its_place(raw: dict[str, object], at: str) -> None:
    with pytest.raises(Malformed) as caught:
        documents.read_struct(raw, OrgPolicies)
    assert caught.value.at == at
    assert str(caught.value).endswith(".")


def test_roles(people: People) -> None:
    for kind in ("viewer", "on_call"):
        with pytest.raises(Refused, match="org admin"):
            save(people, by=kind, ttl_last_use_seconds=60)
    assert Role.ORG_ADMIN.label == "org admin"
