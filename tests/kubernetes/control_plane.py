"""The control plane of the test bed: one of its own, from binaries, or one that is given.

Both are reached at a port of the loopback with a token for each user.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import secrets
import shutil
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx2
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from lightkube import ApiError, Client, KubeConfig
from lightkube.models.authentication_v1 import TokenRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ServiceAccountToken

from console.environment import PROJECT
from tests.console.sessions.network import WITH_US
from tests.kubernetes.proxy import LOOPBACK, Proxy
from tests.kubernetes.resources import Document, put, resource

ASSETS: Final = "KUBEBUILDER_ASSETS"
GIVEN: Final = "BED_KUBECONFIG"
BINARIES: Final = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
ADMIN, SERVER = "admin", "system:serviceaccount:tidegate:tidegate-cluster-server"
READY_SECONDS_MAX: Final = 90.0
NOT_READY_SECONDS: Final = 15  # until a node that says nothing is not ready
TOLERATION_SECONDS: Final = 2  # until its pods are evicted
TOKEN_SECONDS: Final = 24 * 3600
CRD: Final = PROJECT / "deploy" / "kubernetes" / "wsjobs.crd.yaml"
OWN_NAMESPACE: Final = "tidegate-bed"  # of accounts of the bed in a cluster that is given


class ControlPlane(ABC):
    """`kubectl`: the program that goes with it, if there is one. `why_no_custom_resources`: empty, if
    wsjobs work."""

    why_no_custom_resources = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.api_port = 0
        self.tokens: dict[str, str] = {}

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @property
    @abstractmethod
    def kubectl(self) -> Path | None: ...

    @functools.cached_property
    def minor(self) -> int:
        """30, of 1.30."""
        answer = httpx2.get(f"https://{LOOPBACK}:{self.api_port}/version", verify=False)
        return int(answer.json()["minor"].strip("+"))

    def kubeconfig(self, user: str = SERVER) -> Path:
        return self.folder / f"{user.rpartition(':')[2]}.kubeconfig"

    @contextlib.contextmanager
    def client(self, user: str = ADMIN) -> Iterator[Client]:
        with client_of(self.kubeconfig(user)) as made:
            yield made

    def make_kubelet_keys(self) -> tuple[Path, Path]:
        """A certificate and a key, which the API server does not look at."""
        key = rsa.generate_private_key(65537, 2048)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubelet")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .sign(key, hashes.SHA256())
        )
        paths = self.folder / "kubelet.crt", self.folder / "kubelet.key"
        paths[0].write_bytes(certificate.public_bytes(Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        )
        return paths

    def _write_kubeconfigs(self) -> None:
        for user, token in self.tokens.items():
            document = {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "bed",
                "clusters": [
                    {
                        "name": "bed",
                        "cluster": {
                            "server": f"https://{LOOPBACK}:{self.api_port}",
                            "insecure-skip-tls-verify": True,
                        },
                    }
                ],
                "users": [{"name": "user", "user": {"token": token}}],
                "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "user"}}],
            }
            self.kubeconfig(user).write_text(yaml.safe_dump(document))

    def _define_wsjobs(self, client: Client) -> None:
        for document in yaml.safe_load_all(CRD.read_text()):
            put(client, document)
        self._wait("the CRD", lambda: list(client.list(resource("WsJob"), namespace="*")) is not None)

    def _wait(self, what: str, holds: Callable[[], object]) -> None:
        wait_until_ready(what, holds, self.folder)


class Given(ControlPlane):
    """A cluster of somebody, by a kubeconfig whose user may do everything. It runs on this machine, and
    has no other nodes that take pods: its scheduler would give them those of tests, whose images exist
    nowhere. What tests make there they remove."""

    def __init__(self, folder: Path, path: Path) -> None:
        super().__init__(folder)
        self._path = path
        self._way: Proxy | None = None

    @property
    def kubectl(self) -> Path | None:
        found = shutil.which("kubectl")
        return Path(found) if found else None

    def start(self) -> None:
        chosen = KubeConfig.from_file(self._path).get()  # of its current context
        assert chosen
        at = urlsplit(chosen.cluster.server)
        assert at.hostname
        self._way = Proxy((at.hostname, at.port or 443))
        self.api_port = self._way.port
        accounts = {ADMIN: "admin", SERVER: SERVER.rpartition(":")[2]}
        with client_of(self._path) as client:
            self._define_wsjobs(client)
            put(client, _named("v1", "Namespace", OWN_NAMESPACE))
            for user, account in accounts.items():
                put(client, _named("v1", "ServiceAccount", account), OWN_NAMESPACE)
                self.tokens[user] = _token(client, account)
            put(client, _binding("ClusterRole", "cluster-admin", "admin"))
        self._write_kubeconfigs()

    def allow(self, client: Client, namespace: str) -> None:
        """What the manifests allow the account of a Cluster Server, ours may."""
        role = SERVER.rpartition(":")[2]
        put(client, _binding("Role", role, role), namespace)

    def stop(self) -> None:
        with client_of(self._path) as client, contextlib.suppress(ApiError):
            client.delete(resource("ClusterRoleBinding"), OWN_NAMESPACE)
            client.delete(resource("Namespace"), OWN_NAMESPACE)
        if self._way:
            self._way.close()


class Own(ControlPlane):
    """From the binaries in a folder, on the loopback."""

    def __init__(self, folder: Path, assets: Path, host: str) -> None:
        super().__init__(folder)
        self._assets = assets
        self._host = host
        self._etcd_port = 0
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def kubectl(self) -> Path | None:
        path = self._assets / "kubectl"
        return path if path.exists() else None

    def start(self) -> None:
        for user in (ADMIN, SERVER):
            self.tokens[user] = secrets.token_hex(16)
        groups = {ADMIN: "system:masters", SERVER: "system:serviceaccounts,system:authenticated"}
        rows = [f'{self.tokens[one]},{one},{one},"{groups[one]}"\n' for one in self.tokens]
        (self.folder / "tokens.csv").write_text("".join(rows))
        self._make_keys()
        self._etcd_port, peer_port, self.api_port = (free_port() for _ in range(3))
        at = f"http://{LOOPBACK}:{self._etcd_port}"
        peer = f"http://{LOOPBACK}:{peer_port}"
        self._run(
            "etcd",
            *("--data-dir", self.folder / "etcd", "--listen-client-urls", at),
            *("--advertise-client-urls", at, "--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
            "--unsafe-no-fsync",
        )
        self._wait("etcd", lambda: httpx2.get(f"{at}/health").is_success)
        self._start_api_server()
        self._write_kubeconfigs()
        with self.client() as client:
            self._wait("kube-system", lambda: bool(client.get(resource("Namespace"), "kube-system")))
            self._define_wsjobs(client)
            self._try_custom_resources(client)
        self._start_controllers()

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _start_controllers(self) -> None:
        """Once the API server stays: a controller whose kind it does not list just then is left out."""
        plain = ["--port=0"] if self._is_old() else []
        common = (
            f"--kubeconfig={self.kubeconfig(ADMIN)}",
            *("--leader-elect=false", "--secure-port=0", *plain),
        )
        self._run(
            "kube-controller-manager",
            *common,
            f"--node-monitor-grace-period={NOT_READY_SECONDS}s",
            "--node-monitor-period=1s",
            f"--service-account-private-key-file={self.folder / 'sa.key'}",
            f"--root-ca-file={self.folder / 'certificates' / 'apiserver.crt'}",
            "--use-service-account-credentials=false",
            "--concurrent-gc-syncs=5",
        )
        self._run("kube-scheduler", *common)

    def _try_custom_resources(self, client: Client) -> None:
        """Some builds of 1.20 die of the first one: those by a Go from 1.18 on with the reflect2 that it
        came with (before 1.0.2)."""
        server = self._processes[1]
        document: Document = {
            "apiVersion": "tidegate.dev/v1",
            "kind": "WsJob",
            "metadata": {"name": "first"},
            "spec": {"kind": "Compile", "configMap": "none"},
        }
        try:
            # Nothing is stored: it would die of that again.
            client.create(resource("WsJob")(document), namespace="default", dry_run=True)
        except httpx2.RemoteProtocolError:  # it has left without an answer
            server.wait(READY_SECONDS_MAX)
            self.why_no_custom_resources = (
                "this kube-apiserver dies of custom resources: it is built with a Go from 1.18 on and "
                "reflect2 before 1.0.2"
            )
            self._start_api_server()

    def _start_api_server(self) -> None:
        plain = ["--insecure-port=0"] if self._is_old() else []
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://{LOOPBACK}:{self._etcd_port}",
            f"--secure-port={self.api_port}",
            *plain,
            f"--bind-address={LOOPBACK}",
            f"--advertise-address={self._host}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--service-account-key-file={self.folder / 'sa.pub'}",
            f"--service-account-signing-key-file={self.folder / 'sa.key'}",
            "--service-account-issuer=https://localhost",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC",
            f"--default-not-ready-toleration-seconds={TOLERATION_SECONDS}",
            f"--default-unreachable-toleration-seconds={TOLERATION_SECONDS}",
        )
        at = f"https://{LOOPBACK}:{self.api_port}/readyz"
        token = {"Authorization": f"Bearer {self.tokens[ADMIN]}"}
        self._wait(
            "kube-apiserver",
            lambda: httpx2.get(at, headers=token, verify=False).is_success,
        )

    def _run(self, binary: str, *arguments: object) -> None:
        with (self.folder / f"{binary}.log").open("ab") as log:
            process = subprocess.Popen(
                [*WITH_US, str(self._assets / binary), *map(str, arguments)], stdout=log, stderr=log
            )
        self._processes.append(process)

    def _is_old(self) -> bool:
        """Whether its programs have a port without TLS that is to be closed: up to 1.23."""
        said = subprocess.run(
            [self._assets / "kube-apiserver", "--version"], capture_output=True, text=True, check=True
        ).stdout
        return int(said.split(".")[1].strip("+")) < 24

    def _make_keys(self) -> None:
        key = rsa.generate_private_key(65537, 2048)
        (self.folder / "sa.key").write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        )
        (self.folder / "sa.pub").write_bytes(
            key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        )


def why_none() -> str:
    """Why there can be no control plane here; empty if there can."""
    if given := os.environ.get(GIVEN):
        return "" if Path(given).is_file() else f"{GIVEN} is {given}, which is no file"
    folder = os.environ.get(ASSETS, "")
    if not folder:
        return f"{ASSETS} names no folder with {', '.join(BINARIES)}"
    missing = [name for name in BINARIES if not (Path(folder) / name).exists()]
    return f"{ASSETS} is {folder}, which has no {', '.join(missing)}" if missing else ""


def from_environment(folder: Path, host: str) -> ControlPlane:
    """The one that is given, or else one from binaries. `host`: the address of this machine for pods."""
    if given := os.environ.get(GIVEN):
        return Given(folder, Path(given))
    return Own(folder, Path(os.environ[ASSETS]), host)


def wait_until_ready(what: str, holds: Callable[[], object], folder: Path) -> None:
    until = time.monotonic() + READY_SECONDS_MAX
    while True:
        with contextlib.suppress(httpx2.HTTPError):
            if holds():
                return
        if time.monotonic() > until:
            raise AssertionError(f"{what} is not ready: see {folder}")
        time.sleep(0.05)


@contextlib.contextmanager
def client_of(kubeconfig: Path) -> Iterator[Client]:
    made = Client(KubeConfig.from_file(kubeconfig), trust_env=False, field_manager="tests")
    try:
        yield made
    finally:
        made.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def _named(version: str, kind: str, name: str, **more: object) -> Document:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **more}


def _binding(kind: str, role: str, account: str) -> Document:
    subject = {"kind": "ServiceAccount", "name": account, "namespace": OWN_NAMESPACE}
    group = "rbac.authorization.k8s.io"
    return _named(
        f"{group}/v1",
        "ClusterRoleBinding" if kind == "ClusterRole" else "RoleBinding",
        OWN_NAMESPACE,
        roleRef={"apiGroup": group, "kind": kind, "name": role},
        subjects=[subject],
    )


def _token(client: Client, account: str) -> str:
    spec = TokenRequestSpec(audiences=[], expirationSeconds=TOKEN_SECONDS)
    wanted = ServiceAccountToken(metadata=ObjectMeta(), spec=spec)
    made = client.create(wanted, account, namespace=OWN_NAMESPACE)
    assert made.status
    return str(made.status.token)
