"""A task that can be stopped in its middle, for the worker of the tests."""

from __future__ import annotations

import os

import redis
from celery import shared_task
from django.conf import settings
from django.db import connection, transaction

from console.accounts.principal import SYSTEM
from console.api.models import StoredAnswer
from console.audit.services import Subject, record
from console.shell import request_context

BEGUN, GO_ON, BACKENDS = "tests:begun", "tests:go-on", "tests:backends"


@shared_task
def effect_once(name: str) -> None:
    """Its effect is one audit row, however often it runs; half-way it waits to be told to go on."""
    client = redis.Redis.from_url(settings.REDIS_URL, decode_responses=True)
    client.rpush(BEGUN, f"{os.getpid()}")
    client.blpop([GO_ON], timeout=20)
    client.close()
    with transaction.atomic():
        _, first = StoredAnswer.objects.get_or_create(
            scope_sha256=name.encode().ljust(32, b"0"),
            defaults={"body_sha256": b"", "status": 200, "headers": {}, "body": ""},
        )
        if first:
            record(SYSTEM, "tests.effect", Subject("tests", name, request_context.current_id()))


@shared_task
def say_backend() -> None:
    """Which process of PostgreSQL serves it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        [backend] = cursor.fetchone()
    client = redis.Redis.from_url(settings.REDIS_URL)
    client.rpush(BACKENDS, backend)
    client.close()
