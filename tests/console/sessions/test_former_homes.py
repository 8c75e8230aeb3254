"""What drivers are told of agents that they wait for at an earlier address."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from console.control.observed import Observed, Shard
from console.fleet.models import Driver, Node
from console.sessions.desired import agents_moved
from console.sessions.models import FormerHome, Stream
from console.sessions.steps import former_homes
from console.sessions.steps.observations import Observations
from kvss_agent.security.identity import ProcessIdentity, fingerprint
from swdriver_shim.desired import Desired
from tests.conftest import People
from tests.console.sessions.fleets import make_across

pytestmark = pytest.mark.django_db

EARLIER, NOW = "tls:10.0.0.7:8411", "tls:10.0.0.9:8411"


@pytest.fixture
def stream(people: People, tmp_path: Path) -> Stream:
    """One that has left ax3, whose agent is now at another address."""
    make_across(people.acme)
    stream = Stream.objects.get(index=2)
    key = ProcessIdentity.load(tmp_path, "node:ax3").public_key_pem
    Node.objects.filter(pk=stream.node.pk).update(public_key=key, data_address=NOW)
    former_homes.leave(stream)
    return Stream.objects.get(pk=stream.pk)


@pytest.fixture
def say(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have its driver say where it waits, and the console ask for that. None: it does not answer."""

    def say(*shards: Shard) -> None:
        def observations(nodes: set[Node], drivers: set[Driver]) -> Observations:
            found = Observations(set(), set())
            found._drivers = {"job7": Observed(1, 1, list(shards)) if shards else None}
            return found

        monkeypatch.setattr(former_homes, "Observations", observations)
        assert former_homes.forget_emptied() == 0

    return say


def waits_at(*addresses: str) -> Shard:
    return Shard(group="full", index=2, former_homes=["left"], former_addresses=list(addresses))


def told(driver: str = "job7") -> Mapping[str, Any]:
    return agents_moved()(driver)


def test_a_driver_that_waits_at_an_earlier_address_is_told_the_present_one(
    stream: Stream, say: Any
) -> None:
    assert told() == {}
    key = fingerprint(stream.node.public_key)
    say(waits_at("tls:10.0.0.1:8411#" + "0" * 64, f"{EARLIER}#{key}"))
    assert told() == {"agents_moved": [f"{NOW}#{key}"]}
    assert "agents_moved" in {field.name for field in msgspec.structs.fields(Desired)}
    assert told("job8") == {}
    say()  # it does not answer
    assert told() == {"agents_moved": [f"{NOW}#{key}"]}
    Node.objects.update(data_address=EARLIER)  # the agent is back there
    say(waits_at(f"{EARLIER}#{key}"))
    assert told() == {}


def test_a_driver_that_does_not_say_where_it_waits_is_of_a_version_that_refuses_the_field(
    stream: Stream, say: Any
) -> None:
    say(waits_at(f"{EARLIER}#{fingerprint(stream.node.public_key)}"))
    assert told()
    say(waits_at())  # it runs the version before again
    assert told() == {}


def test_an_agent_that_has_another_key_or_none_is_another_one(stream: Stream, say: Any) -> None:
    say(waits_at("tls:10.0.0.7:8411#" + "0" * 64))  # of the machine that had its name before
    assert told() == {}
    Node.objects.update(public_key="", data_address="tcp:10.0.0.9:8411")
    say(waits_at("tcp:10.0.0.7:8411"))
    assert FormerHome.objects.get().address == ""
    assert told() == {}


def test_drivers_of_a_round_are_told_by_one_query(stream: Stream) -> None:
    FormerHome.objects.update(address=EARLIER)
    with CaptureQueriesContext(connection) as queries:
        of = agents_moved()
        assert [bool(of(name)) for name in ("job7", "job8")] == [True, False]
    assert len(queries) == 1
