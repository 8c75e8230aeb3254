"""Leaves and a spine of our own: bridges in network namespaces, plugged together with pairs of veth.

Nothing has a name on this machine: namespaces are held open by this process and by what runs in them, so
they go with the last of those, and bridges and pairs go with them. Only root may do that.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CLONE_NEWNET: Final = 0x40000000
OURS: Final = Path("/proc/thread-self/ns/net")
HEADERS: Final = 66  # bytes of a frame before its payload: Ethernet 14, IP 20, TCP with timestamps 32
BURST_BYTES, QUEUE_BYTES = 256 << 10, 32 << 20  # what waits at a limited link is not dropped
# Before a command: who is started with it does not outlive us, however we end.
WITH_US: Final = ("setpriv", "--pdeathsig", "KILL")


def why_not() -> str:
    """Why there can be no such network here; empty if there can."""
    missing = [name for name in ("ip", "tc", "setpriv") if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing:
        return f"{', '.join(missing)} is missing: apt install iproute2 util-linux"
    try:
        Namespace().close()
    except PermissionError as error:
        return f"no network namespaces here: {error}"
    return ""


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


class Namespace:
    """A network of its own."""

    def __init__(self) -> None:
        with self._and_back():
            _call("unshare", CLONE_NEWNET)
            self.file = os.open(OURS, os.O_RDONLY)
            ip("link", "set", "lo", "up")

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is in it, with what it starts: processes, threads, sockets."""
        with self._and_back():
            _call("setns", self.file, CLONE_NEWNET)
            yield

    @staticmethod
    @contextlib.contextmanager
    def _and_back() -> Iterator[None]:
        before = os.open(OURS, os.O_RDONLY)
        try:
            yield
        finally:
            _call("setns", before, CLONE_NEWNET)
            os.close(before)

    @property
    def path(self) -> str:
        """As `ip` wants it: with a slash in it, it is no name."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def close(self) -> None:
        os.close(self.file)


def ip(*arguments: str) -> Any:
    return _run("ip", "-json", "-statistics", *arguments)


def _run(*command: str) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return json.loads(done.stdout) if done.stdout.strip() else None


@dataclass(frozen=True)
class Carried:
    """What an interface has sent and received."""

    bytes: int
    packets: int

    @property
    def payload(self) -> int:
        """Without the headers of its packets."""
        return self.bytes - self.packets * HEADERS


class Network:
    """Leaves, each with a link up to one spine, and a network beside them for everything but columns.

    Hosts have an address on their leaf, which is the same number as that on the network beside.
    """

    DATA, BESIDE = "10.1.0", "10.9.0"

    def __init__(self, leaves: Sequence[str]) -> None:
        self._switches = Namespace()
        self._namespaces = [self._switches]
        with self._switches.entered():
            for bridge in ("spine", "beside", *leaves):
                ip("link", "add", bridge, "type", "bridge")
                ip("link", "set", bridge, "up")
            for leaf in leaves:
                up, down = f"{leaf}-up", f"{leaf}-down"
                ip("link", "add", up, "type", "veth", "peer", "name", down)
                for end, bridge in ((up, leaf), (down, "spine")):
                    ip("link", "set", end, "master", bridge, "up")

    def host(self, name: str, leaf: str = "") -> Namespace:
        """The network as one host has it; its number is that of those before it, plus one."""
        made = Namespace()
        self._namespaces.append(made)
        number = len(self._namespaces) - 1
        self._plug(made, name, "beside", f"{self.BESIDE}.{number}")
        if leaf:
            self._plug(made, f"{name}-nic", leaf, f"{self.DATA}.{number}")
        return made

    def number(self, host: Namespace) -> int:
        return self._namespaces.index(host)

    def _plug(self, host: Namespace, name: str, bridge: str, address: str) -> None:
        with self._switches.entered():
            there = ("peer", "name", name, "netns", host.path)
            ip("link", "add", name, "type", "veth", *there)
            ip("link", "set", name, "master", bridge, "up")
        with host.entered():
            ip("address", "add", f"{address}/24", "dev", name)
            ip("link", "set", name, "up")

    def plug(self, host: Namespace, name: str, state: str) -> None:
        """Plug the links of a host in (`up`), or out (`down`)."""
        with host.entered():
            for link in (name, f"{name}-nic"):
                ip("link", "set", link, state)

    def limit_spine(self, leaf: str, bytes_a_second: int) -> None:
        """From now on a leaf's link to the spine carries no more than that, up as down."""
        with self._switches.entered():
            for end in (f"{leaf}-up", f"{leaf}-down"):
                bucket = ("rate", f"{bytes_a_second}bps", "burst", str(BURST_BYTES))
                _run("tc", "qdisc", "add", "dev", end, "root", "tbf", *bucket, "limit", str(QUEUE_BYTES))

    def over_spine(self, leaf: str) -> Carried:
        """What a leaf's link to the spine has carried, up and down, as its interface has counted it."""
        with self._switches.entered():
            [link] = ip("link", "show", "dev", f"{leaf}-up")
        ways = [link["stats64"][way] for way in ("rx", "tx")]
        return Carried(sum(way["bytes"] for way in ways), sum(way["packets"] for way in ways))

    def close(self) -> None:
        for namespace in self._namespaces:
            namespace.close()
