"""Purges that a driver confirms, and what comes too late for them. Real drivers and agents."""

from __future__ import annotations

import base64
import json
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest

from kvss_agent.security.confirmations import DriverStatement, Question, Scope, opened
from kvss_agent.security.identity import ProcessIdentity
from swdriver_shim.keys import isolation_tag
from tests.kvss_agent.process import AgentProcess, agent, document, spec
from tests.kvss_agent.stores import tier2
from tests.live import wait_until
from tests.swdriver_shim.daemons import (
    ACME,
    CONTROL,
    EACH,
    GLOBEX,
    C,
    Daemon,
    kv,
    org,
    stored_bytes,
    stored_document,
    told,
)
from tests.swdriver_shim.tiers import kept

pytestmark = pytest.mark.slow  # each starts a process

TOKENS = list(range(2 * C))
SECRET = b"acme".ljust(32, b"!")
TAG = isolation_tag("acme", SECRET)
DATA_KEY = b"k" * 31 + b"!"


@pytest.fixture
def one(tmp_path: Path) -> Iterator[AgentProcess]:
    with agent(tmp_path / "agent") as made:
        made.tell(document(1, spec("s", 20, EACH * C)))
        yield made


@pytest.fixture
def driver(one: AgentProcess, tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "driver", "--name", "job7")
    made.control("desired", told([one])).raise_for_status()
    wait_until("it is ready", made.is_ready)
    yield made
    made.kill()


def ask(driver: Daemon, *tags: bytes, withdrawn: bool = False) -> tuple[Question, httpx.Response]:
    scopes = tuple(Scope(tag.hex()) for tag in tags)
    asked = Question(
        str(uuid4()), secrets.token_hex(16), 7, scopes, org="acme", seconds=5.0, withdrawn=withdrawn
    )
    headers = {"authorization": f"Bearer {CONTROL}"}
    raw = msgspec.json.encode(asked)
    return asked, driver.http.post("/v1/purges", content=raw, headers=headers)


def confirm(driver: Daemon, *tags: bytes, withdrawn: bool = False) -> DriverStatement:
    """Again where it takes longer than whoever asks waits, as a console does."""
    asked, answer = ask(driver, *tags, withdrawn=withdrawn)
    while answer.status_code == 202:
        asked, answer = ask(driver, *tags, withdrawn=withdrawn)
    assert answer.status_code == 200, answer.text
    key = ProcessIdentity.load(driver.log.parent, "driver:job7").public_key_pem
    return opened(answer.content, key, asked, "driver:job7", DriverStatement)


def occupied(one: AgentProcess) -> int:
    return int(one.http.get("/v1/shards/s").json()["occupied_slots"])


