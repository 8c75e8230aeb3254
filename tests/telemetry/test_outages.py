"""Redis is away: once an outage, and where that is expected only if it lasts."""

from __future__ import annotations

import logging

import pytest
from django.conf import settings
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from telemetry.outages import EXPECTED_SECONDS, Outage
from telemetry.redis_clients import async_client, client

UNKNOWN = AuthenticationError("invalid username-password pair or user is disabled.")
AWAY = RedisConnectionError("Connection refused.")


@pytest.fixture
def outage(caplog: pytest.LogCaptureFixture) -> Outage:
    caplog.set_level(logging.INFO)
    return Outage(logging.getLogger("tests"), "Numbers are queued")


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_a_user_that_redis_has_not_yet_is_expected(
    outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    for now in (100.0, 103.0, 106.0):
        outage.goes_on(UNKNOWN, now)
    outage.ends()
    sentence = "Numbers are queued, until the console has made the user of this process"
    assert told(caplog) == [(logging.INFO, sentence)]


async def test_clients_of_both_kinds_say_that_a_user_is_not_there(
    outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RedisError) as refused:
        client(settings.REDIS_URL, answer_seconds=5, username="nobody", password="-").ping()
    outage.goes_on(refused.value, 100.0)
    waiting = async_client(settings.REDIS_URL, answer_seconds=5, username="nobody", password="-")
    with pytest.raises(RedisError) as refused:
        await waiting.time()
    Outage(logging.getLogger("tests"), "Maps grow old").goes_on(refused.value, 100.0)
    await waiting.aclose()
    assert [level for level, _ in told(caplog)] == [logging.INFO] * 2


def test_a_user_that_is_never_made_is_a_warning(
    outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    for now in (100.0, 100.0 + EXPECTED_SECONDS, 200.0):
        outage.goes_on(UNKNOWN, now)
    assert told(caplog)[1:] == [(logging.WARNING, f"Numbers are queued: {UNKNOWN}")]


def test_a_user_that_is_taken_away_is_a_warning_at_once(
    outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    outage.ends()
    outage.goes_on(UNKNOWN, 100.0)
    assert told(caplog) == [(logging.WARNING, f"Numbers are queued: {UNKNOWN}")]


def test_each_outage_is_told_once(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    for now in (100.0, 103.0):
        outage.goes_on(AWAY, now)
    outage.ends()
    outage.goes_on(AWAY, 200.0)
    assert told(caplog) == [(logging.WARNING, f"Numbers are queued: {AWAY}")] * 2
