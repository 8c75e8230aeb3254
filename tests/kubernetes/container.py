"""One run of a container: a process in namespaces of its own for mounts and processes, in the network of
its pod. Its image is this machine: it sees its files, and its volumes beside them. Where a folder of
this machine keeps others out of what the tests run (the home of root, say) it sees that part alone, and
whoever it runs as may enter."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes.users import User

PROC, RUN = Path("/proc"), Path("/run")
MAY_ENTER = 0o001


@dataclass(frozen=True)
class Mount:
    source: Path
    path: str
    is_read_only: bool = False

    @property
    def real_path(self) -> Path:
        """/run, of /var/run."""
        return Path(self.path).resolve()


# Its root is a tmpfs into which all top-level folders of the machine are mounted: so volumes can be
# mounted where the machine has no folder, and nothing is made on the machine. /run is its own.
# One `mount` makes all that: a process for each would take longer than what most containers do.
ROOT = """
set -e
mount --make-rprivate /
mount --all --fstab {table}
{links}
"""
RUN_IN = """
cd {root}
exec chroot {root} /usr/bin/env -i -C {folder} {command}
"""
NEVER_SEALED = (Path("/dev"), Path("/sys"))
LINE = "{source} {at} {kind} {options},X-mount.mkdir 0 0\n"  # of fstab


class Container:
    def __init__(self, process: asyncio.subprocess.Process, user: User) -> None:
        self._process = process
        self._user = user
        self.pid = 0  # of its process 1, as this machine counts
        self._is_killed = False

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        mounts: Sequence[Mount],
        root: Path,
        network: str,
        log: Path,
        folder: Path,
        hosts: Path,
        user: User,
        *,
        is_read_only: bool = False,
    ) -> Container:
        """`network`: the path of a namespace. `root`: an empty folder. `folder`: where it begins.
        `hosts`: its /etc/hosts.
        `is_read_only`: all but its volumes, /dev, /proc and /sys."""
        _check(root, mounts)
        making = _how_to_make(root, folder, is_read_only=is_read_only)
        volumes = "\n".join(_mount(root, one) for one in (Mount(hosts, "/etc/hosts", True), *mounts))
        seal_root = f"mount -o remount,ro {root}" if is_read_only else ""
        whole = [*(f"{name}={value}" for name, value in environment.items()), *user.command(), *command]
        run = RUN_IN.format(root=root, folder=folder, command=shlex.join(whole))
        text = f"{making}{volumes}\n{seal_root}\n{run}"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={network}"),
                *("unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "sh", "-c", text),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        made = cls(process, user)
        await made._find()
        return made

    async def _find(self) -> None:
        while not self.pid and self._process.returncode is None:
            self.pid = _child(self._process.pid)
            await asyncio.sleep(0.005)

    async def wait(self) -> int:
        """Its exit status, of a signal 128 and its number."""
        returned = await self._process.wait()
        if self._is_killed and returned == 1:
            returned = -signal.SIGKILL  # which `unshare` cannot pass on
        return 128 - returned if returned < 0 else returned

    async def succeeds(self, command: Sequence[str]) -> bool:
        """Whether a command in it does, such as that of a probe."""
        made = await asyncio.create_subprocess_exec(
            *("nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--root", "--wd"),
            *("--", *self._user.command(), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            return await made.wait() == 0
        finally:
            if made.returncode is None:  # it has taken too long
                made.kill()
                await made.wait()

    def signal(self, number: signal.Signals) -> None:
        self._is_killed = self._is_killed or number == signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.kill(self.pid or self._process.pid, number)

    async def stop(self, grace_seconds: float) -> int:
        """As a kubelet does it: SIGTERM, and SIGKILL once the grace period is over."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                return await self.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self.wait()


def _check(root: Path, mounts: Sequence[Mount]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for one in mounts:
        top = Path(*one.real_path.parts[:2])
        if top.exists() and top != RUN:
            raise ValueError(f"{one.path}: {top} is a folder of this machine, and is left as it is")


def _child(pid: int) -> int:
    """0: it has none yet."""
    try:
        return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or ["0"])[0])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _top() -> list[Path]:
    return sorted(Path("/").iterdir())


def _how_to_make(root: Path, folder: Path, *, is_read_only: bool) -> str:
    table = Path(f"{root}.fstab")
    table.write_text("".join(_table(root, folder, is_read_only=is_read_only)))
    links = "\n".join(f"cp --no-dereference {one} {root}" for one in _top() if one.is_symlink())
    return ROOT.format(root=root, table=table, links=links)


def _table(root: Path, folder: Path, *, is_read_only: bool) -> Iterator[str]:
    """What is mounted at first, as fstab has it."""
    sealed = ",ro" if is_read_only else ""
    yield LINE.format(source="root", at=root, kind="tmpfs", options="rw")
    for one in _top():
        at = f"{root}{one}"
        if one == PROC:
            yield LINE.format(source="proc", at=at, kind="proc", options="rw")
        elif one == RUN:
            yield LINE.format(source="run", at=at, kind="tmpfs", options="rw")
        elif one.is_dir() and not one.is_symlink():
            options = "rbind" if one in NEVER_SEALED else f"rbind{sealed}"
            yield LINE.format(source=one, at=at, kind="none", options=options)
    for above, parts in _closed(folder).items():
        yield LINE.format(source="opened", at=f"{root}{above}", kind="tmpfs", options="mode=755")
        for needed in sorted(parts):
            yield LINE.format(source=needed, at=f"{root}{needed}", kind="none", options=f"rbind{sealed}")
        if is_read_only:
            at = f"{root}{above}"
            yield LINE.format(source="opened", at=at, kind="none", options="remount,ro")


def _closed(folder: Path) -> dict[Path, set[Path]]:
    """Folders that only their owner enters, and what we need of each. There it has nothing else."""
    closed: dict[Path, set[Path]] = {}
    interpreter = Path(sys.executable).resolve().parents[1]
    for needed in {interpreter, Path(sys.base_prefix), Path(sys.prefix), folder}:
        for above in reversed(needed.parents):
            if not above.stat().st_mode & MAY_ENTER:
                closed.setdefault(above, set()).add(needed)
                break
    return closed


def _mount(root: Path, one: Mount) -> str:
    at = f"{root}{one.real_path}"
    make = (
        f"mkdir -p {at}"
        if one.source.is_dir()
        else f"mkdir -p {Path(at).parent}; [ -e {at} ] || touch {at}"
    )
    return f"{make}; mount -o {'bind,ro' if one.is_read_only else 'bind'} {one.source} {at}"
