"""Two orgs with one of everything, and an operator with as much. Every text of the other org and of the
operator has a marker in it that nobody could guess, so whatever shows one has told too much."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from django.db import transaction
from django.utils import timezone

from console.accounts import tokens
from console.accounts.models import User
from console.accounts.principal import SYSTEM
from console.accounts.roles import Role
from console.alerts.models import Alert, Comment, Notification
from console.alerts.services import WHY_NOT_A_RAIL
from console.control import services as control
from console.control.models import Target
from console.fleet.models import Box, Brain, Driver, Leaf, Node, RetiringStore, SpineLink
from console.handover import services as handover
from console.operations.models import Operation
from console.operations.services import start
from console.orgs.models import Membership, Org
from console.orgs.services import for_change
from console.placement.topology import Tier
from console.policies import callers, schedule
from console.policies import services as policies
from console.policies.models import PurgeReceipt
from console.routing.models import Replica, ServedModel
from console.saved import services as saved
from console.sessions.models import Job, Session, SessionBox, Stream
from console.sessions.steps import relocation
from console.workloads.models import Bucket, Instance, Tokenizer
from swdriver_shim.policy import OrgPolicies, Policy
from telemetry.events import note
from telemetry.models import SlowTransfer
from tests.conftest import People, make_user
from tests.console.alerts.things import make_alert, make_channel, make_silence
from tests.console.fleet.worlds import new_token
from tests.console.operations import machines  # noqa: F401 - registers them
from tests.console.sessions.fleets import MODEL, make_box, make_driver, make_node
from tests.console.workloads.workloads import TRAFFIC, a_rollout, a_workload, an_instance

HIDDEN: Final = "zqxhidden"  # in every name and text of the other org and of the operator
OWN: Final = "mine"  # and in those of the org that looks
GIB: Final = 1 << 30


@dataclass(frozen=True)
class Things:
    """What stands for a parameter of an address, by what stands before it: see `every_page`."""

    org: str
    by_place: dict[str, object]


@dataclass(frozen=True)
class Scene:
    own: Things
    hidden: Things


def _explained(node: str, link: str, **lies: object) -> dict[str, Any]:
    column = {"depth": 0, "tokens": 64, "state": "ready", "slot": 7, "uses": 1, "priority": 35}
    result = {
        "request": "r-7",
        "age_seconds": 1.0,
        "asked_tokens": 64,
        "hit_tokens": 64,
        "missed_tokens": {},
        "columns": [{"outcome": "dram", "columns": 1}],
        **lies,
    }
    home = {"group": "full", "index": 0, "state": "here", "node": node, "tier": "spine", "link": link}
    return {"result": result, "groups": {"full": [column]}, "homes": [home]}


class _DriverAnswers(BaseHTTPRequestHandler):
    """As a driver that serves many orgs answers of the one that is asked about."""

    explained: Mapping[str, Any] = {}

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(self.explained)

    def do_GET(self) -> None:
        if self.path.startswith("/v1/requests?org="):
            self._answer([self.explained["result"]])
        elif self.path.startswith("/v1/requests?request=r-7"):
            self._answer([{"org": "acme"}, {"org": "globex"}])
        else:
            self._answer({"detail": f"{self.explained['homes'][0]['node']} knows nothing"}, 404)

    def _answer(self, body: object, status: int = 200) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """To nobody."""


@contextmanager
def driver_that_answers(node: str, link: str, **lies: object) -> Iterator[str]:
    """The address of a driver that tells of columns at home on this node, over this link. `lies` are
    what it says of the request."""
    handler = type("Answers", (_DriverAnswers,), {"explained": _explained(node, link, **lies)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()


def make_scene(people: People, own_driver: str, hidden_driver: str) -> Scene:
    """`acme` looks, `globex` and the operator are not to be seen. Drivers are at these addresses."""
    hidden = HIDDEN
    Org.objects.filter(pk=people.globex.pk).update(slug=f"{hidden}-org", name=f"{hidden} org")
    people.globex.refresh_from_db()
    User.objects.filter(pk=people.stranger.pk).update(username=f"{hidden}-admin")
    _fleet(own_driver, hidden_driver)
    return Scene(
        _fill(people, people.acme, OWN, people.org_admin),
        _fill(people, people.globex, hidden, User.objects.get(pk=people.stranger.pk)),
    )


def _routing(hidden_brain: str) -> None:
    """A brain, a model that both orgs may use, as the operator has them, and one of the other org."""
    now = timezone.now()
    Brain.objects.create(
        name=f"{HIDDEN}-brain",
        control_url=hidden_brain,
        control_token="c" * 32,
        api_url=f"https://{HIDDEN}.example.org",
        heartbeat_sha256=b"x" * 32,
        joined_at=now,
        last_heartbeat_at=now,
    )
    shared = ServedModel.objects.create(
        name=f"{HIDDEN}-name", model=f"{OWN}/shared", tokens_max=4096, tokenizer=f"/{HIDDEN}/tokenizer"
    )
    theirs = ServedModel.objects.create(
        name=f"{HIDDEN}-theirs", model=f"{HIDDEN}/model", tokens_max=4096, for_all_orgs=False
    )
    theirs.orgs.add(*Org.objects.filter(slug__startswith=HIDDEN))
    for model in (shared, theirs):
        url = f"http://{HIDDEN}.example.org:8000"
        Replica.objects.create(model=model, name=f"{HIDDEN}-replica", url=url, api_key=f"{HIDDEN}-key")


def _fleet(own_driver: str, hidden_driver: str) -> None:
    """The other org's nodes are on the same leaves, and full: so ours are not on rails."""
    leaves = ("l1", "l2", "l3", "l4")
    for number, leaf in enumerate(leaves):
        make_node(f"{HIDDEN}-node{number}", leaf, memory_bytes=GIB)
    make_node(f"{OWN}-node", "l5", memory_bytes=64 * GIB)
    for owner in (OWN, HIDDEN):
        make_box(f"{owner}-box", leaves)
        of = Leaf.objects.create(name=f"{owner}-leaf", stamp=Node.objects.all()[0].stamp)
        SpineLink.objects.create(name=f"{owner}-link", leaf=of, spine=f"{owner}-spine", gbits=400)
    make_driver(f"{OWN}-driver", control_url=own_driver)
    model = {**MODEL, "name": f"{HIDDEN}-model"}
    make_driver(f"{HIDDEN}-driver", model, control_url=hidden_driver)
    make_driver(f"{HIDDEN}-free-driver", model)
    _routing(hidden_driver)
    for name in (f"{OWN}-driver", f"{HIDDEN}-driver"):
        told = {"generation": 1, "observed_generation": 1, "observed_change": 0}
        Target.objects.create(kind="driver", name=name, problem=f"{name} lags", **told)


