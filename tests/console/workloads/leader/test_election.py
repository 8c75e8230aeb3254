"""Who leads, and that nobody goes on doing so by a connection that nobody uses."""

from __future__ import annotations

import pytest
from django.db import connection

from console.workloads.leader.election import Election, NotLeader, is_led
from tests.live import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def test_who_leads_no_more_leaves_no_lock_in_the_pool() -> None:
    election = Election("of this test")
    assert election.run()
    assert is_led("of this test")
    election.lose()
    wait_until("nobody leads", lambda: not is_led("of this test"))


def test_who_stops_lets_another_one_lead_and_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The pool gets the connection without the lock, and as it was before."""
    caplog.set_level("INFO")
    election = Election("of this test", lock_ms=1234)
    assert election.run()
    held = connection.connection  # the next one may be another of the pool
    election.resign()
    assert not is_led("of this test")
    for name, before in (("lock_timeout", "0"), ("application_name", "tidegate")):
        assert held.execute(f"SHOW {name}").fetchone()[0].startswith(before)
    assert "This process leads no more: of this test" in caplog.messages
    assert [one for one in caplog.records if one.levelname != "INFO"] == []
    election.resign()  # it does not lead
    assert [one for one in caplog.records if one.levelname != "INFO"] == []


def test_who_has_lost_its_connection_when_it_stops_has_lost_the_lead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    election = Election("of this test")
    assert election.run()
    connection.connection.close()
    election.resign()
    assert not election.is_leader
    levels = {one.levelname for one in caplog.records if "leads no more" in one.getMessage()}
    assert levels == {"WARNING"}


def test_a_leader_whose_connection_went_back_to_the_pool_leaves_no_lock_there() -> None:
    election = Election("of this test")
    assert election.run()
    connection.close()
    with pytest.raises(NotLeader):
        election.check()
    wait_until("nobody leads", lambda: not is_led("of this test"))
    assert election.run()
    connection.close()
    wait_until("it leads again, on whatever connection it has now", election.run)
    election.lose()
