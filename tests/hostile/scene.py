"""What is attacked: a whole stack as `make up` starts it, with an agent, a driver and two orgs.

`victim` is an org whose caller loads and stores all the time; `attacker` is the org of whoever is evil.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import yaml

from console.environment import PROJECT, env_file
from console.stack import endpoint
from kvss_agent.security.certificates import key_name
from kvss_agent.security.identity import ProcessIdentity, fingerprint
from kvss_agent.security.trust import AUTHORITIES_FILE
from telemetry.credentials import own_url
from tests.control_api import Named, Tls, as_process, control_client
from tests.hostile import moves
from tests.hostile.agent import beating
from tests.hostile.engine import UNVERIFIED
from tests.hostile.machines import Machines, on, undivided
from tests.hostile.network import Network
from tests.live import wait_until
from tests.stack.whole import Whole, prepared_stack

if TYPE_CHECKING:
    from tests.hostile.driver import EvilDriver

EACH: Final = 64  # bytes per token
ORGS: Final = ("victim", "attacker")
SESSION: Final = "chat"
WARNINGS_SHOWN: Final = 5
PATIENCE_SECONDS: Final = 180.0  # with processes that start on a machine that is busy
NODE, DRIVER = "ax-good", "job-good"
MODEL: Final = json.dumps({"name": "llama", "groups": [{"name": "full", "bytes_per_token": [EACH]}]})
# Who there is: a role on the platform, or in an org.
PEOPLE: Final = {
    "platform-viewer": ("", "viewer"),
    "platform-on-call": ("", "on-call"),
    "victim-admin": ("victim", "org admin"),
    "attacker-viewer": ("attacker", "viewer"),
    "attacker-on-call": ("attacker", "on-call"),
    "attacker-admin": ("attacker", "org admin"),
}
PREPARE: Final = """
import json, sys
import msgspec
from django.db import transaction
from console.accounts.principal import SYSTEM
from console.accounts.roles import Role
from console.accounts.services import create_user
from console.authority import services
from console.orgs.services import for_change, set_member
from kvss_agent.security.capabilities import Capability, issue
told = json.loads(sys.stdin.read())
roles, made = {role.label: role for role in Role}, {}
for name, (org, role) in told["people"].items():
    _, made[name] = create_user(
        SYSTEM, username=name, platform_role=None if org else roles[role], must_change_password=False
    )
    if org:
        with transaction.atomic():
            set_member(SYSTEM, for_change(SYSTEM, org), name, roles[role])
sign = services.signer().sign
signed = {
    name: issue(msgspec.convert(fields, Capability), sign)
    for name, fields in told["capabilities"].items()
}
print(json.dumps({"passwords": made, "capabilities": signed}))
"""
FLEET: Final = """
stamps:
  east:
    leaves: {leaf-1: {}, leaf-2: {}, leaf-evil: {}}
    nodes:
      ax-good:
        nics: {eth0: {leaf: leaf-1}}
        memory: 64M
        shards_max: 8
        tier2: {kind: posix, path: %s, cap: 64M}
    boxes:
      cs-1: {domains: [{wio: 8, leaves: [leaf-1]}]}
      cs-2: {domains: [{wio: 8, leaves: [leaf-1]}]}