class HalfStore:
    """A store whose second half is held back."""

    def __init__(self, driver: Daemon, token: str = ACME) -> None:
        header = json.dumps({"tokens": TOKENS}).encode()
        body = struct.pack("<I", len(header)) + header + kv(len(TOKENS))
        self._rest = body[100:]
        url = driver.http.base_url
        self._line = socket.create_connection((url.host, url.port or 0), 30)
        head = (
            f"POST /v1/store HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._line.sendall(head.encode() + body[:100])

    def finish(self) -> int:
        self._line.sendall(self._rest)
        answer = b""
        while piece := self._line.recv(1 << 16):
            answer += piece
        self._line.close()
        return int(answer.split(b" ", 2)[1])


def test_a_store_that_began_before_its_org_went_lands_nowhere(driver: Daemon, one: AgentProcess) -> None:
    assert driver.store(ACME, TOKENS, kv(len(TOKENS))).status_code == 200
    late = HalfStore(driver)
    driver.control("desired", told([one], 2, orgs=[org("globex", GLOBEX)])).raise_for_status()
    said = confirm(driver, TAG)
    assert (said.columns, occupied(one)) == (2, 0)
    assert late.finish() == 401
    assert occupied(one) == 0, "it has landed after the purge"
    driver.control("desired", told([one], 3)).raise_for_status()
    assert driver.ask(ACME, "query", tokens=TOKENS).status_code == 401, "it has the purged tag"


def test_a_store_of_a_caller_that_is_revoked_meanwhile_lands_nowhere(
    driver: Daemon, one: AgentProcess
) -> None:
    late = HalfStore(driver)
    acme = {**org("acme", "n" * 40), "tokens": []}
    driver.control("desired", told([one], 2, orgs=[acme, org("globex", GLOBEX)])).raise_for_status()
    assert late.finish() == 401
    wait_until("its slots are empty", lambda: occupied(one) == 0)
    assert driver.store(GLOBEX, TOKENS, kv(len(TOKENS))).status_code == 200


def test_what_was_purged_is_served_again_by_no_document_of_before(
    driver: Daemon, one: AgentProcess, tmp_path: Path
) -> None:
    driver.store(ACME, TOKENS, kv(len(TOKENS)))
    driver.store(GLOBEX, TOKENS, kv(len(TOKENS)))
    said = confirm(driver, TAG)
    assert (said.org, said.epoch, said.columns, said.bytes > 0) == ("acme", 7, 2, True)
    assert [(shard.group, shard.index, shard.shard) for shard in said.shards] == [("full", 0, "s")]
    assert occupied(one) == 2
    assert driver.ask(ACME, "query", tokens=TOKENS).status_code == 401
    kept = stored_document(driver.log.parent)
    assert "acme" not in {org.name for org in kept.orgs}, "its keys are dropped"
    driver.control("desired", told([one], 2)).raise_for_status()  # an earlier intent that comes late
    assert driver.ask(ACME, "query", tokens=TOKENS).status_code == 401
    assert confirm(driver, TAG).columns == 2, "asked again, it says the same"
    driver.kill()
    driver.__init__(tmp_path / "driver", "--name", "job7")  # type: ignore[misc]
    driver.control("desired", told([one], 3)).raise_for_status()
    assert driver.ask(ACME, "query", tokens=TOKENS).status_code == 401
    new = {**org("acme", ACME), "secret": base64.b64encode(b"x" * 32).decode()}
    driver.control("desired", told([one], 4, orgs=[new])).raise_for_status()
    wait_until("it is ready", driver.is_ready)
    assert driver.load(ACME, TOKENS)[0] == 0
    assert driver.store(ACME, TOKENS, kv(len(TOKENS))).status_code == 200
    assert driver.load(ACME, TOKENS)[0] == len(TOKENS)


def test_an_org_that_is_withdrawn_leaves_nothing_in_memory_or_tier_2_and_may_come_back(
    one: AgentProcess, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    shard = spec("s", 20, EACH * C, part="full.0", namespace="0" * 32)
    one.tell(document(2, shard, tier2=tier2(files)))
    acme = org("acme", ACME, tiers="dram+tier2", encrypt_tier2=True)
    acme["data_key"] = base64.b64encode(DATA_KEY).decode()
    others = [org("globex", GLOBEX)]
    driver = Daemon(tmp_path / "driver", "--name", "job7")

    def stored() -> int:
        return len([path for path in kept(files) if path.name.endswith(".full.0")])

    try:
        for generation in (1, 3):
            driver.control("desired", told([one], generation, orgs=[acme, *others])).raise_for_status()
            wait_until("it is ready", driver.is_ready)
            assert driver.load(ACME, TOKENS)[0] == 0, "nothing is left of the time before"
            driver.store(ACME, TOKENS, kv(len(TOKENS))).raise_for_status()
            driver.store(GLOBEX, TOKENS, kv(len(TOKENS))).raise_for_status()
            assert driver.load(ACME, TOKENS)[0] == len(TOKENS)
            wait_until("tier 2 has it", lambda: stored() == 2)
            _, early = ask(driver, TAG, withdrawn=True)
            assert early.status_code == 202, "it is served"
            assert "has not applied the document" in early.json()["detail"]
            driver.control("desired", told([one], generation + 1, orgs=others)).raise_for_status()
            said = confirm(driver, TAG, withdrawn=True)
            assert (said.withdrawn, said.columns) == (True, 2)
            assert (occupied(one), stored()) == (2, 0), "globex keeps its own"
            left = b"".join(stored_bytes(tmp_path / "driver"))
            for key in (SECRET, DATA_KEY):
                assert key not in left
                assert base64.b64encode(key) not in left
            assert driver.ask(ACME, "query", tokens=TOKENS).status_code == 401
    finally:
        driver.kill()


def test_who_is_told_nothing_says_so_and_covers_nothing(tmp_path: Path) -> None:
    driver = Daemon(tmp_path / "driver", "--name", "job7")
    try:
        said = confirm(driver, TAG)
        assert (said.shards, said.columns) == ((), 0)
    finally:
        driver.kill()


def test_while_an_agent_is_away_nothing_is_confirmed(driver: Daemon, one: AgentProcess) -> None:
    driver.store(ACME, TOKENS, kv(len(TOKENS)))
    one.kill()
    _, answer = ask(driver, TAG)
    assert answer.status_code == 202
    assert answer.json()["detail"] in ("Shard full.0 is lost.", "The purge is still running.")


def test_a_shard_that_has_moved_from_an_agent_that_is_away_is_named(
    driver: Daemon, one: AgentProcess, tmp_path: Path
) -> None:
    driver.store(ACME, TOKENS, kv(len(TOKENS)))
    one.kill()
    with agent(tmp_path / "other") as other:
        other.tell(document(1, spec("s", 20, EACH * C)))
        driver.control("desired", told([other], 2)).raise_for_status()
        wait_until("it has moved", driver.is_ready)
        _, answer = ask(driver, TAG)
    assert answer.status_code == 202
    assert answer.json()["detail"] == ("Shard full.0 has moved, and its former home is not emptied yet.")


def test_a_model_of_which_everything_was_purged_has_a_secret_of_its_own(
    driver: Daemon, one: AgentProcess
) -> None:
    driver.store(ACME, TOKENS, kv(len(TOKENS)))

    def acme(model: str) -> dict[str, Any]:
        return {**org("acme", ACME), "secrets": {model: base64.b64encode(b"y" * 32).decode()}}

    driver.control("desired", told([one], 2, orgs=[acme("other")])).raise_for_status()
    assert driver.load(ACME, TOKENS)[0] == len(TOKENS)
    driver.control("desired", told([one], 3, orgs=[acme("llama")])).raise_for_status()
    assert driver.load(ACME, TOKENS)[0] == 0
    assert confirm(driver, TAG).columns == 2
