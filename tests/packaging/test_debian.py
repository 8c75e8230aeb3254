"""`deploy/debian/tidegate-host` on a Debian machine of its own, with a real systemd as process 1."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.live import wait_until
from tests.packaging import debian
from tests.packaging.debian import HOST, Machine
from tests.packaging.wheels import build
from tests.workload_manager.tokenizers.archives import FILES, tarred

WHY_NOT = debian.why_not()
pytestmark = [
    pytest.mark.debian,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

INSTALLER: Final = "/root/deploy/debian/tidegate-host"
AUTHORITY: Final = "/etc/tidegate/tls/authority.pem"
BRAIN_HOST: Final = "brain-1.tidegate.test"
CONSOLE: Final = f"https://{HOST}"
ROLES: Final = "console,orchestrator,cluster,brain,agent,driver"
UNITS: Final = {
    *(f"tidegate-{name}.service" for name in ("ingest", "rollup", "schedule", "orchestrator", "web")),
    *("tidegate-worker@1.service", "tidegate-cluster.service", "tidegate-brain.service"),
    *("tidegate-agent.service", "tidegate-driver@job-7.service"),
}
JOIN_SECONDS_MAX: Final = 90.0
EXPOSURE_MAX: Final = 2.0  # as `systemd-analyze security` counts: 0 is best, 10 is a bare unit
EXPOSURE_OF_CLUSTER_MAX: Final = 6.0  # engines want devices and a compiler's memory
FLEET: Final = """\
stamps:
  east:
    leaves:
      leaf-1:
        spine_links: {leaf-1-up: {spine: spine-1, gbits: 400}}
    nodes:
      box:
        nics: {eth0: {leaf: leaf-1, wio: 16, gbits: 100}}
    boxes:
      cs-1:
        domains:
          - {wio: 8, leaves: [leaf-1]}
"""
MODEL: Final = {"name": "llama", "groups": [{"name": "full", "bytes_per_token": [4096]}]}
NEW_TOKEN: Final = """
from datetime import timedelta
from django.utils import timezone
from console.accounts import tokens
from console.accounts.models import User
from console.accounts.principal import Means
from console.accounts.services import principal_for
end = timezone.now() + timedelta(days=1)
admin = principal_for(User.objects.get(username="admin"), Means.SYSTEM)
print(tokens.issue(admin, name="of the test", read_only=False, org=None, expires_at=end)[1])
"""
ASK: Final = """
import json, ssl, sys
import httpx
method, url, token, body = sys.argv[1:]
trusted = ssl.create_default_context(cafile="/etc/tidegate/tls/authority.pem")
headers = {"authorization": f"Bearer {token}"} if token else {}
content = open(body[1:], "rb").read() if body.startswith("@") else body.encode()
headers["content-type"] = "application/octet-stream" if body.startswith("@") else "application/json"
with httpx.Client(verify=trusted, headers=headers, timeout=60) as client:
    answer = client.request(method, url, content=content)
