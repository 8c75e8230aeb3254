"""From numbers in PostgreSQL to alerts: what fires, what is unknown, what is hidden, what is late."""

from __future__ import annotations

import contextlib
import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.accounts.principal import SYSTEM
from console.alerts.conditions.condition import Finding
from console.alerts.models import Alert, Evaluation
from console.alerts.rules import thresholds
from console.alerts.rules.catalogue import BY_SLUG, RULES
from console.alerts.rules.rule import TICK_SECONDS, Rule
from console.alerts.services import Evaluator
from console.alerts.state import evaluation
from console.alerts.state.lifecycle import Verdict
from console.alerts.state.suppression import causes
from console.metrics import prometheus
from console.orgs.models import Org
from telemetry import queries
from telemetry.metrics import Kind
from telemetry.models import Event, Source, Topic
from telemetry.shapes import Series
from telemetry.store.rollup import RollUp
from tests.console.alerts.evaluations import NOW, heard, put, tick
from tests.console.alerts.numbers import StaticCondition, rule_of
from tests.console.alerts.things import make_alert
from tests.console.routing.brains import a_model, a_replica

pytestmark = pytest.mark.django_db

QUEUE = BY_SLUG["queue-deep"]
SHARD = (("shard", "a"),)
WAITING = Series(Kind.GAUGE, "kvss_shard_waiting_requests", SHARD)


@pytest.fixture(autouse=True)
def days(db: None) -> None:
    RollUp().tend_days(NOW.timestamp())


def hasty(slug: str) -> Rule:
    """The rule, which fires and ends at once."""
    rule = BY_SLUG[slug]
    current = thresholds.thresholds_for_change(SYSTEM, rule, "")
    thresholds.set_thresholds(
        SYSTEM, current, values={"pending_seconds": 0, "keep_firing_seconds": 0}, enabled=True
    )
    return rule


def test_what_is_stored_of_rules_is_read_and_written_at_once() -> None:
    """However many rules are due: a tick is done every ten seconds."""

    def statements(*rules: Rule) -> int:
        with CaptureQueriesContext(connection) as asked:
            tick(*rules)
        tables = ("alerts_thresholds", "alerts_evaluation", "alerts_alert")
        return sum(any(table in one["sql"] for table in tables) for one in asked)

    assert statements(RULES[0]) == statements(*RULES)
    assert Evaluation.objects.count() == len(RULES)


def states() -> dict[str, str]:
    return {f"{alert.rule} {alert.topic}": alert.state for alert in Alert.objects.all()}


def test_a_deep_queue_fires_with_its_evidence_and_ends() -> None:
    queue = hasty("queue-deep")
    heard("node:ax-7")
    put("node:ax-7", {WAITING: (50_000.0, 10, 5000.0)}, ago=20)
    assert tick(queue) == 1
    alert = Alert.objects.get()
    assert (alert.state, alert.topic, alert.labels) == ("firing", "node:ax-7", {"shard": "a"})
    assert (alert.value, alert.threshold) == (5000, 1000)
    assert alert.sentence == "5,000 requests waiting at shard a of ax-7"
    assert tick(queue) == 0
    put("node:ax-7", {WAITING: (0.0, 10, 0.0)}, ago=10)
    assert tick(queue) == 1
    assert states() == {"queue-deep node:ax-7": "resolved"}
    events = Event.objects.filter(kind__startswith="alert.").order_by("pk")
    assert [event.kind for event in events] == ["alert.firing", "alert.resolved"]
    assert set(events[0].topics) == {"alerts", "node:ax-7", "fleet"}


def test_it_has_to_last_before_it_fires() -> None:
    heard("node:ax-7")
    put("node:ax-7", {WAITING: (50_000.0, 10, 5000.0)})
    tick(QUEUE)
    assert states() == {"queue-deep node:ax-7": "pending"}
    Alert.objects.update(begun_at=NOW - timedelta(seconds=121))
    assert tick(QUEUE) == 1
    assert states() == {"queue-deep node:ax-7": "firing"}


