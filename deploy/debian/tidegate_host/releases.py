"""Releases side by side: each is an environment of its own, and a link says which one is used.

A process is started through the link and then runs in the directory behind it: the first line of each
command names its own Python. So one that still runs while the link changes keeps what it has loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidegate_host.machine import Failed, Machine

ROOT: Final = Path("/opt/tidegate")
RELEASES: Final = ROOT / "releases"
CURRENT: Final = ROOT / "current"
PREVIOUS: Final = ROOT / "previous"
WHOLE: Final = ".whole"  # the last file that is written into one
WHEEL_NAME: Final = re.compile(r"tidegate-([^-]+)-[^-]+-[^-]+-[^-]+\.whl")


@dataclass(frozen=True)
class Source:
    """What a release is installed from."""

    wheel: Path
    lock: Path  # versions and hashes of all packages
    extras: tuple[str, ...]
    wheelhouse: Path | None = None  # a directory with wheels of packages, instead of an index

    @property
    def name(self) -> str:
        """By its contents: the same name is the same release. Up to the last dash it is the same for the
        same software with packages of other roles."""
        match = WHEEL_NAME.fullmatch(self.wheel.name)
        if not match:
            raise Failed(f"{self.wheel.name} is no wheel of Tidegate.")
        made_of = hashlib.sha256(self.wheel.read_bytes())
        made_of.update(self.lock.read_bytes())
        extras = hashlib.sha256(",".join(self.extras).encode())
        return f"{match[1]}-{made_of.hexdigest()[:10]}-{extras.hexdigest()[:6]}"


def software(release: Path) -> str:
    """Which wheel and lock it is of, whatever the roles."""
    return release.name.rpartition("-")[0]


def kept(release: Path, extras: tuple[str, ...], wheelhouse: Path | None) -> Source:
    """What it was installed from, for these roles."""
    [wheel] = (release / "source").glob("*.whl")
    return Source(wheel, release / "source" / "run.txt", extras, wheelhouse)


def current() -> Path | None:
    return _behind(CURRENT)


def previous() -> Path | None:
    return _behind(PREVIOUS)


def install(machine: Machine, source: Source) -> Path:
    """The directory of this release, made if it is not whole."""
    release = RELEASES / source.name
    if (release / WHOLE).is_file():
        return release
    machine.tell(f"install release {source.name} with {', '.join(source.extras)}")
    if machine.dry_run:
        return release
    shutil.rmtree(release, ignore_errors=True)
    RELEASES.mkdir(parents=True, exist_ok=True)
    machine.run("python3", "-m", "venv", str(release))
    python = str(release / "bin" / "python")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    where = ("--no-index", "--find-links", str(source.wheelhouse)) if source.wheelhouse else ()
    wanted = f"tidegate[{','.join(source.extras)}] @ {source.wheel.resolve().as_uri()}"
    with tempfile.TemporaryDirectory(prefix="tidegate-host-") as folder:
        # pip takes hashes for all or for nothing, and a wheel that was built here has none. So it says
        # which packages belong to these extras, and then installs those by the hashes of the lock.
        report, versions, hashes = (Path(folder) / name for name in ("report", "versions", "hashes"))
        blocks = locked(source.lock.read_text())
        first_lines = [one.partition("\n")[0].rstrip(" \\") for of in blocks.values() for one in of]
        versions.write_text("\n".join(first_lines))
        machine.run(
            *(*pip, *where, "--dry-run", "--ignore-installed", "--report", str(report)),
            *("--constraint", str(versions), wanted),
        )
        names = {
            _normal(one["metadata"]["name"]) for one in json.loads(report.read_text())["install"]
        } - {"tidegate"}
        if unknown := sorted(names - set(blocks)):
            raise Failed(f"{source.lock} has no hashes of {', '.join(unknown)}.")
        hashes.write_text("".join(one for name in sorted(names) for one in blocks[name]))
        machine.run(*pip, *where, "--no-deps", "--require-hashes", "--requirement", str(hashes))
        machine.run(*pip, "--no-index", "--no-deps", wanted)
    (release / WHOLE).touch()
    return release


def switch(machine: Machine, release: Path) -> bool:
    """Use it from now on; what was used becomes the previous one, if it is other software and not this
    one for other roles. Returns whether it was another."""
    before = current()
    if before == release:
        return False
    if before is not None and software(before) != software(release):
        machine.link(PREVIOUS, before)
    return machine.link(CURRENT, release)


def prune(machine: Machine, kept: Collection[Path | None]) -> None:
    """Remove all releases but these."""
    for release in sorted(RELEASES.glob("*")):
        if release not in kept:
            machine.absent(release)


def _behind(link: Path) -> Path | None:
    return link.readlink() if link.is_symlink() and link.exists() else None


def locked(lock: str) -> dict[str, list[str]]:
    """By name of a package its lines: several times where versions of Python get different ones, of
    which pip takes the one for its own."""
    found: dict[str, list[str]] = {}
    for block in re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)[1:]:
        lines = [line for line in block.splitlines() if not line.strip().startswith("#")]
        name = _normal(re.split(r"[=\[ ;]", lines[0])[0])
        found.setdefault(name, []).append("\n".join(lines) + "\n")
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