"""


@dataclass
class Process:
    """An agent or a driver that joined, as anybody starts one."""

    name: str
    directory: Path
    module: tuple[str, ...]
    environment: Mapping[str, str]
    running: subprocess.Popen[bytes] = field(init=False)
    pid: int = field(init=False)

    def __getstate__(self) -> dict[str, Any]:
        """For another process, of which it is no child."""
        return {name: value for name, value in vars(self).items() if name != "running"}

    def start(self) -> None:
        self.directory.mkdir(exist_ok=True, mode=0o700)
        with self.log_file.open("ab") as log:
            self.running = subprocess.Popen(
                [sys.executable, "-m", *self.module],
                cwd=PROJECT,
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pid = self.running.pid

    @property
    def log_file(self) -> Path:
        return self.directory / "log"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def warnings(self) -> list[str]:
        """The last few."""
        found = [line for line in self.log.splitlines() if "WARNING" in line]
        return [f"{self.name}: {line}" for line in found[-WARNINGS_SHOWN:]]

    @property
    def address(self) -> str:
        """Of its control API; a driver's is where its callers ask too."""
        return self._addresses[-1]

    @property
    def api_address(self) -> str:
        """Of a brain: where its clients ask."""
        return self._addresses[0]

    @property
    def _addresses(self) -> list[str]:
        """Of its newest start, in the order in which it says them."""
        wait_until(
            f"{self.name} listens", lambda: "istening" in self.log or self.has_ended(), PATIENCE_SECONDS
        )
        [said] = self.log[self.log.rindex("istening") :].splitlines()[:1]
        found = re.findall(r"127\.0\.0\.1:\d+", said)
        assert found, self.log
        return found

    @property
    def token(self) -> str:
        return (self.directory / "token").read_text().strip()

    def has_ended(self) -> bool:
        return self.running.poll() is not None

    def terminate(self) -> None:
        if not self.has_ended():
            self.running.terminate()

    def stop(self) -> None:
        self.terminate()
        if not self.has_ended():
            try:
                self.running.wait(20)
            except subprocess.TimeoutExpired:
                self.running.kill()
                self.running.wait()


