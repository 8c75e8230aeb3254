"""Work is taken late and given back by the dying: done elsewhere, once in effect. Real workers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from django.conf import settings
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from console.accounts import throttle
from console.accounts.models import FailedLogin
from console.audit.models import AuditEntry
from console.beat import ONLY_IF, WAITING_MAX, ElectedScheduler
from console.celery import app
from console.fleet.membership.heartbeats import missed_seconds
from console.fleet.membership.liveness import database_now
from console.fleet.models import Driver, Node
from console.operations.core import ENDED, State
from console.operations.models import Operation
from console.operations.services import take_due
from console.orgs.models import Org
from console.policies.models import ScheduledPolicy
from console.sessions.models import FormerHome
from console.shell import request_context, tasks
from console.shell.request_context import RequestContext
from console.workloads.leader.election import NotLeader
from tests.console.celery_tasks import BACKENDS, BEGUN, GO_ON, effect_once, say_backend
from tests.console.sessions.fleets import make_fleet
from tests.live import wait_until
from tests.processes import Process, start

slow = pytest.mark.slow


def test_the_settings_are_those_of_idempotent_work() -> None:
    conf = app.conf
    assert conf.task_acks_late
    assert conf.task_reject_on_worker_lost
    assert conf.worker_prefetch_multiplier == 1
    assert conf.worker_soft_shutdown_timeout > 0
    assert conf.task_ignore_result
    assert not conf.result_backend
    assert conf.broker_connection_max_retries is None, "a worker waits for Redis however long it takes"
    # A task is stopped well before it is taken for lost and given to another worker.
    assert conf.task_time_limit < conf.broker_transport_options["visibility_timeout"]


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(settings.REDIS_URL, decode_responses=True)
    client.flushdb()
    yield client
    client.flushdb()
    client.close()


@contextlib.contextmanager
def worker(log: Path, **environment: str) -> Iterator[Process]:
    """A worker process over this test's database and broker."""
    target = connection.settings_dict
    database_url = os.environ["DATABASE_URL"].replace("/tidegate?", f"/{target['NAME']}?")
    with log.open("wb") as output:
        process = start(
            *("celery", "-A", "console.celery", "worker"),
            *("--include", "tests.console.celery_tasks", "--pool", "prefork"),
            *("--concurrency", "1", "--without-gossip", "--without-mingle"),
            environment={**os.environ, "DATABASE_URL": database_url, **environment},
            descriptors={1: output.fileno(), 2: output.fileno()},
            is_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def effects() -> list[str]:
    return list(AuditEntry.objects.filter(action="tests.effect").values_list("object_name", flat=True))


def begun(broker: redis.Redis, number: int) -> None:
    wait_until(f"the task begins for time {number}", lambda: broker.llen(BEGUN) >= number, 40)


@slow
@pytest.mark.django_db(transaction=True)
def test_a_task_whose_process_is_killed_is_finished_by_another_once(
    broker: redis.Redis, tmp_path: Path
) -> None:
    with worker(tmp_path / "log"):
        effect_once.delay("killed-child")
        begun(broker, 1)
        os.kill(int(str(broker.lindex(BEGUN, 0))), signal.SIGKILL)
        begun(broker, 2)
        broker.rpush(GO_ON, "1", "1")
        wait_until("the effect", effects)
        wait_until("the queue is empty", lambda: not _unacknowledged(broker))
    assert len(effects()) == 1


@slow
@pytest.mark.django_db(transaction=True)
def test_a_task_whose_worker_is_killed_is_finished_by_another_worker_once(
    broker: redis.Redis, tmp_path: Path
) -> None:
    short = {"TIDEGATE_TASK_SECONDS_MAX": "2"}
    with worker(tmp_path / "first", **short) as first:
        effect_once.delay("killed-worker")
        begun(broker, 1)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(30)
    assert effects() == []
    broker.rpush(GO_ON, "1", "1")  # Redis may still hand one to the dead
    with worker(tmp_path / "second", **short):
        wait_until("another worker does it", effects, 40)
    assert len(effects()) == 1


@slow
@pytest.mark.django_db(transaction=True)
def test_tasks_of_a_process_share_a_connection_until_it_breaks(
    broker: redis.Redis, tmp_path: Path
) -> None:
    def said(number: int) -> list[str]:
        say_backend.delay()
        wait_until("it is said", lambda: broker.llen(BACKENDS) == number, 40)
        return cast("list[str]", broker.lrange(BACKENDS, 0, -1))

    with worker(tmp_path / "log"):
        said(1)
        first, second = said(2)
        assert first == second
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [int(second)])
        assert said(3)[-1] != second


