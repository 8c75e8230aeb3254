"""As whom a container runs, and whose the files of its volumes are, as Kubernetes documents it of
securityContext."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

Document = dict[str, Any]
OF_IMAGE = 0  # this machine is the image, and has no user of its own
SET_GROUP = stat.S_ISGID


@dataclass(frozen=True)
class User:
    """`capabilities`: all that it may have; None: those of the machine's root."""

    user: int
    group: int
    groups: tuple[int, ...] = ()
    capabilities: tuple[str, ...] | None = None
    gains_none: bool = False  # of programs that would have more rights

    @classmethod
    def of(cls, pod: Document, container: Document) -> Self:
        """By their specs. Raises PermissionError if it says that it must not be root, and is."""
        of_pod, of_container = (one.get("securityContext", {}) for one in (pod, container))
        both = of_pod | of_container
        user = both.get("runAsUser", OF_IMAGE)
        if both.get("runAsNonRoot") and user == 0:
            raise PermissionError("container has runAsNonRoot and image will run as root")
        groups = [*of_pod.get("supplementalGroups", ())]
        if "fsGroup" in of_pod:
            groups.append(of_pod["fsGroup"])
        changes = of_container.get("capabilities", {})
        drops_all = "ALL" in changes.get("drop", ())
        if changes and not drops_all:
            raise NotImplementedError(f"capabilities {changes}: only those without any other")
        return cls(
            user,
            both.get("runAsGroup", 0),
            tuple(groups),
            tuple(changes.get("add", ())) if drops_all else None,
            of_container.get("allowPrivilegeEscalation") is False,
        )

    @property
    def home(self) -> str:
        """As a runtime finds it."""
        try:
            return pwd.getpwuid(self.user).pw_dir
        except KeyError:
            return "/"

    def command(self) -> list[str]:
        """What a command has before it. It dies with whoever has started it, as everything does here:
        a change of users would undo that."""
        groups = ("--groups", ",".join(map(str, self.groups))) if self.groups else ("--clear-groups",)
        found = ["setpriv", "--pdeathsig", "KILL", *groups]
        found += ["--reuid", str(self.user), "--regid", str(self.group)]
        if self.capabilities is not None:
            names = ",".join(("-all", *(f"+{one.lower()}" for one in self.capabilities)))
            found += ["--inh-caps", "-all", "--bounding-set", names]
        if self.gains_none:
            found.append("--no-new-privs")
        return found


def give(folder: Path, group: int | None, *, is_read_only: bool) -> None:
    """All of a volume to the group of its pod, as fsGroup has it."""
    if group is None:
        return
    may, enter = (0o440, 0o550) if is_read_only else (0o660, 0o770)
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        os.chown(path, -1, group)
        path.chmod(mode | (enter | SET_GROUP if path.is_dir() else may))