@dataclass
class Scene:
    whole: Whole
    directory: Path
    machines: Machines = field(default_factory=undivided)
    processes: dict[str, Process] = field(default_factory=dict)
    callers: dict[str, str] = field(default_factory=dict)  # a token of each org
    passwords: dict[str, str] = field(default_factory=dict)  # of PEOPLE
    capabilities: dict[str, str] = field(default_factory=dict)  # see `moves`
    _tokens: dict[str, str] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which opens connections of its own."""
        kept = {name: value for name, value in vars(self).items() if name != "admin"}
        return {**kept, "whole": replace(self.whole, process=None)}

    @cached_property
    def console(self) -> str:
        return self.whole.address

    @cached_property
    def admin_token(self) -> str:
        return self.new_token(self.whole.password)

    @cached_property
    def admin(self) -> httpx.Client:
        """The API, as a platform admin."""
        return self.api(self.admin_token)

    def api(self, token: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.Client(
            base_url=f"{self.console}/api/v1", headers=headers, timeout=60, verify=UNVERIFIED
        )

    def new_token(self, password: str, username: str = "admin", **more: Any) -> str:
        """Made as a person makes it: log in, then ask for one."""
        with httpx.Client(
            base_url=self.console, follow_redirects=True, timeout=60, verify=UNVERIFIED
        ) as browser:
            browser.get("/log-in/")
            csrf = {"csrfmiddlewaretoken": browser.cookies["tidegate_csrf"]}
            browser.post("/log-in/", data={"username": username, "password": password, **csrf})
            made = browser.post(
                "/api/v1/tokens",
                json={"name": "hostile", "read_only": False, **more},
                headers={"X-CSRFToken": browser.cookies["tidegate_csrf"]},
            )
            made.raise_for_status()
            return str(made.json()["token"])

    def token_of(self, person: str) -> str:
        """An API token of one of PEOPLE."""
        if person not in self._tokens:
            self._tokens[person] = self.new_token(self.passwords[person], person)
        return self._tokens[person]

    def manage(self, code: str, told: str = "") -> str:
        """Run this as the console itself."""
        done = subprocess.run(
            [sys.executable, "manage.py", "shell", "--no-imports", "-c", code],
            cwd=PROJECT,
            env=self.whole.environment,
            input=told,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, method: str, path: str, told: Any = None, **headers: str) -> Any:
        answer = self.admin.request(method, path, json=told, headers=headers)
        assert answer.is_success, (method, path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def join_token(self, kind: str, uses: int = 1) -> str:
        return str(self.ask("POST", "/join-tokens", {"kind": kind, "uses": uses})["token"])

    @cached_property
    def settings(self) -> dict[str, str]:
        """What `make up` writes down for those beside it."""
        lines = env_file(self.whole.state).read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    @property
    def data_address(self) -> str:
        """Where drivers reach the good agent."""
        return f"unix:{self.processes[NODE].directory}/data.sock"

    @property
    def driver_url(self) -> str:
        return f"https://{self.processes[DRIVER].address}"

    @property
    def tls(self) -> dict[str, Any]:
        """How an engine believes the driver and nobody else: arguments of a client of httpx."""
        directory = self.processes[DRIVER].directory
        context = ssl.create_default_context(cafile=str(directory / AUTHORITIES_FILE))
        expected = key_name(fingerprint(self.public_key("driver", DRIVER)))
        return {"transport": Named(Tls(context, expected))}

    def public_key(self, role: str, name: str) -> str:
        """Of a process in our directory, evil or not."""
        return ProcessIdentity.load(self.directory / name, f"{role}:{name}").public_key_pem

    def agent_as(self, evil: EvilDriver) -> httpx.Client:
        """The control API of the good agent, for whoever shows this certificate."""
        tls = as_process(evil.trust, self.public_key("node", NODE))
        return control_client(self.processes[NODE].address, None, tls)

    # Making it

    def add_process(self, kind: str, name: str, **more: str) -> Process:
        """One that runs."""
        made = self.new_process(kind, name, **more)
        with on(self.machines.driver if kind == "driver" else self.machines.others):
            made.start()
        self.processes[name] = made
        return made

    def new_process(self, kind: str, name: str, **more: str) -> Process:
        """One that may join, and does not run yet."""
        prefix, module = {
            "node": ("KVSS_AGENT_", ("kvss_agent",)),
            "driver": ("SWDRIVER_", ("swdriver_shim", "serve")),
            "brain": ("BRAIN_", ("inference_brain", "serve")),
        }[kind]
        own = {
            "node": {"MEMORY": "64M", "DRAIN_SECONDS": "1"},
            "driver": {"MODEL": str(self.directory / "model.json")},
            "brain": {"LISTEN": "127.0.0.1:0"},
        }[kind]
        directory = self.directory / name
        directory.mkdir()
        (self.directory / "model.json").write_text(MODEL)
        settings = {
            "NAME": name,
            "STATE_DIR": str(directory),
            "CONTROL": "127.0.0.1:0",
            "CONSOLE": self.console,
            "JOIN_TOKEN": self.join_token(kind),
            "TELEMETRY": self.telemetry_url(kind),
            **own,
            **more,
        }
        environment = {f"{prefix}{key}": value for key, value in settings.items()}
        return Process(name, directory, module, environment)

    def telemetry_url(self, kind: str) -> str:
        """What an agent or a driver is given to tell its numbers to."""
        del kind
        return self.settings["TIDEGATE_OWN_TELEMETRY_URL"]

    def writer_url(self, name: str) -> str:
        """The Redis user of a process of ours, which follows from its token."""
        process = self.processes[name]
        kind = "node" if process.module[0] == "kvss_agent" else "driver"
        return own_url(self.telemetry_url(kind), f"{kind}:{name}", process.token)

    def make(self) -> None:
        """The fleet, its processes, the orgs and their callers, a session with a job."""
        tier2 = self.directory / "tier2"
        tier2.mkdir()
        self.ask("PUT", "/fleet/description", {"yaml": FLEET % tier2}, **{"If-Match": "*"})
        self.add_process("node", NODE)
        self.add_process("driver", DRIVER)
        for org in ORGS:
            self.ask("POST", "/orgs", {"slug": org, "name": org}, **{"Idempotency-Key": org})
            self.callers[org] = str(
                self.ask("POST", f"/orgs/{org}/callers", {"name": "engine"})["token"]
            )
        with ThreadPoolExecutor(1) as beside:  # a process that takes seconds to start
            people = beside.submit(self.prepare, PEOPLE)
            self._make_session()
            self.passwords = people.result()

    def _make_session(self) -> None:
        wait_until("the node has joined", lambda: self._is_ready(f"/nodes/{NODE}"), PATIENCE_SECONDS)
        self._run(
            "/sessions",
            {"name": SESSION, "boxes": 1, "bytes_per_token": EACH, "wait_seconds": 60},
        )
        wait_until("the driver has joined", self._has_driver, PATIENCE_SECONDS)
        job = {"name": "job", "driver": DRIVER, "orgs": list(ORGS), "wait_seconds": 60}
        self._run(f"/sessions/{SESSION}/jobs", job)
        with httpx.Client(timeout=10, verify=UNVERIFIED) as http:
            url = f"{self.driver_url}/-/health"
            wait_until("the driver has its shards", lambda: http.get(url).is_success, PATIENCE_SECONDS)

    def prepare(self, people: Mapping[str, tuple[str, str]]) -> dict[str, str]:
        """Capabilities that are new, and these people: their passwords."""
        keys = {name: self.public_key("driver", name) for name in (DRIVER, moves.MOVER)}
        capabilities = moves.wanted(NODE, keys, DRIVER, self.data_address)
        told = json.dumps({"people": people, "capabilities": capabilities})
        made = json.loads(self.manage(PREPARE, told).splitlines()[-1])
        self.capabilities = made["capabilities"]
        passwords: dict[str, str] = made["passwords"]
        return passwords

    @contextlib.contextmanager
    def recorded(self, kind: str, name: str) -> Iterator[Network]:
        """Another agent or driver, which the console reaches through a network that records."""
        port = endpoint.free_port()
        with Network(port) as network:
            url = f"https://127.0.0.1:{network.port}"
            where = {"CONTROL": f"127.0.0.1:{port}", "CONTROL_URL": url}
            nics = {"NICS": "eth0=leaf-2"} if kind == "node" else {}
            process = self.add_process(kind, name, **where, **nics)
            try:
                yield network
            finally:
                process.stop()
                self.remove_evil_nodes()

    def give_a_job(self, evil: EvilDriver) -> None:
        """It joins, and gets a session of its own on the good node: so it is told a document. Nothing
        more where it has one already."""
        evil.enter(self.join_token("driver"))
        if self.admin.get(f"/sessions/{evil.name}").is_success:
            return
        with beating(evil):
            told = {"name": evil.name, "boxes": 1, "bytes_per_token": EACH, "wait_seconds": 60}
            self._run("/sessions", told)
            job = {"name": "evil", "driver": evil.name, "orgs": list(ORGS), "wait_seconds": 60}
            self._run(f"/sessions/{evil.name}/jobs", job)

    def ask_process(
        self,
        name: str,
        method: str,
        path: str,
        told: Any,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None = None,
    ) -> httpx.Response:
        """The API of an agent or a driver, as anybody on this machine asks it."""
        url = f"https://{self.processes[name].address}{path}"
        return httpx.request(
            method, url, json=told, headers=dict(headers), timeout=30, verify=tls or UNVERIFIED
        )

    def remove_evil_nodes(self) -> None:
        """As an admin does it, with a description that does not have them."""
        described = yaml.safe_load(self.ask("GET", "/fleet/description")["yaml"])
        nodes = described["stamps"]["east"]["nodes"]
        for name in [name for name in nodes if name.startswith("evil-")]:
            del nodes[name]
        told = {"yaml": yaml.safe_dump(described)}
        self.ask("PUT", "/fleet/description", told, **{"If-Match": "*"})

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.stop()

    def _is_ready(self, path: str) -> bool:
        found = self.admin.get(path)
        return bool(found.is_success and found.json()["state"] == "ready")

    def _has_driver(self) -> bool:
        found = self.admin.get("/drivers")
        return bool(found.is_success and DRIVER in found.text)

    def _run(self, path: str, told: dict[str, Any]) -> None:
        """Something that takes a while, to its end."""
        begun = self.ask(
            "POST", path, told, **{"Idempotency-Key": secrets.token_hex(8), "If-Match": "*"}
        )

        def is_done() -> bool:
            now = self.ask("GET", f"/operations/{begun['id']}")
            assert not now.get("error"), now
            return bool(now["done"])

        wait_until(f"{begun['kind']} is done", is_done, PATIENCE_SECONDS)


@contextlib.contextmanager
def scene(machines: Machines | None = None) -> Iterator[Scene]:
    machines = machines or undivided()
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-"))
        whole = stack.enter_context(prepared_stack(Path(name)))
        with on(machines.others):
            whole.up()
        made = Scene(whole, Path(name), machines)
        stack.callback(made.stop)
        made.make()
        stack.callback(made.admin.close)
        yield made
