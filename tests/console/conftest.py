"""Fixtures that several files of this folder use."""

from __future__ import annotations

import pytest

from console.sessions.models import Session
from telemetry.store.rollup import RollUp
from tests.conftest import People
from tests.console.alerts.evaluations import NOW
from tests.console.sessions.fleets import make_across


@pytest.fixture
def chat(people: People) -> Session:
    RollUp().tend_days(NOW.timestamp())
    return make_across(people.acme)
