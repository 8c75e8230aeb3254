"""What brains are told, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone

from console.control import rounds
from console.control import services as control
from console.control.models import Kind, Target
from console.control.tasks import push
from console.fleet import claims
from console.orgs import services as orgs
from console.policies import callers
from console.routing import limits, rollout
from console.routing.models import OrgLimits
from inference_brain.desired import Limits
from swdriver_shim.desired import token_hash
from tests.conftest import People
from tests.console.routing.brains import FakeBrain, a_driver, a_model, a_replica

pytestmark = pytest.mark.django_db
PUSHED = [control.ALL_BRAINS]


def test_a_brain_is_told_models_replicas_drivers_and_who_may_ask(
    people: People, brain: FakeBrain
) -> None:
    model = a_model(tokenizer="/models/chat", for_all_orgs=False)
    model.orgs.add(people.acme)
    a_replica(model, "chat-1", driver=a_driver(), api_key="sk-1", served_as="llama")
    a_replica(model, "plain", engine="sglang", url="https://plain.example.org/v1x", draining=True)
    with transaction.atomic():
        org = orgs.for_change(people.principal("org_admin"), "acme")
        _, key = callers.add_caller(people.principal("org_admin"), org, name="app")
    assert rounds.push(PUSHED) == 0

    told = brain.told
    assert told is not None
    assert told.brain == "east"
    [chat] = told.models
    assert (chat.name, chat.tokens_max, chat.tokenizer) == ("acme/chat", 32_768, "/models/chat")
    ours, plain = chat.replicas
    assert (ours.name, ours.api_key, ours.served_as, ours.draining) == ("chat-1", "sk-1", "llama", False)
    assert ours.driver is not None
    assert ours.driver.model.name == "llama"
    assert ours.driver.claims_key == control.claims_key_of("job7")
    assert (plain.engine, plain.driver, plain.draining) == ("sglang", None, True)
    assert [org.name for org in told.orgs] == ["acme"], "and nothing of other orgs"
    assert token_hash(key) in told.callers()


def test_a_driver_that_has_told_no_model_is_guessed_at_and_a_daemon_is_shown_no_claims(
    brain: FakeBrain,
) -> None:
    model = a_model()
    assert a_replica(model, "new", driver=a_driver("new", model=None)).is_guessed
    assert not a_replica(model, "daemon", driver=a_driver("daemon", engine="")).is_guessed
    rounds.push(PUSHED)
    assert brain.told is not None
    daemon, new = brain.told.models[0].replicas
    assert new.driver is None
    assert daemon.driver is not None
    assert daemon.driver.claims_key is None


def test_a_model_for_all_names_all_orgs(people: People, brain: FakeBrain) -> None:
    a_model()
    rounds.push(PUSHED)
    assert brain.told is not None
    assert brain.told.models[0].orgs is None
    assert [org.name for org in brain.told.orgs] == ["acme", "globex"]


def test_a_new_key_and_a_removed_one_reach_brains_with_their_own_change(
    people: People, brain: FakeBrain
) -> None:
    a_model()
    admin = people.principal("org_admin")
    with transaction.atomic():
        org = orgs.for_change(admin, "acme")
        old, _ = callers.add_caller(admin, org, name="old")
        _, new = callers.add_caller(admin, org, name="new")
    assert rounds.push(PUSHED) == 0
    assert len(brain.org("acme").tokens) == 2
    with transaction.atomic():
        callers.remove_caller(admin, orgs.for_change(admin, "acme"), old.public_id)
    assert rounds.push(PUSHED) == 0
    assert brain.org("acme").tokens == (token_hash(new),)


def test_a_rotated_key_for_claims_is_told(people: People, brain: FakeBrain) -> None:
    a_replica(a_model(), driver=a_driver())
    rounds.push(PUSHED)
    key = claims.rotate_key(people.principal("platform_admin"), "job7")
    rounds.push(PUSHED)
    assert brain.told is not None
    driver = brain.told.models[0].replicas[0].driver
    assert driver is not None
    assert driver.claims_key == key


def test_what_is_wrong_at_a_brain_is_shown(brain: FakeBrain) -> None:
    brain.problems = ["Model acme/chat: /models/chat has no tokenizer.json."]
    a_model()
    assert rounds.push(PUSHED) == 0
    assert "no tokenizer.json" in Target.objects.get(kind=Kind.BRAIN).problem


@pytest.mark.django_db(transaction=True)
def test_limits_reach_brains_with_the_request_that_sets_them_and_how_long_that_took_is_told(
    people: People, brain: FakeBrain, api_of: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the next round. The task runs as a worker runs it."""
    a_model()
    rounds.push(PUSHED)
    monkeypatch.setattr(
        "console.control.services.current_app.send_task",
        lambda _name, arguments, **_more: push(*arguments),
    )
    client, began = api_of(people.platform_admin), timezone.now()
    answer = client.put(
        "/api/v1/orgs/acme/limits",
        {"requests_per_minute": 600, "weight": 250},
        content_type="application/json",
        headers={"if-match": '"0"', "idempotency-key": "k"},
    )
    assert answer.status_code == 200, answer.json()
    assert brain.org("acme").limits == Limits(requests_per_minute=600, weight=250)
    reach = rollout.reach_of_limits(people.acme)
    assert reach.has_it == 1
    assert reach.seconds is not None
    assert 0 < reach.seconds < (timezone.now() - began).total_seconds()


def test_the_same_limits_again_are_no_change(people: People, brain: FakeBrain) -> None:
    admin = people.principal("platform_admin")
    for _ in range(2):
        with transaction.atomic():
            org = orgs.for_change(admin, "acme")
            held = limits.set_limits(admin, org, Limits(queued=7), reason="small")
    assert (held.version, OrgLimits.objects.count()) == (1, 1)
    assert limits.active_limits(people.globex).limits == Limits()
