"""Everything that asks for a credential, and every credential that there is: who opens what.

Each door says whether it let a credential in: not whether the request made sense. A credential is shown
in every way in which a door takes one, also where it is of another kind.
"""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg
import redis
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kvss_agent.data_plane import constants
from kvss_agent.process.membership import credential
from kvss_agent.security.identity import public_pem
from kvss_agent.security.trust import load_chain
from telemetry.credentials import user_of
from telemetry.records import OWN_STREAM
from telemetry.version import tidegate_version
from tests.hostile import driver, engine
from tests.hostile.scene import DRIVER, NODE, ORGS, Scene
from tests.hostile.telemetry_writer import allowed
from tests.hostile.tenant import tokens_of

REFUSED: Final = frozenset({401, 403, 404})
NOBODY: Final = "nobody-" + "0" * 40


@dataclass(frozen=True)
class Credential:
    """`text` is shown as a bearer, a password and a secret; the others where there is another form."""

    name: str
    text: str = field(default=NOBODY, repr=False)
    secret: bytes = field(default=b"", repr=False)  # on the data plane
    redis_url: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)  # with a certificate to show

    @property
    def bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.text}"}


Door = Callable[[Scene, Credential], bool]


OF_THE_CONSOLE: Final = """
import base64, json, sys
from console.authority import services
from console.control.services import secret_of
from kvss_agent.security.certificates import Role
issued = services.issue(Role.CONSOLE, "console", sys.stdin.read())
secret = base64.b64encode(secret_of("driver", "job-good")).decode()
print(json.dumps({"certificate": issued.certificate, "secret": secret}))
"""


def of_the_console(scene: Scene) -> tuple[ssl.SSLContext, str]:
    """What only the console has: a certificate that says so, and the secret of the good driver."""
    key = ec.generate_private_key(ec.SECP256R1())
    told = json.loads(scene.manage(OF_THE_CONSOLE, public_pem(key.public_key())).splitlines()[-1])
    context = engine.unverified()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    load_chain(context, told["certificate"], pem)
    return context, told["secret"]


def credentials(scene: Scene, evil: driver.EvilDriver) -> list[Credential]:
    """All that a real stack hands out. `evil` has joined with a job of its own."""
    told = evil.documents[-1]
    as_console, its_secret = of_the_console(scene)
    agent, good = scene.processes[NODE], scene.processes[DRIVER]
    return [
        Credential("nothing"),
        *(Credential(person, scene.token_of(person)) for person in scene.passwords),
        Credential("platform-admin", scene.admin.headers["authorization"].removeprefix("Bearer ")),
        Credential("join token of a node", scene.join_token("node", uses=1000)),
        Credential("join token of a driver", scene.join_token("driver", uses=1000)),
        Credential("token of an agent's control API", agent.token),
        Credential("heartbeat of an agent", credential(agent.token, f"node:{NODE}")),
        Credential("token of a driver's control API", good.token),
        Credential("heartbeat of a driver", credential(good.token, f"driver:{DRIVER}")),
        Credential("secret of another driver", told["secret"], _base64(told["secret"])),
        Credential("secret of the driver", its_secret, _base64(its_secret)),
        Credential("certificate of the console", tls=as_console),
        Credential("certificate of the console and an agent's token", agent.token, tls=as_console),
        Credential("certificate of the console and a driver's token", good.token, tls=as_console),
        Credential("caller of the org", scene.callers[ORGS[0]]),
        Credential("caller of another org", scene.callers[ORGS[1]]),
        Credential("telemetry of an agent", redis_url=scene.writer_url(NODE)),
        Credential("telemetry of a driver", redis_url=scene.writer_url(DRIVER)),
        Credential("telemetry of the console", redis_url=scene.settings["TIDEGATE_TELEMETRY_URL"]),
        Credential("broker of the console", redis_url=scene.settings["REDIS_URL"]),
        Credential(
            "database of the console", urlsplit(scene.settings["DATABASE_URL"]).password or NOBODY
        ),
    ]


def _password(url: str) -> str:
    return urlsplit(url).password or NOBODY


def _base64(text: str) -> bytes:
    import base64

    return base64.b64decode(text)


# The console


def _console(method: str, path: str, told: Any = None, **headers: str) -> Door:
    def opens(scene: Scene, shown: Credential) -> bool:
        answer = httpx.request(
            method,
            f"{scene.console}/api/v1{path}",
            json=told,
            headers={**shown.bearer, **headers},
            timeout=30,
            verify=engine.UNVERIFIED,
        )
        return answer.status_code not in REFUSED

    return opens


def _joins(kind: str) -> Door:
    def opens(scene: Scene, shown: Credential) -> bool:
        told: dict[str, Any] = {
            "control_url": "http://127.0.0.1:1",
            "software_version": tidegate_version(),
            "control_token": "t" * 40,
        }
        if kind == "nodes":
            told |= {
                "data_address": "tcp:127.0.0.1:1",
                "protocol_min": constants.VERSION_MIN,
                "protocol_max": constants.VERSION,
                "memory_bytes": 1,
                "cpus": 1,
                "nics": [{"name": "eth0", "leaf": "leaf-evil"}],
            }
        name = f"evil-{'-'.join(shown.name.split())}".replace("'", "")[:60]
        answer = httpx.post(
            f"{scene.console}/api/v1/{kind}/{name}/join",
            json=told,
            headers=shown.bearer,
            timeout=30,
            verify=engine.UNVERIFIED,
        )
        return answer.is_success

    return opens