def test_that_a_replica_is_ejected_ends_when_it_is_removed_though_brains_counted_it_until_then() -> None:
    labels = (("model", "acme/chat"), ("replica", "chat-1"), ("state", "ejected"))
    replica = a_replica(a_model())
    heard("brain:east")
    put("fleet", {Series(Kind.GAUGE, "brain_replica_state", labels): (10.0, 10, 1.0)}, ago=20)
    rule = BY_SLUG["replica-ejected"]
    tick(rule)
    Alert.objects.update(begun_at=NOW - timedelta(seconds=61))
    tick(rule)
    assert states() == {"replica-ejected fleet": "firing"}
    replica.delete()
    tick(rule)
    assert states() == {"replica-ejected fleet": "resolved"}


def test_an_agent_is_not_silent_for_the_time_in_which_nothing_was_received() -> None:
    silent = hasty("agent-not-reporting")
    heard("node:ax-7", seconds_ago=90)
    heard("ingest:1")
    Source.objects.filter(topic="ingest:1").update(started_at=NOW - timedelta(seconds=20))
    tick(silent)
    assert states() == {}
    heard("ingest:before", seconds_ago=30)  # not received: ten seconds of the ninety
    tick(silent)
    assert states() == {"agent-not-reporting node:ax-7": "firing"}


def test_of_a_node_that_falls_silent_nothing_is_known_and_the_silence_explains_it() -> None:
    queue, silent = hasty("queue-deep"), hasty("agent-not-reporting")
    heard("node:ax-7")
    put("node:ax-7", {WAITING: (50_000.0, 10, 5000.0)})
    tick(queue, silent)
    heard("node:ax-7", seconds_ago=90)
    heard("node:ax-8")
    tick(queue, silent)
    assert states() == {"queue-deep node:ax-7": "no_data", "agent-not-reporting node:ax-7": "firing"}
    hidden = Alert.objects.get(rule="queue-deep")
    assert hidden.suppressed_by
    assert hidden.suppressed_by.rule == "agent-not-reporting"
    assert hidden.sentence == "5,000 requests waiting at shard a of ax-7", "the last that was known"
    heard("node:ax-7")
    tick(queue, silent)
    assert states()["agent-not-reporting node:ax-7"] == "resolved"
    assert Alert.objects.get(rule="queue-deep").suppressed_by is None


def test_when_no_numbers_arrive_nothing_gets_well() -> None:
    always = rule_of(StaticCondition(fleet=Verdict.BREACH))
    heard("web:host")
    tick(always)
    assert states() == {"ttl-exceeded fleet": "firing"}
    heard("web:host", seconds_ago=300)
    late = hasty("telemetry-late")
    tick(rule_of(StaticCondition(fleet=Verdict.OK)), late)
    assert states() == {"ttl-exceeded fleet": "no_data", "telemetry-late fleet": "firing"}
    heard("web:host")
    tick(rule_of(StaticCondition(fleet=Verdict.OK)), late)
    assert states() == {"ttl-exceeded fleet": "resolved", "telemetry-late fleet": "resolved"}


def test_what_is_told_of_an_org_is_the_orgs() -> None:
    acme = Org.objects.create(slug="acme", name="Acme")
    heard("driver:j")
    tick(
        rule_of(
            StaticCondition(**{"org:acme": Verdict.BREACH, "org:nobody": Verdict.BREACH}),
            "refill-slow",
        )
    )
    assert {alert.topic: alert.org for alert in Alert.objects.all()} == {
        "org:acme": acme,
        "org:nobody": None,
    }


def test_what_is_switched_off_ends_and_does_not_begin() -> None:
    heard("web:host")
    always = rule_of(StaticCondition(fleet=Verdict.BREACH))
    tick(always)
    current = thresholds.thresholds_for_change(SYSTEM, always, "")
    thresholds.set_thresholds(SYSTEM, current, values={}, enabled=False)
    tick(always)
    assert states() == {"ttl-exceeded fleet": "resolved"}
    tick(always)
    assert states() == {"ttl-exceeded fleet": "resolved"}


def test_a_rule_that_can_not_be_evaluated_says_so_and_stops_no_other() -> None:
    from telemetry.queries import Unanswerable

    def broken(*_: Any) -> Any:
        raise Unanswerable("step", "That is too much.")

    heard("web:host")
    assert tick(rule_of(broken, "evict-slow"), rule_of(StaticCondition(fleet=Verdict.BREACH))) == 1
    assert Evaluator.now().problems == {"evict-slow": "That is too much."}


