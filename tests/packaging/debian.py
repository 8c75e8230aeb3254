"""A Debian machine for tests: a root file system by debootstrap, and systemd as its process 1.

The machine has namespaces of its own for processes, mounts, users of the network and control groups, so
its systemd is the real one, with real units, sockets and limits. Its network is loopback and nothing
else. The root file system is made once for a checkout and kept; each machine writes to a layer above it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from console.environment import PROJECT
from console.stack.bootstrap import STATE
from tests.packaging.wheels import LOCK

SUITE: Final = "bookworm"
# What tidegate-host asks apt for, so that no machine needs a network of its own.
PACKAGES: Final = (
    "ca-certificates",
    "openssl",
    "postgresql",
    "python3-venv",
    "redis-server",
    "systemd-sysv",
)
KEPT: Final = STATE / "debian"
NEEDED: Final = ("debootstrap", "nsenter", "unshare", "ip")
HOST: Final = "box.tidegate.test"
BOOT_SECONDS_MAX: Final = 60.0
LOOK_SECONDS: Final = 0.2
DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
BOOT: Final = r"""
set -eu
root=$1
mount --make-rprivate /
ip link set lo up
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sys "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 run "$root/run"
mount -t tmpfs -o mode=755 dev "$root/dev"
for device in {devices}; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm" "$root/old"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mount -t tmpfs shm "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
cd "$root"
pivot_root . old
umount -l /old
mount --make-rshared /
export container=tests
exec /lib/systemd/systemd --log-target=console
""".replace("{devices}", " ".join(DEVICES))


def why_not() -> str:
    """Why there can be no machine here; nothing if there can be one."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a root file system of its own wants root on Linux"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def root_file_system() -> Path:
    """Of a fresh Debian. Made if there is none yet, which takes minutes and Debian's mirror."""
    made_of = " ".join((SUITE, *PACKAGES))
    root = KEPT / f"root-{hashlib.sha256(made_of.encode()).hexdigest()[:10]}"
    if not root.is_dir():
        beside = root.with_name(f"{root.name}.new")
        shutil.rmtree(beside, ignore_errors=True)
        KEPT.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE]
        done = subprocess.run([*command, str(beside)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"debootstrap has failed: {done.stdout.strip().splitlines()[-1:]}")
        beside.rename(root)
    return root


def wheelhouse() -> Path:
    """Wheels of all packages of the lock, for a machine without a network."""
    folder = KEPT / f"wheels-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:10]}"
    if not folder.is_dir():
        beside = folder.with_name(f"{folder.name}.new")
        python = Path(sys.base_prefix) / "bin" / "python3"
        command = [str(python), "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps"]
        # Debian's Python may want what a later patch of the same version has in its library.
        beside.mkdir(parents=True, exist_ok=True)
        wanted = beside / "lock"
        wanted.write_text(re.sub(r" ; python_full_version < [^ ]+", "", LOCK.read_text()))
        command += ["--only-binary", ":all:", "--dest", str(beside), "--requirement", str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"wheels cannot be had: {done.stderr.strip().splitlines()[-1:]}")
        beside.rename(folder)
    return folder


class Machine:
    """One that has booted."""

    def __init__(self, root: Path, init: int) -> None:
        self.root = root
        self._enter = ["nsenter", "-t", str(init), "-m", "-u", "-i", "-n", "-p", "-C", "--"]

    def run(
        self, *command: str, user: str = "root", given: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program there, with nothing of this process' environment."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        environment = {"PATH": path, "LANG": "C.UTF-8", "HOME": "/root", **variables}
        set_to = [f"{name}={value}" for name, value in environment.items()]
        as_user = [] if user == "root" else ["runuser", "-u", user, "--"]
        line = [*self._enter, "env", "-i", *set_to, *as_user, *command]
        return subprocess.run(line, input=given, capture_output=True, text=True, check=False, cwd="/")

    def does(self, *command: str, user: str = "root", given: str = "", **variables: str) -> str:
        """What a program prints that has to succeed."""
        done = self.run(*command, user=user, given=given, **variables)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def log(self, unit: str) -> str:
        return self.does("journalctl", "--no-pager", "--quiet", "--lines", "40", "--unit", unit)

    def files(self) -> Mapping[str, str]:
        """Every file and link below what an installation may write to, with its mode and owner. Those
        of tables come and go while their server runs."""
        places = ("/etc", "/opt", "/usr/local", "/var/lib")
        but = ("-path", "/var/lib/postgresql/*/main/*", "-prune", "-o")
        found = self.does("find", *places, *but, "-printf", r"%p\t%M %u:%g %l\n")
        return dict(line.split("\t", 1) for line in found.splitlines())


@contextlib.contextmanager
def booted(folder: Path) -> Iterator[Machine]:
    """A fresh machine with this checkout's `deploy` and the wheels in /root."""
    upper, work, root = (folder / name for name in ("upper", "work", "root"))
    for path in (upper, work, root):
        path.mkdir()
    layers = f"lowerdir={root_file_system()},upperdir={upper},workdir={work}"
    _mount("mount", "-t", "overlay", "overlay", "-o", layers, str(root))
    with contextlib.ExitStack() as after:
        after.callback(_mount, "umount", "-l", str(root))
        for name in ("debian", "redis"):
            shutil.copytree(PROJECT / "deploy" / name, root / "root" / "deploy" / name)
        (root / "root" / "requirements").mkdir()
        shutil.copy(LOCK, root / "root" / "requirements")
        shutil.copytree(wheelhouse(), root / "root" / "wheels")
        (root / "etc" / "hostname").write_text(f"{HOST.partition('.')[0]}\n")
        (root / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {HOST}\n")
        log = after.enter_context((folder / "console.log").open("wb"))
        flags = ("--mount", "--pid", "--uts", "--ipc", "--cgroup", "--net", "--fork", "--kill-child")
        shell = subprocess.Popen(
            [str(shutil.which("unshare")), *flags, "bash", "-c", BOOT, "boot", str(root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        after.callback(shell.wait)
        after.callback(shell.send_signal, signal.SIGKILL)
        machine = Machine(root, _first_child(shell.pid))
        _await_boot(machine, folder / "console.log")
        yield machine


def _mount(*command: str) -> None:
    subprocess.run(command, check=True)


def _first_child(pid: int) -> int:
    """Process 1 of the machine, as we see it."""
    until = time.monotonic() + BOOT_SECONDS_MAX
    while not (found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        assert time.monotonic() < until, "nothing was started"
        time.sleep(LOOK_SECONDS)
    return int(found[0])


def _await_boot(machine: Machine, log: Path) -> None:
    until = time.monotonic() + BOOT_SECONDS_MAX
    while True:
        done = machine.run("systemctl", "is-system-running")
        if done.stdout.strip() in ("running", "degraded"):
            return
        assert time.monotonic() < until, f"{done.stdout}{done.stderr}\n{log.read_text()[-3000:]}"
        time.sleep(LOOK_SECONDS)
