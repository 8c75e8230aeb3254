"""`make incident` is left at any moment; in full it is run in tests/stack and tests/browser."""

from __future__ import annotations

import time
from itertools import islice

import pytest
from django.db import transaction

from console.accounts.principal import SYSTEM
from console.demo import incident, story
from console.demo.staging import CannotStage
from console.operations.services import start
from console.sessions.models import Session, Stream
from tests.console.operations import machines  # noqa: F401 - registers them

pytestmark = pytest.mark.django_db


def test_who_does_not_wait_until_it_is_taken_back_is_told_what_is_left(
    chat: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Session.objects.update(name=incident.SESSION)
    with transaction.atomic():
        start(SYSTEM, "tests.waits", f"session:{incident.SESSION}", "Move it", plan={})

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(CannotStage) as told:
        incident.Incident("http://here")._restore(Stream.objects.get(index=1))
    assert str(told.value) == (
        "job7.full.1 may be left across the spine. Restore it: http://here/sessions/code/restore-rails/"
    )


def test_it_is_staged_where_brains_have_no_other_replica() -> None:
    """They would send requests there, and then nothing is evicted over the slow stream."""
    [served] = [one for one in story.SERVED if one.name == incident.SESSION]
    assert served.replicas == 1
    asked = {f"org:{ask.org}" for ask in islice(story.asks(served), 20)}
    assert asked == {incident.TOPIC}