print(json.dumps({"status": answer.status_code, "text": answer.text, "headers": dict(answer.headers)}))
"""


CONNECT: Final = """
import grpc
from console.workloads.leader import cluster
grpc.channel_ready_future(cluster.channel()).result(timeout=30)
"""


class Box:
    """The machine, and what is done with it in these tests, in this order."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self.folder = folder
        self.fresh = machine.files()
        self.token = ""

    def install(self, *options: str, **variables: str) -> str:
        done = self.machine.run(
            *(INSTALLER, "install", "--wheelhouse", "/root/wheels", *options), **variables
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """A request to the console, over TLS and by its name. The body: JSON, or the file of a path."""
        text = f"@{body}" if isinstance(body, Path) else json.dumps(body) if body is not None else ""
        python = "/opt/tidegate/current/bin/python"
        url = f"{CONSOLE}{path}"
        found: dict[str, Any] = json.loads(
            self.machine.does(python, "-c", ASK, method, url, self.token, text)
        )
        return found

    def get(self, path: str) -> Any:
        answer = self.ask("GET", f"/api/v1{path}")
        assert answer["status"] == 200, answer
        return json.loads(answer["text"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def box(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("machine")
    with debian.booted(folder) as machine:
        shutil.copy(wheel, machine.root / "root")
        yield Box(machine, folder)


@pytest.fixture(scope="module")
def console(box: Box, wheel: Path) -> Box:
    """With everything on it, of which nothing has joined yet, and a token for the console."""
    model = box.machine.root / "etc" / "tidegate" / "driver-job-7.json"
    model.parent.mkdir()
    model.write_text(json.dumps(MODEL))
    box.fresh = box.machine.files()
    options = [*("--wheel", f"/root/{wheel.name}", "--roles", ROLES), "--local-servers"]
    options += ["--host", HOST, "--driver", "job-7", "--tier2", "/srv/kv"]
    would = box.install(*options, "--dry-run")
    assert box.machine.files() == box.fresh, "a dry run has changed something"
    said = box.install(*options)
    assert re.search(r"^First admin: admin, password: \S+", said, re.MULTILINE)
    # Which database there is, it can't know before there is a PostgreSQL.
    changes = {line.removeprefix("would ") for line in would.splitlines() if line.startswith("would")}
    assert changes - set(said.splitlines()) == set()
    box.token = box.machine.does("tidegate-manage", "shell", "-v", "0", "-c", NEW_TOKEN).strip()
    return box


@pytest.fixture(scope="module")
def fleet(console: Box) -> Box:
    """With a node, a driver and a brain, which get what they join with."""
    console.machine.does("tidegate-manage", "fleet", "import", "-", given=FLEET)
    tokens = {}
    for kind, prefix in {"node": "KVSS_AGENT", "driver": "SWDRIVER", "brain": "BRAIN"}.items():
        answer = console.ask("POST", "/api/v1/join-tokens", {"kind": kind})
        assert answer["status"] == 201, answer
        tokens[f"{prefix}_JOIN_TOKEN"] = json.loads(answer["text"])["token"]
    said = console.install(**tokens)
    restarted = {line.partition(" ")[2] for line in said.splitlines() if line.startswith("restart")}
    assert restarted == {unit for unit in UNITS if re.search("agent|driver|brain", unit)}
    return console


def running(machine: Machine) -> dict[str, int]:
    """Process of each unit of ours, of which all have to run."""
    listed = machine.does("systemctl", "list-units", "--plain", "--no-legend", "tidegate-*.service")
    units = [line.split()[0] for line in listed.splitlines()]
    found = {}
    for unit in units:
        said = machine.does("systemctl", "show", "--property", "ActiveState,MainPID,NRestarts", unit)
        state = dict(line.split("=") for line in said.splitlines())
        assert (state["ActiveState"], state["NRestarts"]) == ("active", "0"), machine.log(unit)
        found[unit] = int(state["MainPID"])
    return found


def test_a_console_is_installed_and_answers_over_tls(console: Box) -> None:
    for path in ("/-/health", "/log-in/"):
        answer = console.ask("GET", path)
        assert answer["status"] == 200, answer
    assert "max-age" in answer["headers"]["strict-transport-security"]
    assert console.get("/me")["username"] == "admin"
    assert set(running(console.machine)) == UNITS


def test_a_second_run_changes_nothing_and_says_so(console: Box) -> None:
    before, processes = console.machine.files(), running(console.machine)
    assert console.install() == "Nothing to change.\n"
    assert console.machine.files() == before
    assert running(console.machine) == processes


def test_secrets_are_for_root_and_for_who_needs_them(console: Box) -> None:
    modes = {path: " ".join(about.split()[:2]) for path, about in console.machine.files().items()}
    for path, mode in modes.items():
        if path.startswith("/etc/tidegate/") and path.endswith((".env", ".key")):
            shown = path.endswith("/console.key")  # which the console itself shows the Cluster Server
            assert mode == ("-r-------- tidegate:tidegate" if shown else "-rw------- root:root"), path
    secret = re.search(
        r"^TIDEGATE_SECRET_KEY='(.+)'$",
        console.machine.does("cat", "/etc/tidegate/console.env"),
        re.MULTILINE,
    )
    assert secret
    arguments = console.machine.run("sh", "-c", "cat /proc/[0-9]*/cmdline").stdout  # some end meanwhile
    assert "console.celery" in arguments
    assert secret[1] not in arguments


def test_brains_and_engines_read_tokenizers_and_nothing_else_of_the_console(console: Box) -> None:
    """Engines run as the Cluster Server does: what it reads, tenants read."""
    machine = console.machine
    (machine.root / "root" / "tokenizer.tar").write_bytes(tarred(FILES))
    answer = console.ask("POST", "/api/v1/tokenizers?name=bytes", Path("/root/tokenizer.tar"))
    assert answer["status"] == 201, answer
    folder = f"/var/lib/tidegate/tokenizers/sha256/{json.loads(answer['text'])['sha256']}"
    machine.does("sh", "-c", "umask 027; echo 1 > /var/lib/tidegate/backup", user="tidegate")
    for unit in ("tidegate-brain.service", "tidegate-cluster.service"):
        # As one of its processes: with its user, its groups and what systemd has handed to it.
        pid = str(running(machine)[unit])
        groups = re.search(r"^Groups:(.*)$", machine.does("cat", f"/proc/{pid}/status"), re.MULTILINE)
        user = machine.does("stat", "--format", "%U", f"/proc/{pid}").strip()
        assert groups
        enter = ["setpriv", f"--reuid={user}", f"--regid={user}", "--groups"]
        enter += [",".join(groups[1].split()), "--"]

        def reads(path: str, enter: list[str] = enter) -> bool:
            return machine.run(*enter, "cat", path).returncode == 0

        assert reads(f"{folder}/tokenizer.json")
        keys = ("authority", "brain", "cluster", "console", "host")
        for path in (*(f"/etc/tidegate/tls/{name}.key" for name in keys), "/var/lib/tidegate/backup"):
            assert not reads(path), (unit, path)
        assert machine.run(*enter, "ls", "/var/lib/tidegate").returncode
        handed = machine.does("ls", f"/run/credentials/{unit}").split()
        own = unit.removeprefix("tidegate-").removesuffix(".service")
        assert handed == [f"{own}.key", f"{own}.pem"]
    machine.does("rm", "/var/lib/tidegate/backup")


def test_a_key_that_engines_can_read_is_for_no_name_of_the_console(console: Box) -> None:
    machine = console.machine
    said = machine.does(
        *("openssl", "x509", "-in", "/etc/tidegate/tls/cluster.pem", "-noout", "-ext", "subjectAltName")
    )
    assert said.splitlines()[1].strip() == "IP Address:127.0.0.1"
    keys = [
        machine.does("cat", f"/etc/tidegate/tls/{name}.key") for name in ("host", "brain", "cluster")
    ]
    assert len(set(keys)) == len(keys)
    machine.does("tidegate-manage", "shell", "-v", "0", "-c", CONNECT)


def test_the_processes_do_not_own_the_tables(console: Box) -> None:
    """So not even a flaw in the console can drop the triggers of the audit trail."""
    done = console.machine.run(
        "psql", "-d", "tidegate", "-c", "DROP TABLE audit_auditentry", user="tidegate"
    )
    assert "must be owner" in done.stderr


def test_units_are_hardened(console: Box) -> None:
    machine = console.machine
    units = [unit for unit in running(machine) if "@" not in unit]
    verified = machine.run("systemd-analyze", "verify", *units)
    assert "tidegate" not in verified.stderr, verified.stderr
    said = json.loads(machine.does("systemd-analyze", "security", "--json=short", "--no-pager"))
    exposures = {row["unit"]: float(row["exposure"]) for row in said if row["unit"] in UNITS}
    assert set(exposures) == UNITS
    assert exposures.pop("tidegate-cluster.service") <= EXPOSURE_OF_CLUSTER_MAX
    assert max(exposures.values()) <= EXPOSURE_MAX, exposures


def test_agent_driver_and_brain_join_over_tls(fleet: Box) -> None:
    def joined() -> bool:
        found = [fleet.get(f"/{kind}")["items"] for kind in ("nodes", "drivers", "brains")]
        return all(one and one[0]["last_heartbeat_at"] for one in found)

    wait_until("all have joined", joined, JOIN_SECONDS_MAX)
    assert set(running(fleet.machine)) == UNITS


def test_numbers_of_the_agent_reach_the_console(fleet: Box) -> None:
    """By TLS, with a user of Redis that a worker has made for it: so all of Redis' roles work."""

    def counted() -> bool:
        done = fleet.machine.does(
            *("runuser", "-u", "postgres", "--", "psql", "-qtA", "-d", "tidegate"),
            given="SELECT count(*) FROM telemetry_source WHERE topic LIKE 'node:%'",
        )
        return int(done) > 0

    wait_until("its numbers are stored", counted, JOIN_SECONDS_MAX)


def test_a_release_is_installed_beside_the_one_in_use_and_rolled_back(fleet: Box, wheel: Path) -> None:
    machine = fleet.machine
    before = machine.does("readlink", "/opt/tidegate/current").strip()
    fleet.install("--roles", ROLES.replace(",driver", ""))
    # The same version for other roles is nothing to go back from.
    assert "no release before" in machine.run(INSTALLER, "rollback").stderr
    newer = machine.root / "root" / "newer" / wheel.name
    newer.parent.mkdir()
    shutil.copy(wheel, newer)
    with zipfile.ZipFile(newer, "a") as archive:  # another build of the same version
        archive.writestr("console/bundled/built-again", "")
    processes = running(machine)
    said = fleet.install("--wheel", f"/root/newer/{wheel.name}")
    after = machine.does("readlink", "/opt/tidegate/current").strip()
    assert after != before
    assert f"prepare the database for {Path(after).name}" in said
    assert {unit for unit, pid in running(machine).items() if processes[unit] == pid} == set()
    executed = machine.does("readlink", f"/proc/{running(machine)['tidegate-web.service']}/cwd")
    assert executed.strip() == "/var/lib/tidegate"
    said = fleet.install("--roles", ROLES, "--driver", "job-7")
    assert "prepare" not in said
    said = machine.does(INSTALLER, "rollback", "--wheelhouse", "/root/wheels")
    assert f"install release {Path(before).name} with " in said  # with the driver's packages
    assert machine.does("readlink", "/opt/tidegate/current").strip() == before
    assert fleet.get("/me")["username"] == "admin"
    assert set(running(machine)) == UNITS


def test_a_setting_that_was_changed_by_hand_is_kept_and_restarts_who_reads_it(fleet: Box) -> None:
    machine = fleet.machine
    path = machine.root / "etc" / "tidegate" / "worker.env"
    path.write_text(path.read_text().replace("PROCESSES='2'", "PROCESSES='1'"))
    assert fleet.install() == "restart tidegate-worker@1.service\n"
    assert "PROCESSES='1'" in path.read_text()


def start_engine(machine: Machine) -> int:
    """A process as a manager leaves it, in a control group of its own in that of the Cluster Server."""
    group = "/sys/fs/cgroup/system.slice/tidegate-cluster.service/engine"
    user = "setpriv --reuid=tidegate-cluster --regid=tidegate-cluster --clear-groups"
    machine.does("mkdir", "-p", group)  # an earlier machine may have left it
    started = f"echo $$ > {group}/cgroup.procs; echo $$ > /run/engine; exec {user} sleep 100000"
    machine.does("sh", "-c", f"setsid sh -c '{started}' </dev/null >/dev/null 2>&1 &")
    wait_until("it runs", lambda: machine.run("cat", "/run/engine").returncode == 0, JOIN_SECONDS_MAX)
    return int(machine.does("cat", "/run/engine"))


def is_running(machine: Machine, pid: int) -> bool:
    return machine.run("test", "-d", f"/proc/{pid}").returncode == 0


def test_instances_outlive_a_restart_of_the_cluster_server_and_end_with_its_role(fleet: Box) -> None:
    machine = fleet.machine
    engine = start_engine(machine)
    machine.does("systemctl", "restart", "tidegate-cluster.service")
    assert is_running(machine, engine)
    said = machine.does(INSTALLER, "uninstall", "--dry-run")
    assert "would end all instances of workloads on this machine" in said
    assert is_running(machine, engine)


def test_it_is_uninstalled_and_leaves_data_and_with_purge_nothing(fleet: Box) -> None:
    machine = fleet.machine
    engine = int(machine.does("cat", "/run/engine"))
    (machine.root / "srv" / "kv" / "column").write_text("of an org")
    machine.does(INSTALLER, "certificate", "--host", BRAIN_HOST, "--out", "/root")
    machine.does("cp", AUTHORITY, "/root")
    said = machine.does(INSTALLER, "uninstall")
    assert "end all instances of workloads on this machine" in said.splitlines()
    assert not is_running(machine, engine)
    assert said.splitlines()[-1].startswith("Kept: /etc/tidegate, /var/lib/tidegate")
    assert "/srv/kv" in said.splitlines()[-1]
    left = {path: about for path, about in machine.files().items() if fleet.fresh.get(path) != about}
    of_debian = ("/var/lib/postgresql", "/var/lib/redis", "/var/lib/systemd", "/var/lib/private")
    ours = {path for path in left if not path.startswith(of_debian)}
    kept = (
        "/etc/tidegate",
        "/var/lib/tidegate",
        "/etc/passwd",
        "/etc/shadow",
        "/etc/group",
        "/etc/gshadow",
    )
    assert {path for path in ours if not path.startswith(kept)} == set()
    assert not machine.does("systemctl", "list-units", "--all", "--plain", "--no-legend", "tidegate-*")
    other = machine.does("sh", "-c", "setpriv --reuid=tidegate-node sleep 100000 >&- 2>&- & echo $!")
    failed = machine.run(INSTALLER, "uninstall", "--purge")
    assert "userdel" in failed.stderr  # somebody works as one of the users
    machine.does("sh", "-c", f"kill {other}")
    # Another run still knows what there was to remove.
    again = machine.does(INSTALLER, "uninstall", "--purge")
    assert "drop database tidegate and its roles" in again
    assert not [path for path in machine.files() if "tidegate" in path]
    assert machine.run("test", "-e", "/srv/kv").returncode
    for database in ("passwd", "group"):
        assert "tidegate" not in machine.does("getent", database)


def test_a_brain_on_another_machine_serves_with_a_certificate_of_the_first(
    fleet: Box, wheel: Path
) -> None:
    """The machine of the tests above, of which nothing is left but the files that are copied."""
    machine = fleet.machine
    options = ["--wheel", f"/root/{wheel.name}", "--roles", "brain", "--host", BRAIN_HOST]
    options += ["--console", CONSOLE, "--wheelhouse", "/root/wheels"]
    without = machine.run(INSTALLER, "install", *options)
    assert f"`tidegate-host certificate --host {BRAIN_HOST}`" in without.stderr
    files = [f"/root/{name}" for name in ("authority.pem", f"{BRAIN_HOST}.pem", f"{BRAIN_HOST}.key")]
    names = ("--tls-authority", "--tls-certificate", "--tls-key")
    fleet.install(*options, *(one for pair in zip(names, files, strict=True) for one in pair))
    assert set(running(machine)) == {"tidegate-brain.service"}
    check = ["openssl", "s_client", "-connect", "127.0.0.1:8440", "-CAfile", files[0]]
    machine.does(*check, "-verify_return_error", "-verify_hostname", BRAIN_HOST)
    settings = machine.does("cat", "/etc/tidegate/brain.env")
    assert f"BRAIN_CONSOLE_CA='{AUTHORITY}'" in settings
    assert machine.does("cat", AUTHORITY) == machine.does("cat", files[0])
    assert machine.run("test", "-e", AUTHORITY.replace(".pem", ".key")).returncode