@slow
@pytest.mark.django_db(transaction=True)
def test_the_request_id_reaches_what_a_task_records(broker: redis.Redis, tmp_path: Path) -> None:
    request_context.enter(RequestContext("req-77"))
    effect_once.delay("with-id")
    broker.rpush(GO_ON, "1")
    with worker(tmp_path / "log"):
        wait_until("the effect", effects)
    assert effects() == ["req-77"]
    assert AuditEntry.objects.get(action="tests.effect").request_id == "req-77"


@pytest.mark.django_db(transaction=True)
def test_work_is_queued_only_when_its_change_is_committed(broker: redis.Redis) -> None:
    def change_and_fail() -> None:
        with transaction.atomic():
            cast("Any", effect_once).delay_on_commit("rolled-back")
            raise RuntimeError("after the change")

    with pytest.raises(RuntimeError):
        change_and_fail()
    assert _queued(broker) == 0
    with transaction.atomic():
        cast("Any", effect_once).delay_on_commit("committed")
        assert _queued(broker) == 0
    assert _queued(broker) == 1


@pytest.mark.django_db
def test_housekeeping_forgets_what_is_over(people: Any, django_capture_on_commit_callbacks: Any) -> None:
    throttle.count_attempt("ada", None)
    throttle.count_attempt("bob", None)
    past = timezone.now() - timedelta(seconds=1)
    FailedLogin.objects.filter(key_sha256=throttle._key("name", "ada")).update(window_ends_at=past)
    tasks.forget_what_is_over()
    assert FailedLogin.objects.count() == 1


