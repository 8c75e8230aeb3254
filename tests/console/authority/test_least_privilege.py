"""What a driver holds, tried by whoever has it against all that agents do; and what a recorder between
the console and its processes sees."""

from __future__ import annotations

import base64
import itertools
import json
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from django.db import transaction
from django.utils import timezone

from console.accounts.roles import Role
from console.authority import services as authority
from console.authority.issuing import Signer, make_root
from console.control import rounds
from console.control.documents import Compiler
from console.control.models import Target
from console.fleet.models import Driver, Node
from console.operations import services as operations
from console.operations.models import Operation
from console.orgs import services as orgs
from console.policies import callers
from console.policies import services as policies
from console.sessions import services
from console.sessions.changes import jobs, moves
from console.sessions.models import Phase, Stream
from kvss_agent.security import capabilities
from kvss_agent.security.certificates import Peer
from kvss_agent.security.certificates import Role as PeerRole
from kvss_agent.security.identity import ProcessIdentity, fingerprint, public_pem
from kvss_agent.security.trust import Trust, load_chain
from swdriver_shim.policy import OrgPolicies, Policy, Tiers
from tests.conftest import People
from tests.console.sessions.loads import kv, tokens_of
from tests.console.sessions.planes import Plane, plane, push, run
from tests.console.sessions.requests import create, start_job
from tests.control_api import Tls, as_console, as_process, certified, control_client
from tests.hostile.network import Network
from tests.live import wait_until

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture
def fleet(db: None, tmp_path: Path) -> Iterator[Plane]:
    with plane(tmp_path) as made:
        yield made


def strings(value: Any) -> Iterator[str]:
    """Every text in a document, keys aside."""
    if isinstance(value, str):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(one)


def document_of(kind: str, name: str) -> dict[str, Any]:
    target = Target.objects.get(kind=kind, name=name)
    compiled = Compiler(kind).compile(name, rounds._bases(kind, [target])[name])
    found: dict[str, Any] = json.loads(compiled.of_generation(target.generation))
    return found


def on_its_way(people: People) -> tuple[Operation, Stream]:
    """A shard of job7 that is to go on at ax2, of which its driver has not been told yet."""
    on_call = people.principal("platform_on_call")
    one = Stream.objects.filter(job__driver__name="job7", node__name="ax1").select_related("node")[0]
    with transaction.atomic():
        session = services.for_change(on_call, "chat", at_least=Role.ON_CALL)
        moving = moves.move(on_call, session, one, Node.objects.get(name="ax2"))

    def is_on_its_way() -> bool:
        operations.advance(moving.pk)
        one.refresh_from_db()
        if one.phase == Phase.MAKING:
            push()
        return one.phase == Phase.MOVING

    wait_until("the shard is on its way", is_on_its_way)
    return moving, one


def asks(url: str, bearer: str, tls: Tls | None) -> httpx.Client:
    return control_client(urlsplit(url).netloc, bearer, tls)


def pull(at: str, **more: Any) -> tuple[str, str, Any]:
    body = {"from": "{from}", "shard": "{mine}", "as": "job7", "slots": [0], **more}
    return "POST", f"/v1/shards/{at}/pull", body


EVERYTHING = [
    ("GET", "/metrics", None),
    ("GET", "/v1/observed", None),
    ("PUT", "/v1/desired", {"generation": 1 << 40}),
    ("GET", "/v1/shards/{other}", None),
    ("GET", "/v1/shards/{mine}", None),
    ("GET", "/v1/pulls", None),
    pull("{other}", shard="{other}", **{"as": "job8"}),
    pull("{other}"),
    pull("{mine}", shard="{other}"),
    pull("{mine}", **{"as": "job8"}),
    pull("{mine}", **{"from": "unix:/x"}),
    pull("{mine}", slots=[10**6]),
    ("POST", "/v1/purge", {}),
    ("POST", "/v1/drain", None),
]


def filled(value: Any, **names: str) -> Any:
    if isinstance(value, str):
        return value.format(**names) if value.startswith(("{", "/")) else value
    if isinstance(value, dict):
        return {key: filled(one, **names) for key, one in value.items()}
    return value


