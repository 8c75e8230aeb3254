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