def _beats(path: str, more: Mapping[str, Any]) -> Door:
    def opens(scene: Scene, shown: Credential) -> bool:
        told = {"control_url": "https://127.0.0.1:1", "software_version": "0.0.0", **more}
        answer = httpx.post(
            f"{scene.console}/api/v1{path}/heartbeat",
            json=told,
            headers=shown.bearer,
            timeout=30,
            verify=engine.UNVERIFIED,
        )
        return answer.status_code not in REFUSED

    return opens


# Agents and drivers


def _process(name: str, method: str, path: str, told: Any = None) -> Door:
    def opens(scene: Scene, shown: Credential) -> bool:
        try:
            answer = scene.ask_process(name, method, path, told, shown.bearer, shown.tls)
        except httpx.HTTPError:
            return False
        return answer.status_code not in REFUSED

    return opens


def data_plane(scene: Scene, shown: Credential) -> bool:
    secret = shown.secret or shown.text.encode()
    return engine.guess_secret(scene.data_address, DRIVER, f"{DRIVER}.full.0", secret)


def load_of_the_org(scene: Scene, shown: Credential) -> bool:
    """Whether columns of the org `victim`, which are there, are given."""
    try:
        answer = scene.ask_process(DRIVER, "POST", "/v1/query", {"tokens": tokens_of(0)}, shown.bearer)
        return answer.is_success and answer.json()["tokens"] > 0
    except httpx.HTTPError:
        return False


# The servers


def _with_password(url: str, text: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f":{text}@{host}"))


def _redis_urls(scene: Scene, shown: Credential) -> list[str]:
    """Its own address; of what has none, its text as a password at both servers."""
    if shown.redis_url:
        return [shown.redis_url]
    servers = (scene.settings["REDIS_URL"], scene.settings["TIDEGATE_TELEMETRY_URL"])
    return [_with_password(url, shown.text) for url in servers]


def adds_numbers(scene: Scene, shown: Credential) -> bool:
    return any(map(_adds, _redis_urls(scene, shown)))


def _adds(url: str) -> bool:
    with redis.Redis.from_url(url, socket_timeout=5) as client:
        try:
            client.xadd(OWN_STREAM + user_of(url), {b"record": b""})
        except redis.RedisError:
            return False
    return True


def other_commands(scene: Scene, shown: Credential) -> bool:
    return any(map(allowed, _redis_urls(scene, shown)))


def database(scene: Scene, shown: Credential) -> bool:
    url = _with_password(scene.settings["DATABASE_URL"], shown.text)
    parts = urlsplit(scene.settings["DATABASE_URL"])
    if parts.username:
        url = urlunsplit(
            parts._replace(netloc=f"{parts.username}:{shown.text}@{parts.netloc.rpartition('@')[2]}")
        )
    with contextlib.suppress(psycopg.Error):
        psycopg.connect(url, connect_timeout=5).close()
        return True
    return False


AN_AGENT: Final[dict[str, Any]] = {
    "data_address": "tcp:127.0.0.1:1",
    "protocol_min": 0,
    "protocol_max": 0,
    "memory_bytes": 1,
    "cpus": 1,
}
# By the names of the columns in THREAT_MODEL.md.
DOORS: Final[Mapping[str, Door]] = {
    "read its own org": _console("GET", f"/orgs/{ORGS[1]}"),
    "change its own org": _console("POST", f"/orgs/{ORGS[1]}/callers", {"name": "by the test"}),
    "read the org": _console("GET", f"/orgs/{ORGS[0]}"),
    "change the org": _console("POST", f"/orgs/{ORGS[0]}/callers", {"name": "by the test"}),
    "read the fleet": _console("GET", "/nodes"),
    "change the fleet": _console(
        "PUT", "/fleet/description?validate_only=true", {"yaml": "stamps: {}"}, **{"If-Match": "*"}
    ),
    "let others join": _console("POST", "/join-tokens", {"kind": "driver"}),
    "join as a node": _joins("nodes"),
    "join as a driver": _joins("drivers"),
    "beat as the node": _beats(f"/nodes/{NODE}", AN_AGENT),
    "beat as the driver": _beats(f"/drivers/{DRIVER}", {}),
    "read the agent": _process(NODE, "GET", "/v1/observed"),
    "tell the agent": _process(NODE, "PUT", "/v1/desired", {}),
    "purge at the agent": _process(NODE, "POST", "/v1/purge", {"tag": "nonsense"}),
    "the shard's bytes": data_plane,
    "read the driver": _process(DRIVER, "GET", "/v1/observed"),
    "tell the driver": _process(DRIVER, "PUT", "/v1/desired", {}),
    "the org's columns": load_of_the_org,
    "add numbers": adds_numbers,
    "other Redis": other_commands,
    "PostgreSQL": database,
}


def tried(scene: Scene, shown: Credential) -> list[str]:
    """The doors that this credential opens."""
    return [name for name, opens in DOORS.items() if opens(scene, shown)]
