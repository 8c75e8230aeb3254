"""The test bed: a control plane of Kubernetes, and nodes whose kubelet is a stand-in.

One for a whole run of tests. Each test has a namespace of its own in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import yaml
from lightkube import ApiError, Client

from console.environment import PROJECT
from tests.console.sessions.network import WITH_US, ip
from tests.console.sessions.network import why_not as why_no_network
from tests.kubernetes import control_plane
from tests.kubernetes.control_plane import ADMIN, SERVER, ControlPlane, Given, free_port
from tests.kubernetes.proxy import LOOPBACK, Proxy
from tests.kubernetes.resources import Document, put, resource

MANIFESTS = PROJECT / "deploy" / "kubernetes"


def why_not() -> str:
    """Why there can be no test bed here; empty if there can."""
    if why := control_plane.why_none():
        return why
    if absent := [name for name in ("nsenter", "unshare", "setpriv") if shutil.which(name) is None]:
        return f"{', '.join(absent)} is missing: apt install util-linux"
    return why_no_network()


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


@dataclass
class Bed:
    """`host`: the address of this machine for pods."""

    folder: Path
    control: ControlPlane
    host: str
    bridge: str
    network: str
    nodes: dict[str, NodeProcess] = field(default_factory=dict)
    for_pods: Proxy = field(init=False)  # the API server, which they reach by the bridge

    @property
    def api_port(self) -> int:
        """Of the loopback."""
        return self.control.api_port

    @property
    def is_given(self) -> bool:
        """Its control plane is somebody's, who says how long it waits for nodes."""
        return isinstance(self.control, Given)

    def start(self) -> None:
        self.control.start()
        self.for_pods = Proxy((LOOPBACK, self.api_port), self.host)
        self._certificate, self._key = self.control.make_kubelet_keys()

    def stop(self) -> None:
        for node in self.nodes.values():
            node.thaw()
            node.stop()
        if hasattr(self, "for_pods"):  # it has started
            self.for_pods.close()
            if self.is_given:
                with self.client() as client:
                    for name in self.nodes:
                        client.delete(resource("Node"), name)
        self.control.stop()

    def kubeconfig(self, user: str = SERVER) -> Path:
        return self.control.kubeconfig(user)

    def client(self, user: str = ADMIN) -> contextlib.AbstractContextManager[Client]:
        return self.control.client(user)

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

    def evict(self, namespace: str, pod: str) -> None:
        """As `kubectl drain` does it."""
        version = "policy/v1" if self.control.minor >= 22 else "policy/v1beta1"
        answer = httpx2.post(
            f"https://{LOOPBACK}:{self.api_port}/api/v1/namespaces/{namespace}/pods/{pod}/eviction",
            json={"apiVersion": version, "kind": "Eviction", "metadata": {"name": pod}},
            headers={"Authorization": f"Bearer {self.control.tokens[ADMIN]}"},
            verify=False,
        )
        answer.raise_for_status()

    def apply(self, *paths: Path, namespace: str | None = None) -> None:
        with self.client() as client:
            for path in paths:
                for document in yaml.safe_load_all(path.read_text()):
                    put(client, document, namespace)

    def namespace(self, name: str) -> None:
        """With the rights of a Cluster Server in it."""
        with self.client() as client:
            put(client, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
            self.apply(MANIFESTS / "rbac.yaml", namespace=name)
            if isinstance(self.control, Given):
                self.control.allow(client, name)
            self._wait(f"accounts of {name}", lambda: self._has_accounts(client, name))

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
            *("--certificate", self._certificate, "--key", self._key),
            *("--labels", json.dumps(dict(labels or {})), "--bridge", self.bridge),
            *("--network", self.network, "--host", LOOPBACK, "--number", str(number)),
            *("--api", f"{self.host}:{self.for_pods.port}"),
            *("--port", str(free_port())),
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

    def remove_node(self, name: str) -> None:
        """It loses its power and does not come back. Of the last that was added."""
        self.nodes.pop(name).stop()
        with self.client() as client:
            client.delete(resource("Node"), name)

    def until_ready(self, name: str) -> None:
        with self.client() as client:
            self._wait(name, lambda: _is_ready(client.get(resource("Node"), name)))

    def _has_accounts(self, client: Client, namespace: str) -> bool:
        """Whether pods may be made: before 1.24 an account has a Secret first."""
        try:
            found = client.get(resource("ServiceAccount"), "default", namespace=namespace)
        except ApiError as error:
            if error.status.code != 404:
                raise
            return False
        return self.control.minor >= 24 or bool(found.get("secrets"))

    def _wait(self, what: str, holds: Callable[[], object]) -> None:
        control_plane.wait_until_ready(what, holds, self.folder)


@contextlib.contextmanager
def bed(plane: Callable[[Path, str], ControlPlane] = control_plane.from_environment) -> Iterator[Bed]:
    """`plane`: what makes its control plane, in a folder and for pods that reach this machine by an
    address."""
    network = _free_network()
    bridge = f"tg{network.rpartition('.')[2]}"
    host = f"{network}.0.1"
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("address", "add", f"{host}/16", "dev", bridge)
        ip("link", "set", bridge, "up")
        with tempfile.TemporaryDirectory(prefix="tidegate-kubernetes-") as folder:
            made = Bed(Path(folder), plane(Path(folder), host), host, bridge, network)
            try:
                made.start()
                yield made
            finally:
                made.stop()
                if kept := os.environ.get("KEEP_BED"):
                    ignored = shutil.ignore_patterns("root", "etcd", "*.sock")
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


def _is_ready(node: Document) -> bool:
    conditions: Sequence[Document] = node.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
