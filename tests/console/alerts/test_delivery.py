"""People are told at least once, in order, with one key; by real servers, and whoever is killed."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from email import message_from_bytes, policy
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.alerts.delivery import channels, notifications, senders
from console.alerts.delivery.senders import send
from console.alerts.models import Alert, Channel, Notification
from console.environment import PROJECT
from console.orgs.models import Org
from tests.console.alerts.receivers import Hook, Mailbox, hook, mailbox
from tests.console.alerts.things import make_alert, make_channel, make_silence
from tests.hostile.agent import Peer
from tests.hostile.answers import EXHAUSTING, bomb

# Those that would hold whoever talks to them, and what comes of it.
SLOW = {
    "drips": (False, "TimeoutError"),
    "drips headers": (False, "TimeoutError"),
    "says nothing": (False, "TimeoutError"),
    "endless text": (True, "200 OK"),  # its status is its answer
}


@pytest.fixture
def receiver() -> Iterator[Hook]:
    with hook() as told:
        yield told


def run(channel: Channel, groups: int = 10) -> None:
    """Plan, wait for what is not due yet, and deliver."""
    notifications.plan(timezone.now())
    Notification.objects.filter(state="waiting").update(next_try_at=timezone.now())
    notifications.deliver(channel.pk, groups)


def log(channel: Channel) -> list[tuple[str, str]]:
    return list(channel.notifications.order_by("pk").values_list("what", "state"))


@pytest.mark.django_db
def test_an_alert_is_told_once_and_its_end_once(receiver: Hook) -> None:
    channel = make_channel("hook", receiver.address, secret="shared")
    alert = make_alert("queue-deep", "node:ax-7", labels={"shard": "a"})
    for _ in range(3):
        run(channel)
    [(headers, body)] = receiver.got
    [told] = body["alerts"]
    assert (body["what"], told["rule"], told["labels"]["node"]) == ("firing", "queue-deep", "ax-7")
    assert told["address"].endswith(f"/alerts/{alert.pk}/")
    assert told["suggested_fix"]
    found = re.fullmatch(r"t=(\d+),v1=([0-9a-f]{64})", headers["X-Tidegate-Signature"])
    assert found
    assert abs(int(found[1]) - time.time()) < 60
    raw = f"{found[1]}.{json.dumps(body)}".encode()
    assert found[2] == hmac.new(b"shared", raw, hashlib.sha256).hexdigest()
    Alert.objects.update(state="resolved")
    for _ in range(3):
        run(channel)
    assert [body["what"] for body in receiver.bodies] == ["firing", "resolved"]
    assert receiver.bodies[1]["alerts"][0]["dedup_key"] == told["dedup_key"]
    assert log(channel) == [("firing", "sent"), ("resolved", "sent")]
    Alert.objects.update(state="firing", episode=2)
    run(channel)
    assert receiver.bodies[2]["alerts"][0]["dedup_key"] != told["dedup_key"]


@pytest.mark.django_db
def test_what_fails_is_tried_again_with_the_same_key_and_the_end_waits_for_its_turn(
    receiver: Hook,
) -> None:
    channel = make_channel("hook", receiver.address)
    make_alert("queue-deep", "node:ax-7")
    receiver.statuses = [503, 429]
    run(channel)
    Alert.objects.update(state="resolved")
    before = timezone.now()
    run(channel)
    assert log(channel) == [("firing", "waiting")]
    one = channel.notifications.get()
    assert one.answer.startswith("429 Too Many Requests: thank you")
    assert "s3cret" not in one.answer
    assert one.next_try_at > before + timedelta(seconds=29)
    run(channel)
    assert log(channel) == [("firing", "sent")]
    run(channel)
    assert log(channel) == [("firing", "sent"), ("resolved", "sent")]
    keys = {headers["Idempotency-Key"] for headers, body in receiver.got if body["what"] == "firing"}
    assert len(keys) == 1
    assert len(receiver.got) == 4


@pytest.mark.django_db
def test_an_end_that_is_told_late_does_not_end_what_began_meanwhile(receiver: Hook) -> None:
    channel = make_channel("pages", receiver.address, kind="pagerduty", secret="k")
    make_alert("queue-deep", "node:ax-7")
    run(channel)
    receiver.statuses = [503]
    Alert.objects.update(state="resolved")
    run(channel)
    Alert.objects.update(state="firing", episode=2)
    for _ in range(2):
        run(channel)
    told = [(one["event_action"], one["dedup_key"].rpartition("-")[2]) for one in receiver.bodies]
    assert told[:2] == [("trigger", "1"), ("resolve", "1")]
    assert sorted(told[2:]) == [("resolve", "1"), ("trigger", "2")]


@pytest.mark.django_db
def test_an_end_that_is_told_late_is_of_its_own_episode(receiver: Hook) -> None:
    channel = make_channel("hook", receiver.address)
    began = make_alert("queue-deep", "node:ax-7", sentence="5,000 wait", value=5000).begun_at
    run(channel)
    now = timezone.now()
    again = {"begun_at": now, "sentence": "9,000 wait", "value": 9000}
    Alert.objects.update(state="firing", episode=2, **again)
    run(channel)
    told = {body["what"]: body["alerts"][0] for body in receiver.bodies}
    assert [told["resolved"][name] for name in ("sentence", "value", "since")] == [
        "5,000 wait",
        None,
        began.isoformat(),
    ]
    assert [told["firing"][name] for name in ("sentence", "value", "since")] == [
        "9,000 wait",
        9000,
        now.isoformat(),
    ]


@pytest.mark.django_db
def test_what_is_tried_again_has_the_same_key_whatever_fired_meanwhile(receiver: Hook) -> None:
    channel = make_channel("hook", receiver.address)
    for number in range(2):
        make_alert("queue-deep", f"node:ax-{number}")
    receiver.statuses = [503]
    run(channel)
    make_alert("queue-deep", "node:ax-2")
    notifications.plan(timezone.now())
    Notification.objects.update(next_try_at=F("next_try_at") - timedelta(hours=1))
    notifications.deliver(channel.pk)
    failed, again, other = receiver.got
    assert failed == again
    assert [one["subject"] for one in other[1]["alerts"]] == ["ax-2"]
    assert other[0]["Idempotency-Key"] != again[0]["Idempotency-Key"]


@pytest.mark.django_db
def test_it_is_given_up_at_last_and_seen(receiver: Hook) -> None:
    channel = make_channel("hook", receiver.address)
    make_alert("queue-deep", "node:ax-7")
    receiver.statuses = [500] * 100
    for _ in range(notifications.TRIES_MAX + 3):
        run(channel)
    assert len(receiver.got) == notifications.TRIES_MAX
    assert log(channel) == [("firing", "given_up")]
    assert channels.with_counts(Channel.objects.all()).get().given_up == 1


@pytest.mark.django_db
def test_a_redirection_is_not_followed_and_an_absent_receiver_is_an_answer(receiver: Hook) -> None:
    channel = make_channel("hook", receiver.address)
    receiver.statuses = [302]
    test = channels.send_test(SYSTEM, channel.pk)
    assert (test.state, test.answer[:9]) == ("given_up", "302 Found")
    nobody = make_channel("nobody", "http://127.0.0.1:9/x")
    assert "ConnectError" in channels.send_test(SYSTEM, nobody.pk).answer
    assert channels.send_test(SYSTEM, channel.pk).state == "sent"


@pytest.mark.django_db
def test_what_fires_together_is_told_together_but_each_to_pagerduty(receiver: Hook) -> None:
    together = make_channel("hook", receiver.address)
    for number in range(5):
        make_alert("queue-deep", f"node:ax-{number}")
    make_alert("ttl-exceeded", "driver:j")
    run(together)
    assert sorted(len(body["alerts"]) for body in receiver.bodies) == [1, 5]
    receiver.got.clear()
    duty = make_channel("duty", receiver.address, kind="pagerduty", secret="routing")
    Alert.objects.exclude(rule="ttl-exceeded").update(state="resolved")
    run(duty)
    [event] = receiver.bodies
    assert (event["event_action"], event["routing_key"]) == ("trigger", "routing")
    assert event["payload"]["severity"] == "critical"
    Alert.objects.update(state="resolved")
    run(duty)
    assert receiver.bodies[1]["event_action"] == "resolve"
    assert receiver.bodies[1]["dedup_key"] == event["dedup_key"]


@pytest.mark.django_db
def test_slack_is_mentioned_to_by_nobody(receiver: Hook) -> None:
    channel = make_channel("slack", receiver.address, kind="slack")
    make_alert("queue-deep", "node:ax-7", sentence="<!channel> & more")
    run(channel)
    [body] = receiver.bodies
    assert "&lt;!channel&gt; &amp; more" in body["text"]
    assert "FIRING Shard queue too deep: ax-7" in body["text"]


@pytest.mark.django_db
def test_who_is_told_is_chosen_by_org_severity_and_matchers(receiver: Hook) -> None:
    acme = Org.objects.create(slug="acme", name="Acme")
    globex = Org.objects.create(slug="globex", name="Globex")
    grave = make_alert("refill-slow", "org:acme", acme)
    slight = make_alert("hit-rate-drop", "org:acme", acme, severity="ticket")
    other = make_alert("refill-slow", "org:globex", globex)
    ours = make_alert("queue-deep", "node:ax-7")
    make_alert("evict-slow", "org:acme", acme, state="pending", fired_at=None)
    wanted = {
        make_channel("all", receiver.address).name: {grave, slight, other, ours},
        make_channel("pages", receiver.address, min_severity="page").name: {grave, other, ours},
        make_channel("acme", receiver.address, acme).name: {grave, slight},
        make_channel("nodes", receiver.address, matchers=["topic=node:*"]).name: {ours},
        make_channel("off", receiver.address, enabled=False).name: set(),
    }
    notifications.plan(timezone.now())
    for name, alerts in wanted.items():
        told = Notification.objects.filter(channel__name=name)
        assert {one.alert for one in told.select_related("alert")} == alerts, name


@pytest.mark.django_db
def test_however_many_are_told_or_silenced_what_fires_now_is_told(
    receiver: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "FIRING_MAX", 2)
    channel = make_channel("hook", receiver.address)
    for one in "abcd":
        make_alert("queue-deep", "node:ax-7", labels={"shard": one}, severity="notice")
    for one in "ef":
        make_alert("queue-deep", "node:ax-8", labels={"shard": one})
    make_silence(["node=ax-8"])
    assert [notifications.plan(timezone.now()) for _ in range(3)] == [2, 2, 0]
    grave = make_alert("ttl-exceeded", "driver:job7")
    assert notifications.plan(timezone.now()) == 1
    assert channel.notifications.get(alert=grave).state == "waiting"


@pytest.mark.django_db
def test_what_fires_is_read_once_for_all_channels() -> None:
    """A storm of thousands is read twice in a tick."""
    alert = make_alert("queue-deep", "node:ax-7")

    def statements() -> int:
        with CaptureQueriesContext(connection) as asked:
            notifications.plan(timezone.now())
        return len(asked)

    make_channel("none", "http://127.0.0.1:9/x", matchers=["node=ax-1"])
    of_one = statements()
    for number in range(5):
        make_channel(f"none {number}", "http://127.0.0.1:9/x", matchers=["node=ax-1"])
    assert statements() == of_one
    assert not alert.notifications.exists()


@pytest.mark.django_db
def test_of_a_storm_the_gravest_is_told_first_and_what_is_explained_holds_up_nothing(
    receiver: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "GROUP_MAX", 2)
    channel = make_channel("hook", receiver.address)
    for one in "abcdef":
        make_alert("queue-deep", "node:ax-7", labels={"shard": one})
    make_alert("hit-rate-drop", "org:acme", severity="ticket")
    notifications.plan(timezone.now() - timedelta(minutes=1))
    cause = make_alert("agent-not-reporting", "node:ax-7")
    notifications.plan(timezone.now() - timedelta(minutes=1))
    Alert.objects.filter(rule="queue-deep").update(suppressed_by=cause)
    assert notifications.deliver(channel.pk) == 2
    told = [body["alerts"][0]["rule"] for body in receiver.bodies]
    assert told == ["agent-not-reporting", "hit-rate-drop"]
    assert log(channel) == [("firing", "sent")] * 2


@pytest.mark.django_db
def test_of_what_is_silenced_or_explained_nobody_is_told_until_it_is_not(receiver: Hook) -> None:
    channel = make_channel("hook", receiver.address)
    cause = make_alert("agent-not-reporting", "node:ax-7")
    alert = make_alert("queue-deep", "node:ax-7", suppressed_by=cause)
    silence = make_silence(["rule=agent-not-reporting", "node=ax-*"])
    run(channel)
    assert receiver.got == []
    silence.ends_at = timezone.now()
    silence.save()
    notifications.plan(timezone.now())
    assert log(channel) == [("firing", "waiting")]
    make_silence(["node=ax-7"])  # before anybody was told
    run(channel)
    assert receiver.got == []
    Alert.objects.filter(pk=alert.pk).update(suppressed_by=None)
    acme = Org.objects.create(slug="acme", name="Acme")
    make_alert("refill-slow", "org:acme", acme)
    make_silence(["rule=*"], Org.objects.create(slug="globex", name="Globex"))
    run(channel)
    [body] = receiver.bodies
    assert body["alerts"][0]["rule"] == "refill-slow", "a silence of another org reaches no further"


@pytest.mark.django_db
def test_an_end_is_not_told_where_nobody_was_told_of_the_beginning(receiver: Hook) -> None:
    channel = make_channel("hook", receiver.address)
    quiet = make_channel("no ends", receiver.address, send_resolved=False)
    alert = make_alert("queue-deep", "node:ax-7")
    run(quiet)
    Alert.objects.filter(pk=alert.pk).update(state="resolved")
    make_alert("ttl-exceeded", "driver:j", state="resolved")
    run(quiet)
    assert log(quiet) == [("firing", "sent")]
    run(channel)
    assert [what for what, _ in log(channel)] == ["firing"]  # planned while it fired, and late
    assert len(receiver.got) == 2


@pytest.mark.django_db
def test_a_channel_that_is_told_of_ends_is_told_of_those_to_come(receiver: Hook) -> None:
    channel = make_channel("hook", receiver.address, send_resolved=False)
    over, running = make_alert("queue-deep", "node:ax-7"), make_alert("queue-deep", "node:ax-8")
    run(channel)
    Alert.objects.filter(pk=over.pk).update(state="resolved")
    run(channel)
    with transaction.atomic():
        changed = channels.for_change(SYSTEM, channel.pk)
        channels.update_channel(SYSTEM, changed, name="hook", send_resolved=True)
    run(channel)
    assert log(channel) == [("firing", "sent")] * 2
    Alert.objects.filter(pk=running.pk).update(state="resolved")
    run(channel)
    [*_, told] = receiver.bodies
    assert (told["what"], [one["subject"] for one in told["alerts"]]) == ("resolved", ["ax-8"])


# Mail


@pytest.fixture
def box(settings: Any) -> Iterator[Mailbox]:
    with mailbox() as box:
        settings.SMTP_URL, settings.MAIL_FROM = box.url, "tidegate@example.org"
        yield box


@pytest.mark.django_db
def test_a_mail_says_what_is_so_and_is_one_conversation(box: Mailbox) -> None:
    channel = channels.create_channel(
        SYSTEM, org=None, kind="email", name="mail", address="ada@example.org, bob@example.org"
    )
    assert channel.shown == "ada@example.org and 1 more"
    make_alert("queue-deep", "node:ax-7", sentence="1 request waits")
    box.refuses = True
    run(channel)
    assert "451" in channel.notifications.get().answer
    box.refuses = False
    run(channel)
    Alert.objects.update(state="resolved")
    run(channel)
    first, second = (message_from_bytes(one.content, policy=policy.default) for one in box.mails)
    assert box.mails[0].rcpt_tos == ["ada@example.org", "bob@example.org"]
    assert first["Subject"] == "FIRING Shard queue too deep: ax-7"
    assert "1 request waits" in first.get_content()
    assert second["Subject"].startswith("RESOLVED")
    assert first["References"] == second["References"]
    assert first["Message-ID"] != second["Message-ID"]
    assert log(channel) == [("firing", "sent"), ("resolved", "sent")]


@pytest.mark.django_db
def test_without_a_mail_server_there_is_no_mail_channel() -> None:
    with pytest.raises(ValidationError, match="TIDEGATE_SMTP_URL"):
        channels.create_channel(SYSTEM, org=None, kind="email", name="mail", address="ada@example.org")


@pytest.mark.django_db
def test_secrets_are_sealed_and_never_told_again(receiver: Hook) -> None:
    channel = channels.create_channel(
        SYSTEM, org=None, kind="webhook", name="hook", address=receiver.address, secret="s1gning"
    )
    with connection.cursor() as cursor:
        cursor.execute("SELECT address, secret FROM alerts_channel")
        stored = str(cursor.fetchone())
    assert "s3cret" not in stored
    assert "s1gning" not in stored
    assert "s3cret" not in channel.shown
    assert channels.update_channel(SYSTEM, channel, name="same").secret == "s1gning"


@pytest.mark.parametrize(
    ("address", "answer", "shown"),
    [
        ("https://a.example.org/in?token=t0psecret", "no token t0psecret", "no token …"),
        (
            "https://a.example.org/in?token=t0p%2Fsecret",
            "no t0p/secret at a.example.org",
            "no … at a.example.org",
        ),
        ("https://a.example.org/in?token=t0p%2Fsecret", "no t0p%2Fsecret", "no …"),
        ("https://a.example.org/T0/B0/t0psecret", "no hook t0psecret in T0", "no hook … in T0"),
        (
            "https://a.example.org/hooks/t0psecret",
            "no hook/t0psecret, no x_t0psecret",
            "no hook/…, no x_…",
        ),
        ("https://a.example.org/operations/in?audience=t0psecret", "no operations audience", ""),
        ("https://a.example.org/alertmanager", "alertmanagers: no alertmanager", "alertmanagers: no …"),
        ("https://ada:t0psecret@a.example.org/in", "no user ada:t0psecret", "no user ada:…"),
    ],
)
def test_what_a_receiver_repeats_of_an_address_is_not_shown(
    address: str, answer: str, shown: str
) -> None:
    assert senders._without_secrets(Channel(kind="webhook", address=address), answer) == (
        shown or answer
    )


# Killed


_DELIVER = """
import django; django.setup()
from console.alerts.delivery.notifications import deliver
deliver({channel})
"""


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_who_is_killed_while_it_is_told_leaves_it_to_be_told_again(receiver: Hook) -> None:
    """The receiver has it, and nobody knows: so it comes again, with the same key."""
    channel = make_channel("hook", receiver.address)
    make_alert("queue-deep", "node:ax-7")
    notifications.plan(timezone.now())
    Notification.objects.update(next_try_at=timezone.now())
    receiver.may_answer.clear()
    name = connection.settings_dict["NAME"]
    environment = {
        **os.environ,
        "DATABASE_URL": os.environ["DATABASE_URL"].replace("/tidegate?", f"/{name}?"),
        "DJANGO_SETTINGS_MODULE": "console.settings",
    }
    with subprocess.Popen(
        [sys.executable, "-c", _DELIVER.format(channel=channel.pk)], cwd=PROJECT, env=environment
    ) as process:
        assert receiver.arrived.wait(60)
        notifications.deliver(channel.pk)
        assert len(receiver.got) == 1, "for as long as the lease, it is left alone"
        process.kill()
    receiver.may_answer.set()
    assert log(channel) == [("firing", "waiting")]
    run(channel)
    assert log(channel) == [("firing", "sent")]
    first, second = receiver.got
    assert first[1] == second[1]
    assert first[0]["Idempotency-Key"] == second[0]["Idempotency-Key"]


@pytest.mark.django_db
def test_a_receiver_that_takes_its_time_holds_a_worker_for_ten_seconds() -> None:
    """Whatever it does meanwhile: without a deadline some of them would hold it for ever."""
    with contextlib.ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(EXHAUSTING[name])) for name in SLOW}
        told = [make_channel(name, peer.url, kind="slack") for name, peer in peers.items()]
        with ThreadPoolExecutor(len(told)) as pool:  # side by side, since each takes all its time
            outcomes = dict(zip(peers, pool.map(lambda channel: send(channel, []), told), strict=True))
    assert {name: (one.sent, one.answer.partition(":")[0]) for name, one in outcomes.items()} == SLOW


@pytest.mark.django_db
def test_what_a_receiver_compresses_is_not_looked_at() -> None:
    with Peer(bomb(64)) as peer:
        outcome = send(make_channel("hook", peer.url, kind="slack"), [])
    assert (outcome.sent, outcome.answer) == (True, "200 OK")
