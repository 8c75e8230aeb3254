"""`make incident` is left at any moment; in full it is run in tests/stack and tests/browser."""

from __future__ import annotations

import time

import pytest
from django.db import transaction

from console.accounts.principal import SYSTEM
from console.demo import incident
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
        "job7.full.1 may be left across the spine. Restore it: http://here/sessions/chat/restore-rails/"
    )


def test_a_stream_of_the_driver_that_evicts_most_is_moved(chat: Session) -> None:
    """The other one may have no requests, and then nothing becomes slow."""
    quiet, busy = Stream.objects.get(index=1), Stream.objects.get(index=0)
    quiet.job.driver.name, busy.job.driver.name = "quiet", "busy"
    quiet.slots *= 2
    assert incident.busiest_first([busy, quiet], {}) == [quiet, busy]
    assert incident.busiest_first([quiet, busy], {"quiet": 0.1, "busy": 2.0}) == [busy, quiet]
