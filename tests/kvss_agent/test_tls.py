"""Mutual TLS over TCP: certificates say who a driver is, and nobody else gets in."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvss_agent.client import Credentials, Header, Lost, Wanted, connect
from kvss_agent.data_plane.breach import Cause
from kvss_agent.settings import parse
from tests.kvss_agent.authority import DAY, NOW, Authority
from tests.kvss_agent.plane import DRIVER, READER, SECRET, TAG, Plane, column, kv, place, running
from tests.kvss_agent.process import agent, document, spec
from tests.live import wait_until

SIZE = 1 << 20


def context(files: tuple[Path, Path, Path], tmp_path: Path, *, server: bool = False) -> ssl.SSLContext:
    """As an agent makes it of its settings."""
    names = ("--tls-certificate", "--tls-key", "--tls-authorities")
    flags = [text for name, file in zip(names, files, strict=True) for text in (name, str(file))]
    settings = parse(["--state-dir", str(tmp_path / "state"), *flags], {})
    made = settings.tls_for_drivers() if server else settings.tls_for_agents()
    assert made
    return made


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def plane(tmp_path: Path, fleet: Authority) -> Iterator[Plane]:
    server = context(fleet.issue("agent-1"), tmp_path, server=True)
    with running(tmp_path, tls=server) as plane:
        plane.add(payload=SIZE)
        yield plane


def test_a_driver_with_its_certificate_moves_columns(
    plane: Plane, fleet: Authority, tmp_path: Path
) -> None:
    tls = context(fleet.issue(DRIVER), tmp_path)
    with plane.client("tcp", tls=tls) as shard:
        payloads = [kv(SIZE) for _ in range(4)]
        for slot, payload in enumerate(payloads):
            number = shard.evict(slot, column(f"{slot}").key, TAG, 64, payload)
        shard.wait_applied(number, 10)
        wrong: list[int] = []

        def read(slot: int) -> None:
            for _ in range(5):
                into = place(SIZE)
                [found] = shard.refill([Wanted(slot, column(f"{slot}", slot + 1))], [into])
                if not isinstance(found, Header) or into != payloads[slot]:
                    wrong.append(slot)

        threads = [threading.Thread(target=read, args=(slot,)) for slot in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
    wait_until("nobody is left", lambda: plane.plane.connections == 0)
    assert plane.breaches() == {}


def refused(plane: Plane, tls: ssl.SSLContext | None, driver: str = DRIVER) -> None:
    with pytest.raises(Lost):
        connect(f"tcp:127.0.0.1:{plane.tcp}", "s", Credentials(driver, SECRET, tls), transport="stream")
    wait_until("it is counted", lambda: plane.plane.breaches.total() >= 1)
    assert set(plane.breaches()) <= {Cause.AUTHENTICATION, Cause.GONE, Cause.MALFORMED}


def test_another_authority_is_refused(plane: Plane, fleet: Authority, tmp_path: Path) -> None:
    other = Authority.make(tmp_path / "other", "others")
    certificate, key, _ = other.issue(DRIVER)
    refused(plane, context((certificate, key, fleet.directory / "fleet.pem"), tmp_path))
    assert plane.breaches() == {Cause.AUTHENTICATION: 1}


def test_another_drivers_certificate_is_refused(plane: Plane, fleet: Authority, tmp_path: Path) -> None:
    refused(plane, context(fleet.issue("job-2"), tmp_path))
    assert plane.breaches() == {Cause.AUTHENTICATION: 1}


def test_a_certificate_that_has_expired_is_refused(
    plane: Plane, fleet: Authority, tmp_path: Path
) -> None:
    refused(plane, context(fleet.issue(DRIVER, ends=NOW - DAY), tmp_path))
    assert plane.breaches() == {Cause.AUTHENTICATION: 1}


def test_no_certificate_and_no_tls_are_refused(plane: Plane, fleet: Authority) -> None:
    bare = ssl.create_default_context(cafile=str(fleet.directory / "fleet.pem"))
    refused(plane, bare)
    plane.plane.breaches.clear()
    refused(plane, None)


def test_a_driver_checks_the_agent_too(plane: Plane, tmp_path: Path) -> None:
    other = Authority.make(tmp_path / "other", "others")
    with pytest.raises(Lost, match="certificate verify failed"):
        connect(
            f"tcp:127.0.0.1:{plane.tcp}",
            "s",
            Credentials(DRIVER, None, context(other.issue(DRIVER), tmp_path)),
            transport="stream",
        )


@pytest.mark.slow
def test_an_agent_pulls_from_another_over_tls(tmp_path: Path, fleet: Authority) -> None:
    def flags(name: str) -> list[str]:
        certificate, key, authorities = fleet.issue(name)
        return [
            *("--tls-certificate", str(certificate)),
            *("--tls-key", str(key)),
            *("--tls-authorities", str(authorities)),
        ]

    with (
        agent(tmp_path / "old", "--tcp", "127.0.0.1:0", *flags("old")) as old,
        agent(tmp_path / "new", *flags(READER)) as new,
    ):
        old.tell(document(1, spec(payload=4096)))
        new.tell(document(1, spec(payload=4096, applied=1)))
        payload, into = kv(4096), place(4096)
        with old.client("shm") as shard:
            shard.evict(0, column("x").key, TAG, 64, payload)
        asked = {"from": f"tcp:127.0.0.1:{old.tcp}", "shard": "s", "as": READER, "after": 1}
        answer = new.http.post("/v1/shards/s/pull", json={**asked, "slots": [0]})
        assert answer.status_code == 202, answer.text
        path = f"/v1/pulls/{answer.json()['id']}"
        wait_until("it is over", lambda: new.http.get(path).json()["state"] != "running")
        assert new.http.get(path).json()["moved"] == 1, new.http.get(path).text
        with new.client("unix") as shard:
            assert isinstance(shard.refill([Wanted(0, column("x", 1))], [into])[0], Header)
        assert into == payload
