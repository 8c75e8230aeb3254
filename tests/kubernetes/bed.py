"""The test bed: a control plane of Kubernetes from the binaries in `KUBEBUILDER_ASSETS`, and nodes.

One for a whole run of tests. Each test has a namespace of its own in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from lightkube import ApiError, Client, KubeConfig
from lightkube.core.resource_registry import resource_registry
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.types import PatchType

from console.environment import PROJECT
from tests.console.sessions.network import WITH_US, ip
from tests.console.sessions.network import why_not as why_no_network

ASSETS = "KUBEBUILDER_ASSETS"
BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
ADMIN, SERVER = "admin", "system:serviceaccount:tidegate:tidegate-cluster-server"
READY_SECONDS_MAX = 90.0
CARRIER_SECONDS_MAX = 10.0  # until a connection of the proxy has ended with its peers
NOT_READY_SECONDS = 4  # until a node that says nothing is not ready
TOLERATION_SECONDS = 2  # until its pods are evicted
LOOPBACK = "127.0.0.1"  # of all but pods, of which endpoints may have no such address
MANIFESTS = PROJECT / "deploy" / "kubernetes"
KINDS = {
    "CustomResourceDefinition": ("apiextensions.k8s.io", "v1", "customresourcedefinitions"),
    "Namespace": ("", "v1", "namespaces"),
    "Node": ("", "v1", "nodes"),
    "ClusterRole": ("rbac.authorization.k8s.io", "v1", "clusterroles"),
    "ClusterRoleBinding": ("rbac.authorization.k8s.io", "v1", "clusterrolebindings"),
}
NAMESPACED = {
    "ServiceAccount": ("", "v1", "serviceaccounts"),
    "ConfigMap": ("", "v1", "configmaps"),
    "Secret": ("", "v1", "secrets"),
    "Service": ("", "v1", "services"),
    "Pod": ("", "v1", "pods"),
    "Endpoints": ("", "v1", "endpoints"),
    "Deployment": ("apps", "v1", "deployments"),
    "DaemonSet": ("apps", "v1", "daemonsets"),
    "StatefulSet": ("apps", "v1", "statefulsets"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
    "PodDisruptionBudget": ("policy", "v1beta1", "poddisruptionbudgets"),
    "Role": ("rbac.authorization.k8s.io", "v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io", "v1", "rolebindings"),
    "Lease": ("coordination.k8s.io", "v1", "leases"),
    "WsJob": ("tidegate.dev", "v1", "wsjobs"),
}
Document = dict[str, Any]


def why_not() -> str:
    """Why there can be no test bed here; empty if there can."""
    folder = os.environ.get(ASSETS, "")
    if not folder:
        return f"{ASSETS} names no folder with {', '.join(BINARIES)}"
    missing = [name for name in BINARIES if not (Path(folder) / name).exists()]
    if missing:
        return f"{ASSETS} is {folder}, which has no {', '.join(missing)}"
    if absent := [name for name in ("nsenter", "unshare", "setpriv") if shutil.which(name) is None]:
        return f"{', '.join(absent)} is missing: apt install util-linux"
    return why_no_network()


def resource(kind: str) -> Any:
    """Its class, of which lightkube registers one for a whole process."""
    group, version, plural = (KINDS | NAMESPACED)[kind]
    if known := resource_registry.get(f"{group}/{version}".lstrip("/"), kind):
        return known
    if kind in KINDS:
        return create_global_resource(group, version, kind, plural)
    return create_namespaced_resource(group, version, kind, plural)


@dataclass
class NodeProcess:
    """A node: the process of its stand-in kubelet."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    def freeze(self) -> None:
        """It cannot be reached any more; its pods go on."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """It has no power any more."""
        self.process.kill()
        self.process.wait()


class Proxy(threading.Thread):
    """A way to the API server, or to a pod, that can be cut as a network is: what is sent is lost, and
    not refused. `to` may change; it is for connections from then on."""

    def __init__(self, to: tuple[str, int], host: str = LOOPBACK) -> None:
        super().__init__(daemon=True)
        self.to = to
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        self._is_cut = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._carriers: list[threading.Thread] = []
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self.to)
                self._pairs.append((near, far))
                for one, other in ((near, far), (far, near)):
                    carrier = threading.Thread(target=self._carry, args=(one, other), daemon=True)
                    self._carriers.append(carrier)
                    carrier.start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with one, contextlib.suppress(OSError):
            while piece := one.recv(1 << 16):
                if not self._is_cut.is_set():
                    other.sendall(piece)
            other.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        self._is_cut.set()
        try:
            yield
        finally:
            for pair in self._pairs:  # a part of what they carried is lost
                for one in pair:
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
            self._pairs.clear()
            self._is_cut.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join()
        for carrier in self._carriers:
            carrier.join(CARRIER_SECONDS_MAX)


@dataclass
class Bed:
    folder: Path
    assets: Path
    host: str
    bridge: str
    network: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: dict[str, NodeProcess] = field(default_factory=dict)
    api_port: int = 0
    etcd_port: int = 0
    tokens: dict[str, str] = field(default_factory=dict)
    why_no_custom_resources: str = ""
    for_pods: Proxy = field(init=False)  # the API server, which listens on the loopback only

    # The control plane

    def start(self) -> None:
        for user in (ADMIN, SERVER):
            self.tokens[user] = secrets.token_hex(16)
        groups = {ADMIN: "system:masters", SERVER: "system:serviceaccounts,system:authenticated"}
        rows = [f'{self.tokens[one]},{one},{one},"{groups[one]}"\n' for one in self.tokens]
        (self.folder / "tokens.csv").write_text("".join(rows))
        self._make_keys()
        self.etcd_port, peer_port, self.api_port = (_free_port() for _ in range(3))
        at = f"http://{LOOPBACK}:{self.etcd_port}"
        peer = f"http://{LOOPBACK}:{peer_port}"
        self._run(
            "etcd",
            *("--data-dir", self.folder / "etcd", "--listen-client-urls", at),
            *("--advertise-client-urls", at, "--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
            "--unsafe-no-fsync",
        )
        self._wait("etcd", lambda: httpx2.get(f"{at}/health").is_success)
        self.start_api_server()
        for user in self.tokens:
            self.kubeconfig(user).write_text(self._kubeconfig(user))
        with self.client() as client:
            self._wait("kube-system", lambda: bool(client.get(resource("Namespace"), "kube-system")))
            self.apply(MANIFESTS / "wsjobs.crd.yaml")
            self._wait("the CRD", lambda: list(client.list(resource("WsJob"), namespace="*")) == [])
            self._try_custom_resources(client)
        self._start_controllers()
        self.for_pods = Proxy((LOOPBACK, self.api_port), self.host)

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
        server = self.processes[1]
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
            self.start_api_server()

    def start_api_server(self) -> subprocess.Popen[bytes]:
        plain = ["--insecure-port=0"] if self._is_old() else []
        process = self._run(
            "kube-apiserver",
            f"--etcd-servers=http://{LOOPBACK}:{self.etcd_port}",
            f"--secure-port={self.api_port}",
            *plain,
            f"--bind-address={LOOPBACK}",
            f"--advertise-address={self.host}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--service-account-key-file={self.folder / 'sa.pub'}",
            f"--service-account-signing-key-file={self.folder / 'sa.key'}",
            "--service-account-issuer=https://localhost",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            f"--default-not-ready-toleration-seconds={TOLERATION_SECONDS}",
            f"--default-unreachable-toleration-seconds={TOLERATION_SECONDS}",
        )
        at = f"https://{LOOPBACK}:{self.api_port}/readyz"
        token = {"Authorization": f"Bearer {self.tokens[ADMIN]}"}
        self._wait(
            "kube-apiserver",
            lambda: httpx2.get(at, headers=token, verify=False).is_success,
        )
        return process

    def stop(self) -> None:
        for node in self.nodes.values():
            node.thaw()
            node.stop()
        if hasattr(self, "for_pods"):  # it has started
            self.for_pods.close()
        for process in reversed(self.processes):
            process.kill()
            process.wait()

    def kubeconfig(self, user: str = SERVER) -> Path:
        return self.folder / f"{user.rpartition(':')[2]}.kubeconfig"

    @contextlib.contextmanager
    def proxy(self) -> Iterator[tuple[Proxy, Path]]:
        """A way that can be cut, and the kubeconfig of a Cluster Server by it."""
        made = Proxy((LOOPBACK, self.api_port))
        path = self.folder / f"by-{made.port}.kubeconfig"
        at, by = f"{LOOPBACK}:{self.api_port}", f"{LOOPBACK}:{made.port}"
        path.write_text(self.kubeconfig().read_text().replace(at, by))
        try:
            yield made, path
        finally:
            made.close()

    @contextlib.contextmanager
    def client(self, user: str = ADMIN) -> Iterator[Client]:
        config = KubeConfig.from_file(self.kubeconfig(user))
        client = Client(config, trust_env=False, field_manager="tests")
        try:
            yield client
        finally:
            client.close()

    def evict(self, namespace: str, pod: str) -> None:
        """As `kubectl drain` does it."""
        version = "policy/v1beta1" if self._is_old() else "policy/v1"
        answer = httpx2.post(
            f"https://{LOOPBACK}:{self.api_port}/api/v1/namespaces/{namespace}/pods/{pod}/eviction",
            json={"apiVersion": version, "kind": "Eviction", "metadata": {"name": pod}},
            headers={"Authorization": f"Bearer {self.tokens[ADMIN]}"},
            verify=False,
        )
        answer.raise_for_status()

    def apply(self, *paths: Path, namespace: str | None = None) -> None:
        with self.client() as client:
            for path in paths:
                for document in yaml.safe_load_all(path.read_text()):
                    self.put(client, document, namespace)

    @staticmethod
    def put(client: Client, document: Document, namespace: str | None = None) -> Any:
        kind = document["kind"]
        where: dict[str, Any] = {"namespace": namespace} if kind in NAMESPACED else {}
        client.patch(
            resource(kind),
            document["metadata"]["name"],
            document,
            **where,
            patch_type=PatchType.APPLY,
            force=True,
        )

    def namespace(self, name: str) -> None:
        """With the rights of a Cluster Server in it."""
        with self.client() as client:
            self.put(client, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        self.apply(MANIFESTS / "rbac.yaml", namespace=name)

    def drop_namespace(self, name: str) -> None:
        with self.client() as client, contextlib.suppress(ApiError):
            client.delete(resource("Namespace"), name)

    # Nodes

    def add_node(
        self, name: str, labels: Mapping[str, str] | None = None, **options: object
    ) -> NodeProcess:
        number = len(self.nodes) + 1
        folder = self.folder / "nodes" / name
        folder.parent.mkdir(exist_ok=True)
        command = [
            *(sys.executable, "-m", "tests.kubernetes.kubelet", "--node", name),
            *("--kubeconfig", self.kubeconfig(ADMIN), "--folder", folder, "--image", PROJECT),
            *("--certificate", self.folder / "certificates" / "apiserver.crt"),
            *("--key", self.folder / "certificates" / "apiserver.key"),
            *("--labels", json.dumps(dict(labels or {})), "--bridge", self.bridge),
            *("--network", self.network, "--host", LOOPBACK, "--number", str(number)),
            *("--api", f"{self.host}:{self.for_pods.port}"),
            *("--port", str(_free_port())),
        ]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*WITH_US, *map(str, command)], cwd=PROJECT, stdout=log, stderr=log
            )
        node = self.nodes[name] = NodeProcess(name, folder, process)
        self.until_ready(name)
        return node

    def until_ready(self, name: str) -> None:
        with self.client() as client:
            self._wait(name, lambda: _is_ready(client.get(resource("Node"), name)))

    # Processes

    def _run(self, binary: str, *arguments: object) -> subprocess.Popen[bytes]:
        with (self.folder / f"{binary}.log").open("ab") as log:
            process = subprocess.Popen(
                [*WITH_US, str(self.assets / binary), *map(str, arguments)], stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def _wait(self, what: str, holds: Any) -> None:
        until = time.monotonic() + READY_SECONDS_MAX
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if holds():
                    return
            if time.monotonic() > until:
                raise AssertionError(f"{what} is not ready: see {self.folder}")
            time.sleep(0.05)

    def _is_old(self) -> bool:
        """Whether its programs have a port without TLS that is to be closed: up to 1.23."""
        said = subprocess.run(
            [self.assets / "kube-apiserver", "--version"], capture_output=True, text=True, check=True
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

    def _kubeconfig(self, user: str) -> str:
        return yaml.safe_dump(
            {
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
                "users": [{"name": "user", "user": {"token": self.tokens[user]}}],
                "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "user"}}],
            }
        )


@contextlib.contextmanager
def bed() -> Iterator[Bed]:
    bridge = f"tg{os.getpid()}"
    network = _free_network()
    host = f"{network}.0.1"
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("address", "add", f"{host}/16", "dev", bridge)
        ip("link", "set", bridge, "up")
        with tempfile.TemporaryDirectory(prefix="tidegate-kubernetes-") as folder:
            made = Bed(Path(folder), Path(os.environ[ASSETS]), host, bridge, network)
            try:
                made.start()
                yield made
            finally:
                made.stop()
                if kept := os.environ.get("KEEP_BED"):
                    ignored = shutil.ignore_patterns("root", "etcd")
                    shutil.copytree(folder, kept, symlinks=True, dirs_exist_ok=True, ignore=ignored)
    finally:
        ip("link", "delete", bridge)


def _free_network() -> str:
    """Two numbers of an address that no interface of this machine has."""
    taken = {
        ".".join(one["local"].split(".")[:2])
        for link in ip("address")
        for one in link.get("addr_info", ())
    }
    return next(f"10.{number}" for number in range(224, 256) if f"10.{number}" not in taken)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def _is_ready(node: Document) -> bool:
    conditions: Sequence[Document] = node.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
