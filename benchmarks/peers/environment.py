"""Where a peer lives: an environment under `.tidegate/bench/`, and servers the system does not have.

Nothing is installed into the system or into our own environment. What Debian packages and the system
lacks is downloaded and unpacked beside the peer, never installed.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent.parent
HOME = PROJECT / ".tidegate" / "bench"
REQUIREMENTS = Path(__file__).parent
LAST_WORDS = 300
INSTALL_SECONDS_MAX = 1800


class Unavailable(Exception):
    """Why a peer can't be measured here, in a sentence."""


@dataclass(frozen=True)
class Needs:
    """What a peer wants besides its Python packages."""

    server: str = ""  # a program on the PATH
    library: str = ""  # a shared library, as the linker calls it
    package: str = ""  # what contains either on Debian


NEEDS = {
    "mooncake": Needs(library="ibverbs", package="libibverbs1"),
    "lmcache_mp": Needs(),
    "redis": Needs(),
    "memcached": Needs(server="memcached", package="memcached"),
}


@dataclass(frozen=True)
class Environment:
    """A peer, ready to be started."""

    name: str
    python: Path
    variables: dict[str, str]

    @property
    def home(self) -> Path:
        return HOME / self.name

    @property
    def packages(self) -> Path:
        """Where its Python packages are."""
        [found] = self.python.parent.parent.glob("lib/python*/site-packages")
        return found


def prepare(name: str) -> Environment:
    """Install the peer unless it is; Unavailable if that can't be."""
    home = HOME / name
    python = _packages(name, home / "venv")
    needs, variables = NEEDS.get(name, Needs()), {}
    if name == "redis":
        variables["PEER_SERVER"] = _redis()
    if needs.server:
        server = shutil.which(needs.server)
        unpacked = home / "debian" / "usr" / "bin" / needs.server
        if not server and not unpacked.exists():
            _unpack(needs.package, home)
        variables["PEER_SERVER"] = server or str(unpacked)
    missing = needs.library and not ctypes.util.find_library(needs.library)
    if missing and not (home / "debian").exists():
        _unpack(needs.package, home)
    if folders := {str(path.parent) for path in (home / "debian").glob("**/*.so*")}:
        variables["LD_LIBRARY_PATH"] = ":".join(sorted(folders))
    return Environment(name, python, variables)


def _packages(name: str, venv: Path) -> Path:
    """The interpreter of an environment with the pinned packages."""
    requirements, alone = REQUIREMENTS / f"{name}.txt", REQUIREMENTS / f"{name}.alone.txt"
    wanted = "\n".join(
        [one.read_text() for one in (requirements, alone) if one.exists()] + [sys.version]
    )
    python, stamp = venv / "bin" / "python", venv / ".installed"
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"installing {name} …", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", "--clear", venv], "no environment can be made")
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"]
        _run([python, *install, requirements], "its packages can't be installed")
        if alone.exists():  # which asks for far more than what is measured of it needs
            _run([python, *install, alone, "--no-deps"], "it can't be installed")
        stamp.write_text(wanted)
    return python


def _redis() -> str:
    """The server in our wheel: for large values it was twice as fast as Debian's 7.0."""
    from console.stack.binaries import system_redis, wheel_redis

    for finder in (wheel_redis, system_redis):
        for server in finder():
            return str(server.path)
    raise Unavailable("there is neither a redis-server nor a wheel with one")


def _unpack(package: str, home: Path) -> None:
    """Download a Debian package and what it needs, and unpack them without installing."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb") and os.geteuid() == 0):
        raise Unavailable(f"{package} is not installed (apt install {package})")
    print(f"unpacking {package} …", file=sys.stderr, flush=True)
    archives, target = home / "archives", home / "debian"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    complaint = f"Debian's {package} can't be downloaded"
    download = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "--download-only"]
    command = [*download, "-o", f"Dir::Cache::archives={archives}", package]
    try:
        _run(command, complaint)
    except Unavailable:
        _run(["apt-get", "update", "-qq"], complaint)
        _run(command, complaint)
    scratch = home / "unpacking"
    shutil.rmtree(scratch, ignore_errors=True)
    for archive in sorted(archives.glob("*.deb")):
        _run(["dpkg-deb", "-x", archive, scratch], f"{archive.name} can't be unpacked")
    if not scratch.exists():
        raise Unavailable(f"{complaint}: nothing came")
    scratch.rename(target)


def _run(command: Sequence[str | Path], complaint: str) -> None:
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=INSTALL_SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{complaint}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{complaint}: {' '.join(done.stdout[-LAST_WORDS:].split())}")
