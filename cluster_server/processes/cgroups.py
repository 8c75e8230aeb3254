"""Control groups (v2): one for each instance or job, which all its processes are in whatever they do.
Limits are set where the controllers may be used; to know and to end what belongs together needs none.

    <where the server is>/tidegate-<state directory>/instances-<instance>, or jobs-<job>
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

PERIOD_MICROSECONDS: Final = 100_000
CONTROLLERS: Final = ("memory", "cpu")
OURS: Final = "tidegate-"
SERVER: Final = "tidegate-server"  # a group with controllers for others may have no process in it


class Cgroups:
    """Raises OSError where the kernel refuses."""

    def __init__(self, folder: Path, controllers: frozenset[str]) -> None:
        self.folder = folder
        self.controllers = controllers

    def place(self, name: str, pid: int, memory_bytes: int, cpu_millis: int) -> Path:
        """Make the group of this name, with its limits, and put the process into it. 0: no limit."""
        group = self.folder / name
        group.mkdir(exist_ok=True)
        if "memory" in self.controllers:
            (group / "memory.max").write_text(str(memory_bytes) if memory_bytes else "max")
            (group / "memory.oom.group").write_text("1")  # half an engine is of no use
        if "cpu" in self.controllers:
            quota = cpu_millis * PERIOD_MICROSECONDS // 1000
            (group / "cpu.max").write_text(f"{quota or 'max'} {PERIOD_MICROSECONDS}")
        (group / "cgroup.procs").write_text(str(pid))
        return group

    def limits(self) -> str:
        """What is limited, or why not, in a sentence."""
        missing = [one for one in CONTROLLERS if one not in self.controllers]
        if not missing:
            return f"Control groups in {self.folder}: memory and processor time are limited."
        return (
            f"Control groups in {self.folder}, without the controllers {' and '.join(missing)}: "
            "instances get no such limits. Under systemd, Delegate=yes allows them."
        )


def members(group: Path) -> list[int]:
    """The processes in it, and in groups that they have made in it."""
    found: list[int] = []
    for procs in [group / "cgroup.procs", *group.glob("**/*/cgroup.procs")]:
        with contextlib.suppress(FileNotFoundError):
            found += [int(line) for line in procs.read_text().split()]
    return found


def kill(group: Path) -> None:
    """All of it at once, forks included."""
    if (file := group / "cgroup.kill").exists():  # not with a kernel before 5.14
        file.write_text("1")


def remove(group: Path) -> None:
    """It has no processes any more. The folder of all goes with the last one."""
    groups = sorted(group.glob("**/"), key=lambda path: len(path.parts), reverse=True)
    for one in groups:
        with contextlib.suppress(FileNotFoundError):
            one.rmdir()


def find(state_dir: Path, where: Path | None = None) -> Cgroups | None:
    """Control groups for this state directory, under this group or where this process is; None if
    none can be made there. What holds is logged once."""
    try:
        parent = where or _own()
        if parent is None:
            log.warning("There are no control groups (v2): instances get no limits")
            return None
        label = hashlib.sha256(bytes(state_dir.absolute())).hexdigest()[:12]
        made = _made(parent, parent / f"{OURS}{label}")
    except OSError as error:
        log.warning("Control groups cannot be used, so instances get no limits: %s", error)
        return None
    log.info("%s", made.limits())
    return made


def _made(parent: Path, ours: Path) -> Cgroups:
    ours.mkdir(exist_ok=True)
    _delegate(parent, ours)
    _delegate(ours, ours)
    held = (ours / "cgroup.subtree_control").read_text().split()
    probe = ours / ".probe"
    probe.mkdir(exist_ok=True)  # whether groups can be made in it
    probe.rmdir()
    return Cgroups(ours, frozenset(one for one in CONTROLLERS if one in held))


def _delegate(group: Path, ours: Path) -> None:
    """Let groups in this one have limits. The kernel refuses that where processes are in it: then this
    one moves into a group of its own."""
    offered = (group / "cgroup.controllers").read_text().split()
    wanted = [one for one in CONTROLLERS if one in offered]
    has = (group / "cgroup.subtree_control").read_text().split()
    if not (missing := [one for one in wanted if one not in has]):
        return
    control = " ".join(f"+{one}" for one in missing)
    try:
        (group / "cgroup.subtree_control").write_text(control)
    except OSError:
        own = ours.with_name(SERVER)
        own.mkdir(exist_ok=True)
        (own / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):  # others are in it as well: no limits, then
            (group / "cgroup.subtree_control").write_text(control)


def _own() -> Path | None:
    """The group of this process, where the one hierarchy of v2 is mounted."""
    own = next(
        (
            line.split("::", 1)[1]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        ),
        None,
    )
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if own is not None and rest.startswith("cgroup2 "):
            _, _, _, root, mount, *_ = fields.split()
            inside = own.removeprefix(root) if root != "/" else own
            found = Path(mount) / inside.strip("/")
            # A restarted server may be in its own group already.
            return found.parent if found.name == SERVER else found
    return None
