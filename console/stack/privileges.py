"""With which rights a process runs, and that it does not outlive whoever started it.

PostgreSQL refuses to run as root, so root has to lend it to somebody else. That somebody may not be
able to walk to the project at all: /root is closed to all others, and so is every mkdtemp(). Opening
those directories would change what is not ours. Instead the server keeps exactly one capability, the
one that lets it *look up* paths (CAP_DAC_READ_SEARCH; CAP_DAC_OVERRIDE in containers, which often have
only that), and everything it owns lies in one directory of its own.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from console.environment import command
from console.stack.errors import StackError, sentences

# Debian and its relatives create `postgres` with the package; everybody has `nobody`.
UNPRIVILEGED_NAMES = ("postgres", "nobody")
# (name for setpriv, bit number in linux/capability.h), the narrower one first.
LOOK_UP_CAPABILITIES = (("dac_read_search", 2), ("dac_override", 1))


@dataclass(frozen=True)
class Identity:
    """Who a process runs as; `capability` is the one it keeps, if any."""

    uid: int
    gid: int
    capability: str | None = None

    def own(self, path: Path) -> None:
        """Give `path` to this identity."""
        with sentences("hand over a file of the server", path):
            os.chown(path, self.uid, self.gid)

    def _setpriv_arguments(self) -> list[str]:
        arguments = [f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]
        if self.capability:
            arguments += [
                # Without this bit the kernel drops the capability inside access(2), and
                # PostgreSQL asks access(2) whether it may execute itself.
                "--securebits=+no_setuid_fixup",
                f"--inh-caps=+{self.capability}",
                f"--ambient-caps=+{self.capability}",
            ]
        return arguments


def launcher(
    *, identity: Identity | None = None, dies_with_us: signal.Signals | None = None
) -> list[str]:
    """What to put in front of a command so that it runs as `identity` (None: as ourselves).

    `dies_with_us` is the signal that the process gets from the kernel when the thread that started it
    is gone, also by kill -9. It survives neither a change of user nor a fork, so it is set by the same
    setpriv that changes the user, in the process that becomes the server. Only Linux has it; elsewhere
    the next start cleans up (see `leftovers`).
    """
    arguments = identity._setpriv_arguments() if identity else []  # noqa: SLF001 - same module
    if dies_with_us and _has_pdeathsig():
        arguments.append(f"--pdeathsig={dies_with_us.name.removeprefix('SIG')}")
    if not arguments:
        return []
    return [_setpriv(), *arguments, "--"]


def for_postgres(home: Path, reaches: Iterable[Path]) -> Identity | None:
    """Who PostgreSQL with its files in `home` runs as; None means as ourselves.

    `reaches` are further paths that it must be able to walk to. Changes nothing.
    """
    if os.geteuid() != 0:
        return None
    entry = _unprivileged_user(home)
    paths = [home, *reaches]
    if all(_can_walk_to(path, entry.pw_uid, entry.pw_gid) for path in paths):
        return Identity(entry.pw_uid, entry.pw_gid)
    return Identity(entry.pw_uid, entry.pw_gid, _look_up_capability(home))


def _unprivileged_user(home: Path) -> pwd.struct_passwd:
    """The owner of the files that are already there, else the first unprivileged user there is."""
    if home.exists() and (owner := home.stat().st_uid) != 0:
        try:
            return pwd.getpwuid(owner)
        except KeyError:
            sentence = (
                f"{home} belongs to user {owner}, who is not known on this machine, "
                f"and PostgreSQL cannot run as root. Give it to a user with `chown -R`."
            )
            raise StackError(sentence, exit_code=os.EX_NOUSER) from None
    for name in UNPRIVILEGED_NAMES:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    sentence = (
        "PostgreSQL cannot run as root, and this machine has neither a user `postgres` nor `nobody`. "
        f"Run `{command('up')}` as another user."
    )
    raise StackError(sentence, exit_code=os.EX_NOUSER)


def _can_walk_to(path: Path, uid: int, gid: int) -> bool:
    """Whether every directory above `path` lets this user through, by its permission bits."""
    return all(_may_enter(parent.stat(), uid, gid) for parent in path.absolute().parents)


def _may_enter(directory: os.stat_result, uid: int, gid: int) -> bool:
    if directory.st_uid == uid:
        return bool(directory.st_mode & stat.S_IXUSR)
    if directory.st_gid == gid:
        return bool(directory.st_mode & stat.S_IXGRP)
    return bool(directory.st_mode & stat.S_IXOTH)


def _look_up_capability(home: Path) -> str:
    bounding = _bounding_set()
    for name, bit in LOOK_UP_CAPABILITIES:
        if bounding >> bit & 1:
            return name
    sentence = (
        f"PostgreSQL cannot run as root, other users cannot reach {home}, and this container "
        "withholds the capability that would let them. "
        "Move the project to a directory that every user can enter, or run "
        f"`{command('up')}` as another user."
    )
    raise StackError(sentence, exit_code=os.EX_NOPERM)


def _bounding_set() -> int:
    """The capabilities that a process started by us can have, as a bit set."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return 0
    values = [line.split()[1] for line in lines if line.startswith("CapBnd:")]
    return int(values[0], 16) if values else 0


def _setpriv() -> str:
    path = shutil.which("setpriv")
    if path is None:
        sentence = (
            "PostgreSQL cannot run as root, and `setpriv` (of util-linux) is missing, "
            "with which it would run as another user. Install util-linux or do not be root."
        )
        raise StackError(sentence)
    return path


def _has_pdeathsig() -> bool:
    """Whether there is a setpriv that knows --pdeathsig: Linux, and not the one of busybox."""
    path = shutil.which("setpriv")
    return path is not None and Path(path).resolve().name == "setpriv"
