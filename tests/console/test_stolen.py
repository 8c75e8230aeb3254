"""What somebody has who steals a driver, an agent, the broker's Redis or a backup of the database.

THREAT_MODEL.md says so in a table; here each is taken and searched. Each search also finds what has to
be there, so that it is known to look in the right place.
"""

from __future__ import annotations

import base64
import contextlib
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import pytest
import redis
from django.db import transaction

from console.accounts.roles import Role
from console.control import rounds
from console.control import services as control
from console.control.documents import Compiler
from console.fleet.services import for_change, visible_drivers
from console.orgs import services as orgs
from console.orgs.models import Org
from console.policies import callers
from console.policies.org_keys import keys_of, tags_of
from console.sessions import driver_orgs
from console.stack.binaries import find_postgres
from swdriver_shim.desired import token_hash
from tests.conftest import People
from tests.console.control.drivers import DriverFleet, drivers
from tests.console.control.live import scene
from tests.console.policies.purges import TOKENS
from tests.console.sessions.fleets import make_node
from tests.kvss_agent.plane import SECRET
from tests.live import wait_until
from tests.swdriver_shim.daemons import CONTROL, kv, stored_bytes

__all__ = ["drivers"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME = "quicksilver-9"
KEYS = """
import base64, json
from django.conf import settings
from console.control.models import Target
from console.orgs.models import Org
from console.policies.org_keys import keys_of
[keys] = keys_of(list(Org.objects.all())).values()
found = {
    "secret": keys.secret,
    "data key": keys.data_key,
    "secret of the driver": Target.objects.get(name="one").secret,
    "key that seals": settings.SECRET_KEY.encode(),
}
print(json.dumps({name: base64.b64encode(bytes(one)).decode() for name, one in found.items()}))
"""


def forms(secret: bytes) -> set[bytes]:
    """In which a secret may be written down."""
    return {
        secret,
        secret.hex().encode(),
        base64.b64encode(secret).rstrip(b"="),
        base64.urlsafe_b64encode(secret).rstrip(b"="),
    }


def found_in(places: Iterable[bytes], secrets: Mapping[str, bytes]) -> set[str]:
    """Which of these secrets are in one of these places."""
    wanted = {name: forms(secret) for name, secret in secrets.items()}
    return {
        name for place in places for name, each in wanted.items() if any(one in place for one in each)
    }


def files_of(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in directory.rglob("*") if path.is_file()]


def memory_of(process: int) -> list[bytes]:
    """All that it may write to, as root on its machine reads it."""
    found = []
    with Path(f"/proc/{process}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            area = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if area is not None and "[v" not in line:
                begin, end = (int(area[number], 16) for number in (1, 2))
                with contextlib.suppress(OSError, ValueError, OverflowError):  # it went meanwhile
                    memory.seek(begin)
                    found.append(memory.read(end - begin))
    return found


def keys_in_the_open(org: Org) -> dict[str, bytes]:
    keys = keys_of([org])[org.pk]
    return {"secret": bytes(keys.secret), "data key": bytes(keys.data_key)}


def quicksilver(people: People) -> Org:
    """An org with a name that is in none of our texts."""
    return orgs.create_org(people.principal("platform_admin"), slug=NAME, name=NAME)


def serve(people: People, org: Org, *names: str) -> str:
    """These drivers may serve this org only; a token of its engine."""
    admin = people.principal("platform_admin")
    with transaction.atomic():
        for name in names:
            driver = for_change(admin, visible_drivers, name, Role.PLATFORM_ADMIN)
            driver_orgs.set_orgs(admin, driver, [org])
        held = orgs.for_change(admin, org.slug)
        return callers.add_caller(admin, held, name="engine")[1]


@pytest.mark.django_db
def test_a_stolen_driver_gives_away_the_orgs_that_it_serves_and_no_other(
    drivers: DriverFleet, people: People
) -> None:
    other = quicksilver(people)
    token = serve(people, people.acme, "one", "two")
    rounds.push([control.ALL_DRIVERS])
    one = drivers.daemons["one"]
    wait_until("it is ready", one.is_ready)
    one.store(token, TOKENS, kv(len(TOKENS))).raise_for_status()
    assert one.load(token, TOKENS)[0] == len(TOKENS)
    files, memory = stored_bytes(drivers.directory / "one"), memory_of(one.process.pid)
    for stolen in (files, memory):
        assert found_in(stolen, keys_in_the_open(people.acme)) == {"secret", "data key"}
        for hidden in (other, people.globex):
            assert found_in(stolen, keys_in_the_open(hidden)) == set()
        assert found_in(stolen, {"name": NAME.encode()}) == set()
    assert found_in(files, {"token of an engine": token.encode()}) == set()


@pytest.mark.django_db
def test_a_stolen_agent_gives_away_columns_and_no_key_of_any_org(
    drivers: DriverFleet, people: People
) -> None:
    org = quicksilver(people)
    token = serve(people, org, "one", "two")
    rounds.push([control.ALL_DRIVERS])
    one = drivers.daemons["one"]
    wait_until("it is ready", one.is_ready)
    one.store(token, TOKENS, kv(len(TOKENS))).raise_for_status()
    make_node("ax1", "l1", public_key="a key")
    document = Compiler("node").compile("ax1", {}).content
    state = files_of(drivers.directory / "agent")
    memory = memory_of(drivers.agent.process.pid)
    for stolen in ([document], state, memory):
        assert found_in(stolen, keys_in_the_open(org)) == set()
        assert found_in(stolen, {"name": NAME.encode(), "token": token.encode()}) == set()
    assert found_in(state, {"a driver's secret": SECRET}), "with it one connects as the driver"
    assert found_in(memory, {"column": kv(len(TOKENS))[:4096]}), "columns are there to be read"
    keys = keys_of([org])[org.pk]
    assert tags_of(org, keys)[0].encode() in document, "tags say how many orgs there are"


def test_a_stolen_redis_or_backup_of_the_database_gives_away_no_secret(tmp_path: Path) -> None:
    with scene(tmp_path, "one") as there:
        one = there.drivers["one"]
        token = there.api.post("/orgs/acme/callers", json={"name": "engine"}).json()["token"]
        wait_until("it knows the caller", lambda: one.ask(token, "query", tokens=[1]).is_success)
        one.store(token, TOKENS, kv(len(TOKENS))).raise_for_status()
        told = msgspec.json.decode(there.console.manage(KEYS).splitlines()[-1], type=dict[str, bytes])
        secrets = {
            **told,
            "token of an engine": token.encode(),
            "token of the admin": there.api.headers["authorization"].split()[1].encode(),
            "password of the admin": there.console.password.encode(),
            "token of a driver's control API": CONTROL.encode(),
        }
        environment = there.console.environment
        dump = backup(environment["DATABASE_URL"])
        assert b"acme" in dump, "what is intended is read"
        assert token_hash(token).encode() in dump, "hashes are"
        assert found_in([dump], secrets) == set()

        rdb = saved(environment["REDIS_URL"], tmp_path)
        assert found_in([rdb], {"canary": b"a canary in the broker"}) == {"canary"}
        assert found_in([rdb], secrets) == set()


def backup(url: str) -> bytes:
    command = [str(find_postgres().directory / "pg_dump"), "--dbname", url, "--inserts"]
    return subprocess.run(command, capture_output=True, check=True, timeout=300).stdout


def saved(url: str, directory: Path) -> bytes:
    """All of it as RDB writes it, uncompressed: a replica's copy."""
    broker = redis.Redis.from_url(url)
    settings = {name: str(broker.config_get(name)[name]) for name in ("dir", "dbfilename")}
    broker.config_set("rdbcompression", "no")  # or texts could not be found
    try:
        broker.set("stolen:canary", b"a canary in the broker")
        broker.save()
        return (Path(settings["dir"]) / settings["dbfilename"]).read_bytes()
    finally:
        broker.delete("stolen:canary")
        broker.config_set("rdbcompression", "yes")
        broker.close()
