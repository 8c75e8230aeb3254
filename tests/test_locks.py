"""Who waits for a lock is seen, also by a transaction that has looked before."""

from __future__ import annotations

import os
import threading

import psycopg
import pytest
from django.db import connection, transaction

from tests.live import wait_until
from tests.locks import somebody_waits

TAKE = "SELECT pg_advisory_xact_lock(73)"


@pytest.mark.django_db(transaction=True)
def test_who_connects_after_the_first_look_is_seen_to_wait() -> None:
    name = connection.settings_dict["NAME"]
    url = os.environ["DATABASE_URL"].replace("/tidegate?", f"/{name}?")

    def take() -> None:
        with psycopg.connect(url) as other:
            other.execute(TAKE)

    waiting = threading.Thread(target=take)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(TAKE)
        assert not somebody_waits()
        waiting.start()
        wait_until("it waits", somebody_waits)
    waiting.join(60)
    assert not waiting.is_alive()