def test_all_of_a_drivers_document_opens_nothing_but_its_own_move(people: People, fleet: Plane) -> None:
    admin = people.principal("platform_admin")
    run(create(people, boxes=1, bytes_per_token=512))
    run(start_job(people, fleet.add_driver("job7")))
    run(create(people, name="other", boxes=1, bytes_per_token=512))
    with transaction.atomic():
        session = services.for_change(admin, "other")
        other_job = jobs.start_job(admin, session, "serve", fleet.add_driver("job8"))
    run(other_job)
    moving, shard = on_its_way(people)
    document = document_of("driver", "job7")
    agents_tokens = {str(node.control_token) for node in Node.objects.all()}
    held = set(strings(document))
    assert not held & agents_tokens, "no agent's token ever leaves the console"
    [capability] = [one for one in held if one.startswith(capabilities.PREFIX)]

    theirs = Stream.objects.filter(job__driver__name="job8").select_related("node")
    identity = ProcessIdentity.load(fleet.directory / "job7", "driver:job7")
    thief = ProcessIdentity.load(fleet.directory / "job8", "driver:job8")
    before = {name: agent.observed() for name, agent in fleet.agents.items()}
    for node in Node.objects.all():
        mine_there = as_process(Trust.load(identity), node.public_key)
        names = {
            "mine": shard.name,
            "other": next((one.name for one in theirs if one.node == node), "job8.full.0"),
            "from": str(Node.objects.get(name="ax1").data_address),
        }
        for bearer, (method, path, body) in itertools.product(held, EVERYTHING):
            if not bearer.isascii() or not bearer.isprintable():
                continue
            with asks(node.control_url, bearer, mine_there) as client:
                told = client.request(method, filled(path, **names), json=filled(body, **names))
            assert told.status_code in (401, 403, 422), (node.name, bearer, method, path, told.text)
    # What it allows is allowed to nobody else: not to another driver, nor without a certificate.
    ax2 = Node.objects.get(name="ax2")
    body = {"from": names["from"], "shard": shard.name, "as": "job7", "after": 0, "slots": [0]}
    by_thief = as_process(Trust.load(thief), ax2.public_key)
    with asks(ax2.control_url, capability, by_thief) as client:
        told = client.post(f"/v1/shards/{shard.name}/pull", json=body)
    assert (told.status_code, "another driver's" in told.text) == (403, True)
    assert {name: agent.observed()["generation"] for name, agent in fleet.agents.items()} == {
        name: one["generation"] for name, one in before.items()
    }
    # And the move itself goes on with it.
    assert run(moving).state == "succeeded", moving.message
    assert not [one for one in strings(document_of("driver", "job7")) if capabilities.is_one(one)]


def test_a_move_takes_its_bytes_along_by_a_capability(people: People, fleet: Plane) -> None:
    with transaction.atomic():
        org = orgs.for_change(people.principal("platform_admin"), "acme")
        _, token = callers.add_caller(people.principal("platform_admin"), org, name="engine")
    run(create(people, boxes=2, bytes_per_token=512))
    run(start_job(people, fleet.add_driver("job7")))
    driver = fleet.drivers["job7"]
    for prompt in range(4):
        driver.store(token, tokens_of(prompt), kv(prompt, len(tokens_of(prompt))))
    before = [driver.load(token, tokens_of(prompt))[0] for prompt in range(4)]
    assert all(before)
    moving, _ = on_its_way(people)
    push()
    assert run(moving).state == "succeeded"
    assert [driver.load(token, tokens_of(prompt))[0] for prompt in range(4)] == before
    # By asking the agent as it is: it has pulled, in this driver's name.
    pulls = fleet.agents["ax2"].http.get("/v1/pulls").json()
    assert sum(pull["moved"] for pull in pulls)


def test_a_document_is_the_same_until_a_capability_is_renewed(people: People, fleet: Plane) -> None:
    run(create(people, boxes=2, bytes_per_token=512))
    run(start_job(people, fleet.add_driver("job7")))
    moving, _ = on_its_way(people)
    assert document_of("driver", "job7") == document_of("driver", "job7")
    assert run(moving).state == "succeeded"


def test_a_driver_or_an_agent_without_a_key_starts_empty_and_gets_no_token(
    people: People, fleet: Plane
) -> None:
    """As those of the version before are, while a fleet is updated."""
    run(create(people, boxes=2, bytes_per_token=512))
    run(start_job(people, fleet.add_driver("job7")))
    moving, _ = on_its_way(people)
    for model in (Node, Driver):
        keys = dict(model.objects.values_list("pk", "public_key"))
        model.objects.update(public_key="")
        assert all("control" not in home for home in document_of("driver", "job7")["homes"])
        for pk, key in keys.items():
            model.objects.filter(pk=pk).update(public_key=key)
    assert run(moving).state == "succeeded"


# What is on the wire


def test_a_recorder_between_console_agents_and_drivers_sees_no_secret(
    people: People, tmp_path: Path
) -> None:
    secrets, recorded = talk(people, tmp_path)
    assert len(recorded) > 10_000
    assert [one for one in secrets if one in recorded] == []


