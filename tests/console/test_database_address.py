"""An address of PostgreSQL may name several hosts; nonsense is refused in a sentence."""

from __future__ import annotations

import pytest
from psycopg.conninfo import conninfo_to_dict

from console.database_address import HOSTS_MAX, conninfo, parse
from telemetry.redis_address import WrongAddress


def test_of_several_hosts_the_one_that_takes_writes_is_meant() -> None:
    found = parse("postgresql://u:p%40@one:1,two:2/tidegate")
    assert (found["host"], found["port"], found["password"]) == ("one,two", "1,2", "p@")
    assert found["target_session_attrs"] == "read-write"
    assert int(found["connect_timeout"]) < int(parse("postgresql://one/x")["connect_timeout"])
    assert parse("postgresql://a,b/x", "prefer-standby")["target_session_attrs"] == "prefer-standby"


def test_what_the_address_says_wins() -> None:
    found = parse("postgres://a,b/x?target_session_attrs=any&connect_timeout=9&application_name=web")
    assert found["target_session_attrs"] == "any"
    assert (found["connect_timeout"], found["application_name"]) == ("9", "web")


def test_a_unix_socket_is_a_host_behind_the_question_mark() -> None:
    found = parse("postgresql://u:p@:5432/tidegate?host=%2Frun%2Fpostgres")
    assert (found["host"], found["port"], found["dbname"]) == ("/run/postgres", "5432", "tidegate")
    assert "target_session_attrs" not in found


def test_connections_beside_djangos_are_made_in_the_same_way() -> None:
    made = conninfo_to_dict(conninfo("postgresql://u:p'q@a,b/x", dbname="y"))
    assert (made["password"], made["dbname"], made["host"]) == ("p'q", "y", "a,b")
    assert made["target_session_attrs"] == "read-write"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://u:s3cret@h/x", "does not begin with postgresql://"),
        ("s3cret", "does not begin with postgresql://"),
        ("postgresql://", "neither a host nor a database"),
        ("postgresql://u:s3cret@h:port/x", "no port from 1"),
        ("postgresql://u:s3cret/x@h/x", "%2F for /"),
        ("postgresql://h:70000/x", "no port from 1"),
        ("postgresql://h:1,h:2,h/x?port=1,2", "one port for each host"),
        ("postgresql://u:s3cret@a,,b/x", "A host is missing"),
        (f"postgresql://{','.join(f'h{n}' for n in range(9))}/x", f"{HOSTS_MAX} are the most"),
        ("postgresql://u:s3cret@h/x?colour=red", "does not take it"),
        ("postgresql://u:s3cret%zz@h/x", "does not take it"),
        ("postgresql://u:s3cret@[::1/x", "does not take it"),
    ],
)
def test_nonsense_is_refused_in_a_sentence_without_the_password(url: str, why: str) -> None:
    with pytest.raises(WrongAddress) as caught:
        parse(url)
    assert why in str(caught.value)
    assert "s3cret" not in str(caught.value)