def _session(org: Org, mark: str) -> Session:
    session = Session.objects.create(
        name=f"{mark}-session",
        org=org,
        boxes_desired=1,
        boxes_min=1,
        boxes_increment=1,
        cause="WaitingForCapacity",
        cause_sentence=f"{mark} waits",
        waiting_since=timezone.now(),
    )
    box = Box.objects.get(name=f"{mark}-box")
    SessionBox.objects.create(session=session, box=box, ready=True)
    driver = Driver.objects.get(name=f"{mark}-driver")
    job = Job.objects.create(session=session, name=f"{mark}-job", driver=driver, running=True)
    is_own = mark == OWN
    for index in range(4):
        Stream.objects.create(
            job=job,
            group="full",
            index=index,
            box=box,
            domain=index,
            wio=3,
            slot_bytes=1 << 20,
            slots=10 if is_own else 1020,
            node=Node.objects.get(name=f"{mark}-node" if is_own else f"{mark}-node{index}"),
            tier=(Tier.SPINE if is_own else Tier.RAIL).value,
            port_leaf=f"l{index + 1}",
            nic_leaf="l5" if is_own else f"l{index + 1}",
            why=f"{HIDDEN}-node{index} with a NIC on its leaf is full (5 MiB of 10 MiB missing)"
            if is_own
            else "",
        )
    return session