@pytest.mark.django_db
def test_what_can_not_be_forgotten_keeps_nothing_else(
    people: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(now: Any) -> int:
        raise OperationalError("canceling statement due to lock timeout")

    throttle.count_attempt("ada", None)
    FailedLogin.objects.update(window_ends_at=timezone.now() - timedelta(seconds=1))
    monkeypatch.setattr(tasks, "drop_old_answers", fail)
    monkeypatch.setattr(
        "random.shuffle", lambda kinds: kinds.sort(key=lambda kind: kind[0] != "stored answers")
    )
    tasks.forget_what_is_over()
    assert "old stored answers could not be dropped" in caplog.text
    assert FailedLogin.objects.count() == 0


def _queued(broker: redis.Redis) -> int:
    return int(broker.llen("tidegate:celery:celery"))


def _unacknowledged(broker: redis.Redis) -> int:
    return int(broker.hlen("tidegate:celery:unacked"))


@pytest.mark.django_db(transaction=True)
def test_beat_asks_for_nothing_while_nobody_does_it(
    broker: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """As without workers, for days. But it does not wait for what others have put behind."""
    beat = ElectedScheduler(app=app, lazy=True)
    beat.setup_schedule()
    evaluate, update = beat.schedule["alerts"], beat.schedule["tell-everyone-what-to-be"]
    assert beat._election.run()
    try:
        broker.rpush("tidegate:celery:celery", *["{}"] * WAITING_MAX)
        for _ in range(3):
            beat.apply_entry(evaluate, producer=beat.producer)
        assert _queued(broker) == WAITING_MAX
        assert caplog.text.count("Are there workers?") == 1
        beat.apply_entry(update, producer=beat.producer)
        assert broker.llen(f"tidegate:celery:celery\x06\x16{settings.ASKS_OTHERS}") == 1
        broker.ltrim("tidegate:celery:celery", 1, -1)
        beat.apply_entry(evaluate, producer=beat.producer)
        assert _queued(broker) == WAITING_MAX
        assert caplog.text.count("beat goes on") == 1
        producer: Any = beat.producer
        producer.channel.close()  # as where the connection is lost
        beat.apply_entry(update, producer=producer)
    finally:
        beat.close()


@pytest.mark.django_db(transaction=True)
def test_beat_asks_the_database_once_for_each_message(broker: redis.Redis) -> None:
    """Whether it still leads."""
    beat = ElectedScheduler(app=app, lazy=True)
    try:
        beat.setup_schedule()
        wait_until("it leads", lambda: beat.tick() >= 0 and beat._election.is_leader)
        with CaptureQueriesContext(connection) as asked:
            wait_until("messages are sent", lambda: beat.tick() >= 0 and _queued(broker) >= 2)
        due = sum(entry.total_run_count for entry in beat.schedule.values())
        assert len(asked) <= due
    finally:
        beat.close()


@pytest.mark.django_db(transaction=True)
def test_beat_sends_what_has_something_to_do(broker: redis.Redis) -> None:
    """Not a message every few seconds to find that no operation is under way, no node is silent, no home
    is left to be emptied and no scheduled policy is due."""
    beat = ElectedScheduler(app=app, lazy=True)
    beat.setup_schedule()
    assert set(ONLY_IF) <= {entry.task for entry in beat.schedule.values()}

    def is_sent(name: str) -> bool:
        broker.flushdb()
        beat.apply_entry(beat.schedule[name], producer=beat.producer)
        return sum(broker.llen(key) for key in broker.keys("tidegate:celery:celery*")) == 1

    assert beat._election.run()
    try:
        assert not is_sent("sweep-operations")
        for state in State:
            ends = {"done": True, "done_at": timezone.now()} if state in ENDED else {}
            why = {"reason": "", "detail": ""}
            said = {"response": {}} if state == "succeeded" else {"error": why} if ends else {}
            operation = Operation.objects.create(
                kind="tests.steps", role=1, total=1, target=state, state=state, **ends, **said
            )
            assert is_sent("sweep-operations") == bool(take_due(timezone.now())) == state.moves
            operation.delete()
        make_fleet(boxes=1)
        heard = database_now()
        Node.objects.update(last_heartbeat_at=heard)
        assert not is_sent("replace-lost-nodes")
        silent = heard - timedelta(seconds=missed_seconds() + 1)
        Node.objects.filter(name="ax1").update(last_heartbeat_at=silent)
        assert is_sent("replace-lost-nodes")
        assert not is_sent("forget-former-homes")
        driver = Driver.objects.create(name="job7")
        FormerHome.objects.create(driver=driver, node=Node.objects.get(name="ax1"))
        assert is_sent("forget-former-homes")
        day = timedelta(days=1)
        states = ScheduledPolicy.State
        schedules: tuple[tuple[str, timedelta, timedelta | None, bool], ...] = (
            (states.WAITING, -day, None, True),
            (states.WAITING, day, 2 * day, False),
            (states.IN_FORCE, -day, None, False),
            (states.IN_FORCE, -day, day, False),
            (states.IN_FORCE, -2 * day, -day, True),
            (states.DONE, -2 * day, -day, False),
        )
        for policy, begins, ends_at, is_due in schedules:
            schedule(policy, begins, ends_at)
            assert is_sent("begin-and-end-scheduled-policies") == is_due, policy
    finally:
        beat.close()


def schedule(state: str, starts: timedelta, ends: timedelta | None) -> None:
    """Make it the only policy that is scheduled."""
    ScheduledPolicy.objects.all().delete()
    org, _ = Org.objects.get_or_create(slug="acme", defaults={"name": "Acme"})
    now = timezone.now()
    ScheduledPolicy.objects.create(
        org=org,
        reason="why",
        state=state,
        starts_at=now + starts,
        ends_at=None if ends is None else now + ends,
    )


@pytest.mark.django_db(transaction=True)
def test_what_postgresql_refuses_to_say_keeps_nothing_from_being_sent(
    broker: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while another release's tables are there: no task was sent at all."""
    beat = ElectedScheduler(app=app, lazy=True)
    beat.setup_schedule()
    sweep = beat.schedule["sweep-operations"]
    monkeypatch.setattr("console.beat.ONLY_IF", {sweep.task: "EXISTS (SELECT FROM no_such_table)"})
    assert beat._election.run()
    try:
        for count in (1, 2):
            beat.apply_entry(sweep, producer=beat.producer)
            assert _queued(broker) == count
        assert caplog.text.count("so it is sent") == 1
        with contextlib.closing(connection.copy()) as other, other.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [beat._election._held.info.backend_pid])
        with pytest.raises(NotLeader):  # another one may lead
            beat.apply_entry(sweep, producer=beat.producer)
        assert _queued(broker) == 2
    finally:
        beat.close()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("name", "table"),
    [("sweep-operations", "operations_operation"), ("replace-lost-nodes", "fleet_node")],
)
def test_a_table_that_a_migration_has_locked_keeps_nothing_from_being_sent(
    broker: redis.Redis, name: str, table: str
) -> None:
    """It waited for as long as the lock was held, with all other tasks."""
    beat = ElectedScheduler(app=app, lazy=True)
    beat.setup_schedule()
    assert beat._election.run()
    with contextlib.closing(connection.copy()) as other, other.cursor() as cursor:
        cursor.execute(f"BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        try:
            beat.apply_entry(beat.schedule[name], producer=beat.producer)
            assert sum(broker.llen(key) for key in broker.keys("tidegate:celery:celery*")) == 1
            assert beat._election.is_leader
        finally:
            cursor.execute("ROLLBACK")
            beat.close()


@pytest.mark.django_db(transaction=True)
def test_beat_rests_until_something_is_due(broker: redis.Redis) -> None:
    beat = ElectedScheduler(app=app, lazy=True)
    try:
        beat.setup_schedule()
        for _ in range(20):
            time.sleep(max(0.0, beat.tick()))  # as Celery does it
        assert sum(broker.llen(key) for key in broker.keys("tidegate:celery:celery*")) >= 4
    finally:
        beat.close()


@pytest.mark.django_db(transaction=True)
def test_beat_goes_on_where_the_clock_is_set_back(
    broker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat, now = ElectedScheduler(app=app, lazy=True), app.now
    try:
        beat.setup_schedule()
        wait_until("messages are sent", lambda: beat.tick() >= 0 and _queued(broker))
        monkeypatch.setattr(app, "now", lambda: now() - timedelta(hours=1))
        sent = _queued(broker)
        wait_until("more are sent", lambda: beat.tick() >= 0 and _queued(broker) > sent + 1)
    finally:
        beat.close()


@pytest.mark.django_db(transaction=True)
def test_a_clock_that_is_set_back_again_and_again_keeps_nothing_from_being_sent(
    broker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent every five minutes waited for five minutes more each time."""
    task = "console.fleet.tasks.measure_cpu_of_shards"
    now, later, sent = app.now, timedelta(), list[str]()
    monkeypatch.setattr(app, "now", lambda: now() + later)
    monkeypatch.setattr(ElectedScheduler, "apply_entry", lambda _, entry, **__: sent.append(entry.task))
    beat = ElectedScheduler(app=app, lazy=True)
    try:
        beat.setup_schedule()
        wait_until("it leads", lambda: beat.tick() >= 0 and beat._election.is_leader)
        for _ in range(4):
            later += timedelta(minutes=2)
            beat.tick()
            later -= timedelta(seconds=10)
            for _ in beat.schedule:
                beat.tick()
        assert task in sent
    finally:
        beat.close()


def test_what_asks_others_lets_all_else_go_first(broker: redis.Redis) -> None:
    """Of tasks that there are: nothing tells of a name in a route that none has."""
    app.loader.import_default_modules()
    names = [name for name in app.tasks if name.startswith("console.")]
    later = {name for name in names if app.amqp.router.route({}, name).get("priority")}
    assert later == set(settings.CELERY_TASK_ROUTES)
    assert "console.alerts.tasks.tick" in set(names) - later
    for name in ("console.control.tasks.reconcile", "console.alerts.tasks.tick"):
        app.tasks[name].delay()
    lines = {str(key).removeprefix("tidegate:celery:") for key in broker.keys("*")}
    assert {"celery", f"celery\x06\x16{settings.ASKS_OTHERS}"} <= lines


@slow
@pytest.mark.django_db(transaction=True)
def test_a_queue_full_of_what_asks_others_does_not_hold_up_the_rest(
    broker: redis.Redis, tmp_path: Path
) -> None:
    """As when purges of many orgs wait for targets that do not answer. Housekeeping goes last."""
    asking = [f"asks {number}" for number in range(5)]
    broker.rpush(GO_ON, *["go"] * 7)
    effect_once.apply_async(("keeps house",), priority=settings.CAN_WAIT)
    for name in asking:
        effect_once.apply_async((name,), priority=settings.ASKS_OTHERS)
    effect_once.apply_async(("evaluates",))
    with worker(tmp_path / "log"):
        wait_until("all are done", lambda: len(effects()) == 7, 60)
    in_order = AuditEntry.objects.filter(action="tests.effect").order_by("pk")
    done = list(in_order.values_list("object_id", flat=True))
    assert done[0] == "evaluates"
    assert "keeps house" in done[-2:], "two do it at the same time"
