"""What drivers are told of agents that have another address than when a stream left them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from console.fleet.models import Node
from console.sessions.desired import agents_moved
from console.sessions.models import Stream
from console.sessions.steps import former_homes
from kvss_agent.security.identity import ProcessIdentity, fingerprint
from swdriver_shim.desired import Desired
from tests.conftest import People
from tests.console.sessions.fleets import make_across

pytestmark = pytest.mark.django_db


@pytest.fixture
def stream(people: People) -> Stream:
    make_across(people.acme)
    return Stream.objects.get(index=2)


def at(stream: Stream, address: str) -> None:
    """Its agent has this address from now on."""
    Node.objects.filter(pk=stream.node.pk).update(data_address=address)
    stream.refresh_from_db()


def told(driver: str = "job7") -> Mapping[str, Any]:
    return agents_moved()(driver)


def test_where_an_agent_is_now_is_told_if_a_stream_left_it_at_another_address(
    stream: Stream, tmp_path: Path
) -> None:
    public_key = ProcessIdentity.load(tmp_path, "node:ax3").public_key_pem
    Node.objects.filter(pk=stream.node.pk).update(public_key=public_key)
    key = fingerprint(public_key)
    at(stream, "tls:10.0.0.7:8411")
    former_homes.leave(stream)
    assert told() == {}  # a field that older drivers refuse is not there without need
    at(stream, "tls:10.0.0.9:8411")
    assert told() == {"agents_moved": [f"tls:10.0.0.9:8411#{key}"]}
    assert "agents_moved" in {field.name for field in msgspec.structs.fields(Desired)}
    assert told("job8") == {}
    former_homes.leave(stream)  # one that had come back meanwhile
    assert told() == {"agents_moved": [f"tls:10.0.0.9:8411#{key}"]}  # for what was left before
    at(stream, "tls:10.0.0.7:8411")
    assert told() == {"agents_moved": [f"tls:10.0.0.7:8411#{key}"]}  # for what was left at the other


def test_an_agent_that_has_no_key_in_its_address_could_be_another_one(stream: Stream) -> None:
    at(stream, "tcp:10.0.0.7:8411")
    former_homes.leave(stream)
    at(stream, "tcp:10.0.0.9:8411")
    assert told() == {}


def test_drivers_of_a_round_are_told_by_one_query(stream: Stream) -> None:
    former_homes.leave(stream)
    with CaptureQueriesContext(connection) as queries:
        of = agents_moved()
        assert [of(name) for name in ("job7", "job8")] == [{}, {}]
    assert len(queries) == 1