def _alert(org: Org, mark: str, session: Session) -> Alert:
    """Of a session, with what its rule found out: nodes that are nobody's business are part of it."""
    stream = {"driver": f"{mark}-driver", "stream": "full.0", "node": f"{mark}-node"}
    evidence = {
        "session": session.name,
        WHY_NOT_A_RAIL: f"{HIDDEN}-node0 with a NIC on its leaf is full (1 GiB of 2 GiB missing)",
    }
    lost = f"{HIDDEN}-node{1 if mark == OWN else 2}"
    cause = make_alert("node-lost", f"node:{lost}", sentence=f"{lost} is lost")
    alert = make_alert(
        "spine-placement",
        f"session:{session.name}",
        org,
        labels=stream,
        evidence=evidence,
        sentence=f"{mark} crosses the spine",
        suppressed_by=cause,
    )
    Comment.objects.create(alert=alert, author=f"{mark}-author", text=f"{mark} comment")
    pager = make_channel(f"{HIDDEN}-pager-of-{mark}", "http://127.0.0.1:9/platform")
    Notification.objects.create(
        alert=alert,
        channel=pager,
        what=Notification.What.FIRING,
        state=Notification.State.SENT,
        sent_at=timezone.now(),
    )
    return alert


def _fill(people: People, org: Org, mark: str, admin_user: User) -> Things:
    admin, session = people.principal("platform_admin"), _session(org, mark)
    now, topic = timezone.now(), f"org:{org.slug}"
    alert = _alert(org, mark, session)
    make_alert("hit-rate", topic, org, sentence=f"{mark} alert of the org")
    silence = make_silence([f"session={mark}-session"], org, reason=f"{mark} silence", author=mark)
    channel = make_channel(f"{mark}-channel", f"http://127.0.0.1:9/{mark}", org)
    member = make_user(f"{mark}-member")
    Membership.objects.create(org=org, user=member, role=Role.VIEWER)
    token, _ = tokens.issue(
        people.principal("platform_admin"),
        name=f"{mark}-token",
        read_only=True,
        org=org,
        expires_at=now + timedelta(days=3),
    )
    model = f"{mark}-model"
    with transaction.atomic():
        locked = for_change(admin, org.slug)
        wanted = OrgPolicies(policy=Policy(share=7), models={model: Policy(share=3)})
        policies.set_policy(admin, locked, wanted, reason=f"{mark} reason")
        caller, _ = callers.add_caller(admin, locked, name=f"{mark}-caller")
        later = now + timedelta(days=2)
        planned = schedule.schedule(admin, locked, wanted, starts_at=later, lasts=None, reason=mark)
        operation = start(
            admin,
            "tests.waits",
            f"session:{session.name}",
            f"Wait for {mark}",
            plan={},
            org_id=org.pk,
        )
        note("session.resize", [f"session:{session.name}", topic], f"{mark} grows", {"session": mark})
        for shard in Stream.objects.filter(job__session=session):
            relocation.warn_of_spine(shard)
        control.changed([("driver", f"{mark}-driver")], f"{mark} change", topic=topic)
    waits = f"{HIDDEN}-node2, {HIDDEN}-driver: http://10.9.8.7:1/{HIDDEN} does not answer"
    purge = Operation.objects.create(
        kind="org.purge",
        target=topic,
        org_id=org.pk,
        role=Role.ORG_ADMIN,
        sentence=f"Purge everything stored for {mark}",
        total=4,
        step=2,
        message=waits,
        plan={"org": org.slug, "model": "", "reason": mark},
        notes={"nodes": {f"{HIDDEN}-node2": {"done": False, "problem": waits}}},
        actor_name=mark,
    )
    PurgeReceipt.objects.create(
        org_slug=org.slug,
        operation_id=operation.pk,
        asked_by=mark,
        reason=mark,
        asked_at=now,
        columns=1,
        bytes=1,
        files=1,
        file_bytes=1,
        places={"drivers": {f"{mark}-driver": {"done": True}}, "nodes": {}},
    )
    handover.write(admin, org, f"{mark} note")
    view = saved.save_view(
        people.principal("platform_admin"),
        name=f"{mark} view",
        address=f"/latency/?topic={topic}",
        share=topic,
    )
    _transfers(org, mark)
    store = RetiringStore.objects.create(
        node=Node.objects.filter(name__startswith=f"{mark}-node")[0],
        place=f"{HIDDEN}-bucket-of-{mark}",
        said={"path": f"{HIDDEN}-bucket"},
        since=now,
    )
    join_token = new_token().public_id
    instance = _workload(org, mark, session)
    tokenizer = Tokenizer.objects.create(
        sha256=("a" if mark == OWN else "b") * 64,
        org=org,
        name=f"{mark}-tokenizer",
        size_bytes=1,
        author_name=f"{mark}-admin",
    )
    bucket = Bucket.objects.create(
        org=org, name=f"{mark}-bucket", credentials="{}", author_name=f"{mark}-admin"
    )
    return Things(
        org.slug,
        {
            "orgs": org.slug,
            "sessions": session.name,
            "workloads": f"{mark}-workload",
            "revisions": 1,
            "instances": instance.name,
            "tokenizers": tokenizer.pk,
            "buckets": bucket.pk,
            "jobs": f"{mark}-job",
            "stores": store.pk,
            "retiring-stores": store.pk,
            "nodes": f"{mark}-node" if mark == OWN else f"{mark}-node0",
            "boxes": f"{mark}-box",
            "leaves": f"{mark}-leaf",
            "spine-links": f"{mark}-link",
            "drivers": f"{mark}-driver",
            "operations": purge.pk,
            "audit": _entry_of(org),
            "alerts": alert.pk,
            "silences": silence.pk,
            "rules": "hit-rate",
            "alert-rules": "hit-rate",
            "channels": channel.pk,
            "alert-channels": channel.pk,
            "views": view.pk,
            "members": member.username,
            "users": member.username,
            "callers": caller.public_id,
            "policy": 1,
            "versions": 1,
            "scheduled": planned.pk,
            "tokens": token.public_id,
            "models": f"{HIDDEN}-name",
            "replicas": f"{HIDDEN}-replica",
            "brains": f"{HIDDEN}-brain",
            "join": join_token,
            "join-tokens": join_token,
        },
    )


