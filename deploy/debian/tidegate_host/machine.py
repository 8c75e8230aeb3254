"""Changes of this machine. What is there already is left alone, and no line is printed for it."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

BOOTED: Final = Path("/run/systemd/system")  # there if systemd is process 1
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LAST_WORDS: Final = 2000


class Failed(Exception):
    """Something that could not be done, in a sentence for the operator."""


class Machine:
    """Does what is missing and prints a line for each change; with `dry_run` it only prints."""

    def __init__(self, *, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.changes = 0

    @property
    def is_booted(self) -> bool:
        """Whether services can be started; not in a chroot, where an image is made."""
        return BOOTED.is_dir()

    def tell(self, change: str) -> None:
        self.changes += 1
        print(f"{'would ' if self.dry_run else ''}{change}", flush=True)

    # Files

    def directory(self, path: Path, mode: int, user: str = "root", group: str = "root") -> None:
        if path.is_dir() and _is_as(path, mode, user, group):
            return
        self.tell(f"make directory {path} ({mode:04o} {user}:{group})")
        if not self.dry_run:
            path.mkdir(parents=True, exist_ok=True)
            _set(path, mode, user, group)

    def file(
        self, path: Path, text: str, mode: int = 0o644, user: str = "root", group: str = "root"
    ) -> bool:
        """Write it as a whole or not at all. Returns whether it was another one."""
        if path.is_file() and path.read_text() == text and _is_as(path, mode, user, group):
            return False
        self.tell(f"write {path} ({mode:04o} {user}:{group})")
        if not self.dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.new")
            beside.unlink(missing_ok=True)
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            _set(beside, mode, user, group)
            beside.replace(path)
        return True

    def link(self, path: Path, target: Path) -> bool:
        """Point it at the target, in one step. Returns whether it pointed elsewhere."""
        if path.is_symlink() and path.readlink() == target:
            return False
        if path.exists() and not path.is_symlink():
            raise Failed(f"{path} is there and no link of ours: move it away.")
        self.tell(f"link {path} → {target}")
        if not self.dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.new")
            beside.unlink(missing_ok=True)
            beside.symlink_to(target)
            beside.replace(path)
        return True

    def absent(self, path: Path) -> None:
        """Remove it with all that is in it. A mount point stays, and is empty."""
        if not path.exists() and not path.is_symlink():
            return
        removed = list(path.iterdir()) if path.is_mount() else [path]
        if not removed:
            return
        self.tell(f"remove {'what is in ' if removed != [path] else ''}{path}")
        if self.dry_run:
            return
        for one in removed:
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one)
            else:
                one.unlink()

    # Users and packages

    def user(self, name: str) -> None:
        """A system user who owns files and cannot log in, with a group of the same name."""
        with contextlib.suppress(KeyError):
            pwd.getpwnam(name)
            return
        self.tell(f"make user {name}")
        flags = ["--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
        self.run("useradd", *flags, "--shell", "/usr/sbin/nologin", name)

    def group(self, name: str) -> None:
        """A system group without members: units name it."""
        with contextlib.suppress(KeyError):
            grp.getgrnam(name)
            return
        self.tell(f"make group {name}")
        self.run("groupadd", "--system", name)

    def no_group(self, name: str) -> None:
        try:
            grp.getgrnam(name)
        except KeyError:
            return
        self.tell(f"remove group {name}")
        self.run("groupdel", name)

    def no_user(self, name: str) -> None:
        try:
            pwd.getpwnam(name)
        except KeyError:
            return
        self.tell(f"remove user {name}")
        self.run("userdel", name)

    def packages(self, *names: str) -> None:
        """Debian's packages, where they are absent."""
        missing = [name for name in names if not _is_installed(name)]
        if missing:
            self.tell(f"install Debian's {', '.join(missing)}")
            environment = {"DEBIAN_FRONTEND": "noninteractive"}
            self.run("apt-get", "update", "--quiet")
            self.run(
                *("apt-get", "install", "--quiet", "--yes", "--no-install-recommends", *missing),
                environment=environment,
            )

    # Programs

    def run(
        self,
        *command: str,
        user: str = "root",
        environment: Mapping[str, str] | None = None,
        given: str = "",
        directory: Path = Path("/"),
    ) -> str:
        """Run a program that changes something; what it prints. Raises Failed with its last words."""
        return (
            ""
            if self.dry_run
            else ask(*command, user=user, environment=environment, given=given, directory=directory)
        )


def ask(
    *command: str,
    user: str = "root",
    environment: Mapping[str, str] | None = None,
    given: str = "",
    directory: Path = Path("/"),
) -> str:
    """What a program prints. Raises Failed."""
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env={"PATH": PATH, "LANG": "C.UTF-8", **_of_network(), **(environment or {})},
            input=given,
            capture_output=True,
            text=True,
            check=False,
            umask=0o027 if user != "root" else 0o022,
            user=None if user == "root" else user,
            group=None if user == "root" else user,
            extra_groups=None if user == "root" else (),
        )
    except OSError as error:
        raise Failed(f"{command[0]} can't be run: {error.strerror}.") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-LAST_WORDS:]
        raise Failed(f"`{' '.join(command)}` failed with status {done.returncode}:\n{said}")
    return done.stdout


def _of_network() -> dict[str, str]:
    """How this machine reaches package indexes: what pip and apt read."""
    names = ("http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE")
    return {
        name: value
        for name, value in os.environ.items()
        if name.lower() in names or name in names or name.startswith("PIP_")
    }


def _is_as(path: Path, mode: int, user: str, group: str) -> bool:
    found = path.stat()
    try:
        wanted = (pwd.getpwnam(user).pw_uid, grp.getgrnam(group).gr_gid)
    except KeyError:
        return False
    return (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (mode, *wanted)


def _set(path: Path, mode: int, user: str, group: str) -> None:
    shutil.chown(path, user, group)
    path.chmod(mode)


def _is_installed(package: str) -> bool:
    try:
        return "ok installed" in ask("dpkg-query", "--show", "--showformat", "${Status}", package)
    except Failed:
        return False
