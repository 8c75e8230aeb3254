"""What runs of a pod on a node of the test bed, as this machine sees it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PodFolder:
    """The folder of a pod on its node; it stays when the pod is gone."""

    path: Path

    def volume(self, name: str) -> Path:
        return self.path / "volumes" / name

    def processes(self, container: str) -> list[int]:
        """All in the namespace of its container."""
        try:
            first = int((self.path / "containers" / container / "pid").read_text())
            space = Path(f"/proc/{first}/ns/pid").readlink()
        except (FileNotFoundError, ProcessLookupError):
            return []
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                with contextlib.suppress(OSError):
                    is_alive = (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                    if is_alive and (path / "ns" / "pid").readlink() == space:
                        found.append(int(path.name))
        return found


def folders(nodes: Path, namespace: str, name: str) -> Iterator[PodFolder]:
    """Of all pods that ever had this name, the last one first. `nodes`: the folder of all nodes."""
    found = []
    for about in [*nodes.glob("*/pods/*/pod.json"), *nodes.glob("*/removed/*/pod.json")]:
        with contextlib.suppress(FileNotFoundError):
            said = about.read_text()  # nothing yet, where the kubelet is just writing it
            if said and json.loads(said) == {"namespace": namespace, "name": name}:
                found.append((about.stat().st_mtime, PodFolder(about.parent)))
    for _, one in sorted(found, key=lambda pair: pair[0], reverse=True):
        yield one


def number_inside(pid: int) -> int:
    """The number that a process has in its own namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def environment(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()