def test_a_rule_that_stops_with_an_exception_says_so_and_stops_no_other() -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("of acme's tokens")

    heard("web:host")
    assert tick(rule_of(broken, "evict-slow"), rule_of(StaticCondition(fleet=Verdict.BREACH))) == 1
    assert Evaluator.now().problems == {
        "evict-slow": "It stopped with ZeroDivisionError: see the worker's log."
    }


def test_a_rule_whose_query_is_canceled_says_so_and_stops_no_other() -> None:
    def slow(*_: Any) -> Any:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL statement_timeout = '1ms'")
            cursor.execute("SELECT pg_sleep(60)")

    heard("web:host")
    assert tick(rule_of(slow, "evict-slow"), rule_of(StaticCondition(fleet=Verdict.BREACH))) == 1
    assert "OperationalError" in Evaluator.now().problems["evict-slow"]


def test_a_rule_whose_table_is_locked_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def locked_out(*_: Any) -> Any:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '1ms'")
            cursor.execute("SELECT pg_advisory_xact_lock(1, 2)")

    heard("web:host")
    with contextlib.closing(connection.copy()) as other, other.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(1, 2)")
        assert (
            tick(rule_of(locked_out, "evict-slow"), rule_of(StaticCondition(fleet=Verdict.BREACH))) == 1
        )
    [said] = [one for one in caplog.records if "evict-slow" in one.getMessage()]
    assert said.exc_info is None
    assert Evaluator.now().problems == {
        "evict-slow": "A table that it reads is locked, as by a migration."
    }