def talk(people: People, directory: Path) -> tuple[list[bytes], bytes]:
    """Tell a driver and an agent all that there is to tell; what of that is secret, and what was seen on
    the way."""
    with plane(directory, nodes=1) as fleet, ExitStack() as stack:
        with transaction.atomic():
            org = orgs.for_change(people.principal("platform_admin"), "acme")
            callers.add_caller(people.principal("platform_admin"), org, name="engine")
            wanted = OrgPolicies(policy=Policy(tiers=Tiers.TIER2, encrypt_tier2=True))
            policies.set_policy(people.principal("platform_admin"), org, wanted, reason="asked for")
        networks = []

        def by_way_of_the_network(joined: Node | Driver) -> None:
            parts = urlsplit(joined.control_url)
            network = stack.enter_context(Network(parts.port or 0))
            networks.append(network)
            joined.control_url = f"{parts.scheme}://127.0.0.1:{network.port}"
            joined.save()

        by_way_of_the_network(Node.objects.get())
        driver = fleet.add_driver("job7")
        by_way_of_the_network(driver)
        run(create(people, boxes=2, bytes_per_token=512))
        assert run(start_job(people, driver)).state == "succeeded"
        secrets = {str(one.control_token) for one in Node.objects.all()}
        secrets |= {str(one.control_token) for one in Driver.objects.all()}
        told = document_of("driver", "job7")
        secrets |= {told["secret"], *(org["secret"] for org in told["orgs"])}
        keys = {org["data_key"] for org in told["orgs"] if org.get("data_key")}
        assert keys, "there is a data key to be told"
        secrets |= keys
        seen = b"".join(bytes(network.recorded) for network in networks)
        assert all(network.connections for network in networks)
        raw = [base64.b64decode(one) for one in {*keys, told["secret"]}]
        return [*(one.encode() for one in secrets), *raw], seen


# Whose certificate it is


def test_only_the_process_that_has_joined_is_asked(people: People, fleet: Plane) -> None:
    """Not another one's that has a valid certificate, at the address of the first."""
    ax1, ax2 = Node.objects.order_by("name")
    Node.objects.filter(name="ax1").update(control_url=ax2.control_url)
    assert rounds.push([("node", "ax1")]) == 1
    [target] = Target.objects.filter(name="ax1")
    assert (target.fault, target.problem) == (
        "untrusted",
        "Its certificate is of another process: another key than the one that has joined.",
    )
    assert fleet.agents["ax2"].observed()["generation"] == 0
    Node.objects.filter(name="ax1").update(control_url=ax1.control_url)
    rounds.push([("node", "ax1")])
    assert fleet.agents["ax1"].observed()["generation"] == 1


def test_an_agent_answers_nobody_but_the_console(people: People, fleet: Plane) -> None:
    ax1 = Node.objects.get(name="ax1")
    token = str(ax1.control_token)
    console = as_console(ProcessIdentity.load(fleet.directory / "ax1", "node:ax1"))
    node = as_process(
        Trust.load(ProcessIdentity.load(fleet.directory / "ax2", "node:ax2")), ax1.public_key
    )
    driver = certified(fleet.directory / "d", PeerRole.DRIVER, "d")
    for tls, status in (
        (console, 200),
        (node, 401),
        (as_process(Trust.load(driver), ax1.public_key), 401),
        (Tls(without_certificate(), console.server_name), 401),
    ):
        with asks(ax1.control_url, token, tls) as client:
            answer = client.get("/v1/observed")
            assert answer.status_code == status
            assert status == 200 or "the console's certificate is needed" in answer.json()["detail"]
            assert client.get("/-/health").status_code in (200, 503)
            pretended = client.get("/v1/observed", headers={"X-Forwarded-Proto": "http"})
            assert pretended.status_code == status
    with asks(ax1.control_url, token, Tls(without_certificate(), console.server_name)) as client:
        assert client.get("/metrics").status_code == 200  # for Prometheus, with the token
    with asks(ax1.control_url, "x" * 40, console) as client:
        assert client.get("/v1/observed").status_code == 401
    for refused in (foreign(console), None):
        with asks(ax1.control_url, token, refused) as client, pytest.raises(httpx.TransportError):
            client.get("/v1/observed")


def without_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.bundle().authorities)
    return context


def foreign(console: Tls) -> Tls:
    """A console of another authority, which believes ours."""

    now, key = timezone.now(), ec.generate_private_key(ec.SECP256R1())
    root = make_root("another", now)
    pem = public_pem(key.public_key())
    peer = Peer(PeerRole.CONSOLE, "console", fingerprint(pem))
    issued = Signer(root.certificate, root.key).issue(peer, pem, timedelta(days=1), now)
    context = without_certificate()
    load_chain(context, issued, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return Tls(context, console.server_name)