def _workload(org: Org, mark: str, session: Session) -> Instance:
    """With a revision, an instance, a rollout and an event of its own."""
    workload = a_workload(org, f"{mark}-workload", session=session)
    a_rollout(workload, sentence=f"{mark} is worse", traffic=TRAFFIC)
    with transaction.atomic():
        note("workload.update", [workload.topic, f"org:{org.slug}"], f"{mark} is another now")
    return an_instance(
        workload,
        state="loading",
        sentence=f"{mark} loads",
        url=f"http://{mark}.example.org",
        host=f"{mark}-host",
        boxes=[f"{mark}-box"],
    )


def _entry_of(org: Org) -> int:
    from console.audit.models import AuditEntry

    return AuditEntry.objects.filter(org_id=org.pk).latest("id").pk


def _transfers(org: Org, mark: str) -> None:
    """Of the org by its own driver, and by one that belongs to a session of the other."""
    for owner in {mark, HIDDEN}:
        SlowTransfer.objects.create(
            at=timezone.now() - timedelta(seconds=20),
            driver=f"{owner}-driver",
            direction="in",
            seconds=0.5,
            org=org.slug,
            request="r-7",
            stream=f"{owner}-stream",
            slot_first=4,
            slot_last=9,
            columns=2,
            bytes=3,
            session=f"{owner}-session",
            node=f"{owner}-node",
            tier="spine",
            nic_leaf=f"{owner}-leaf",
            link=f"{owner}-link",
        )


def drain_that_moves_ours() -> Operation:
    """A drain of a node that is not ours to know of has taken one of our streams into its hands."""
    drain = start(SYSTEM, "tests.waits", f"node:{HIDDEN}-node0", f"Drain {HIDDEN}-node0", plan={})
    shard = Stream.objects.filter(job__name=f"{OWN}-job").order_by("pk")[0]
    place = relocation.place_of(shard)
    relocation.send_to(shard, place, drain)
    return drain