def test_numbers_of_orgs_and_nodes_that_there_are_not_stop_no_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver may report those of any number."""
    monkeypatch.setattr(queries, "TOPICS_MAX", 2)
    Org.objects.create(slug="acme", name="Acme")
    heard("node:ax-7")
    put("node:ax-7", {WAITING: (50_000.0, 10, 5000.0)})
    today = NOW.date()
    for kind in ("org", "session", "node"):
        Topic.objects.bulk_create(Topic(name=f"{kind}:x{one}", seen_on=today) for one in range(3))
    tick(*RULES)
    assert Evaluator.now().problems == {}
    assert states() == {"queue-deep node:ax-7": "pending"}


def test_the_breaches_of_a_flood_are_one_alert_beyond_the_worst(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "INSTANCES_OF_TOPIC_MAX", 2)
    monkeypatch.setattr(evaluation, "INSTANCES_MAX", 5)
    queue = hasty("queue-deep")
    heard("node:ax-7")
    heard("node:ax-8")
    put("node:ax-7", {WAITING: (50_000.0, 10, 5000.0)}, ago=20)

    def flood(depths: range, ago: int) -> None:
        told = {
            Series(Kind.GAUGE, WAITING.name, (("shard", f"s{depth}"),)): (10.0 * depth, 10, float(depth))
            for depth in depths
        }
        put("node:ax-8", told, ago)

    def firing() -> list[tuple[str, str]]:
        rows = Alert.objects.filter(state="firing").order_by("topic", "labels__shard")
        return [(row.topic, row.labels["shard"]) for row in rows]

    flood(range(2000, 2010), ago=20)
    assert tick(queue) == 4
    of_flood = [("node:ax-8", one) for one in ("other", "s2008", "s2009")]
    assert firing() == [("node:ax-7", "a"), *of_flood]
    rest = Alert.objects.get(labels__shard="other")
    assert rest.sentence == "8 more at ax-8, such as: 2,007 requests waiting at shard s2007 of ax-8"
    flood(range(3000, 3010), ago=10)
    tick(queue)
    assert firing() == [("node:ax-7", "a"), *of_flood], "open ones are not displaced"
    assert Evaluator.now().problems == {}


def test_breaches_of_the_fleet_are_of_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "INSTANCES_OF_TOPIC_MAX", 2)
    monkeypatch.setattr(evaluation, "INSTANCES_MAX", 5)

    def breaches(count: int) -> Rule:
        found = [
            Finding("fleet", Verdict.BREACH, f"ax-{one} is so", float(one), labels={"node": f"ax-{one}"})
            for one in range(count)
        ]
        return rule_of(lambda *_: found)

    heard("web:host")
    tick(breaches(4))
    assert sorted(Alert.objects.values_list("labels__node", flat=True)) == [f"ax-{n}" for n in range(4)]
    tick(breaches(9))
    assert Evaluator.now().problems == {}
    assert Alert.objects.filter(state="firing").count() == 5
    assert Alert.objects.get(labels__node="other").sentence == "5 more at fleet, such as: ax-8 is so"


def test_too_many_breaches_are_told_as_a_rule_that_is_too_strict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "INSTANCES_MAX", 1)
    heard("web:host")
    tick(rule_of(StaticCondition(**{"node:a": Verdict.BREACH, "node:b": Verdict.BREACH})))
    assert not Alert.objects.exists()
    assert "too strict" in Evaluator.now().problems["ttl-exceeded"]


def age() -> float:
    """Of the last evaluation, as Prometheus is told."""
    [found] = re.findall(r"^tidegate_alerts_age_seconds ([\d.e-]+)", prometheus.page(), re.MULTILINE)
    return float(found)


def test_rules_are_due_when_their_time_has_come_and_a_dead_evaluator_is_seen() -> None:
    often, seldom = (
        rule_of(StaticCondition()),
        rule_of(StaticCondition(), "evict-slow", every_seconds=60),
    )
    assert Evaluator.now().late
    evaluation.tick(timezone.now(), [often, seldom])
    assert Evaluator.now().late, "the others never were"
    evaluation.tick(timezone.now())
    assert not Evaluator.now().late
    at = Evaluation.objects.get(rule="ttl-exceeded").at
    due = {
        seconds: evaluation.due([often, seldom], at + timedelta(seconds=seconds))
        for seconds in (4, 9, 58)
    }
    assert due == {4: [], 9: [often], 58: [often, seldom]}
    assert age() < 60
    Evaluation.objects.update(at=timezone.now() - timedelta(seconds=90))
    assert Evaluator.now().late
    assert age() >= 90


def test_a_rule_that_is_left_out_is_seen() -> None:
    """However often the others are evaluated."""
    evaluation.tick(timezone.now())
    seldom = [rule.slug for rule in RULES if rule.every_seconds == 60]
    often = [rule.slug for rule in RULES if rule.every_seconds == TICK_SECONDS]
    assert seldom
    Evaluation.objects.filter(rule__in=seldom).update(at=timezone.now() - timedelta(seconds=70))
    assert not Evaluator.now().late, "they are evaluated once a minute"
    Evaluation.objects.filter(rule=often[-1]).update(at=timezone.now() - timedelta(seconds=90))
    assert Evaluator.now().late
    assert age() >= 90


def test_the_farthest_cause_explains() -> None:
    leaf = make_alert("leaf-down", "leaf:leaf-1")
    one = make_alert("agent-not-reporting", "node:ax-1")
    two = make_alert("agent-not-reporting", "node:ax-2")
    of_one = make_alert("queue-deep", "node:ax-1", state="no_data", labels={"shard": "a"})
    of_two = make_alert("queue-deep", "node:ax-2", state="no_data", labels={"shard": "a"})
    well = make_alert("queue-deep", "node:ax-3", labels={"shard": "a"})
    lost = make_alert("refill-slow", "org:acme", state="no_data")
    late = make_alert("telemetry-late", "fleet")
    pages = make_alert("lost-node-not-replaced", "session:chat", labels={"node": "ax-2"})
    alerts = [leaf, one, two, of_one, of_two, well, lost, late, pages]
    assert causes(alerts, {"node:ax-1": ("leaf-1", "leaf-9")}) == {
        one.pk: leaf.pk,
        of_one.pk: leaf.pk,
        of_two.pk: two.pk,
        lost.pk: late.pk,
    }


def test_a_process_whose_clock_is_ahead_makes_no_other_fall_silent() -> None:
    heard("node:ax-1")
    heard("node:ax-2", -90)
    tick(hasty("agent-not-reporting"))
    assert states() == {}
