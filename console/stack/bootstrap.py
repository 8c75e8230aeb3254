"""Make the environment that everything runs in, with nothing but Python 3.11 and its standard library.

`run` installs what the product needs, `dev` what its tests and checks need as well, `models` what the
tests of real models need, beside it, `engines` likewise for those of real engines, `fuzz` what looks for
inputs that break a decoder, `audit` what looks for known vulnerabilities, `routers` the routers that
ours is compared with, `machine` what the tests want of Debian: a Chromium and tools for networks. Each
says how long it took, and does nothing the second time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent.parent
STATE = PROJECT / ".tidegate"
ENVIRONMENT = PROJECT / ".venv"
# Of those that want torch, which is large, and nobody else does.
APART = {"models": STATE / "models", "engines": STATE / "engines"}
# All that have an environment of their own.
BESIDE = {
    **APART,
    "audit": STATE / "audit",
    "fuzz": STATE / "fuzz",
    "routers": STATE / "routers",
}
LOCKS = PROJECT / "requirements"
UV_LOCK = LOCKS / "uv.txt"
ALONE = LOCKS / "engines.alone.txt"  # engines that ask for far more than what we use of them needs
OTHER = LOCKS / "engines.other.txt"  # and one that is built for another Python
OTHER_PYTHON = "3.12"
# xds-protos brings older copies of the messages of OpenTelemetry.
OVERWRITTEN, OVERWRITING = "opentelemetry-proto", "xds-protos"
# Not in the lock: each platform, and each kind of accelerator, has a build of its own of one version.
# Which one is installed is up to how pip is set up here.
TORCH = "torch==2.13.0"
PYTHON_MIN = (3, 11)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAST_LINES = 12
UNREACHABLE = "Is the package index reachable from here?"


class Failed(Exception):
    """What went wrong and what to do, in a sentence."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = ["run", "dev", "models", "engines", "fuzz", "audit", "routers", "machine"]
    parser.add_argument("what", choices=kinds)
    what = parser.parse_args().what
    try:
        machine() if what == "machine" else environment(what)
    except Failed as error:
        print(error, file=sys.stderr)
        return os.EX_UNAVAILABLE
    except OSError as error:
        print(f"Can't create the environment: {error.strerror}: {error.filename}", file=sys.stderr)
        return os.EX_OSERR
    except KeyboardInterrupt:
        return 130
    return 0


def environment(kind: str) -> None:
    """An environment as the lock says. Only `dev` removes what is not in it."""
    if sys.version_info < PYTHON_MIN:
        raise Failed(
            f"Tidegate needs Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer; this is "
            f"{sys.version.split()[0]}. Say which: make PYTHON=/path/to/python3.11 …"
        )
    if _is_installed(kind):
        return
    with _alone():
        if not _is_installed(kind):  # somebody else may have done it while we waited
            _install(kind)


def _is_installed(kind: str) -> bool:
    stamp = _stamp(kind)
    return _python(kind).exists() and stamp.is_file() and stamp.read_text() == _wanted(kind)


def _install(kind: str) -> None:
    uv, python = _uv(), _python(kind)
    if not python.exists():
        venv = [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable]
        _stage("environment", [*venv, str(_home(kind))])
    for stamp in _home(kind).glob(".*-installed"):  # what was installed before is no longer exactly that
        stamp.unlink()
    verb = ["sync"] if kind == "dev" else ["install", "--requirements"]
    # Compiled now and by all cores, not one import after the other at the first start, or at every
    # start where PYTHONDONTWRITEBYTECODE is set.
    how = ["--require-hashes", "--compile-bytecode", "--quiet", "--python", str(python)]
    if kind == "engines":  # the lock is complete; engines ask for one build of torch by its name
        how += ["--no-deps", "--requirements", str(ALONE)]
    command = [uv, "pip", *verb, str(LOCKS / f"{kind}.txt"), *how]
    complaint = f"The packages could not be installed. {UNREACHABLE}"
    try:
        _stage(f"packages ({kind})", command, complaint)
    except Failed as error:
        if "certificate" not in str(error):
            raise
        # uv brings its own list of authorities, and some networks have one of their own.
        name = f"packages ({kind}), trusting whom this machine trusts"
        command += ["--system-certs"]
        _stage(name, command, complaint)
    if _overwrites(kind):
        # uv installs packages beside each other: which of the two a file is of was a matter of chance.
        again = [*command, "--reinstall-package", OVERWRITTEN]
        _stage(f"packages ({kind}), once more", again, complaint)
    if kind == "engines":
        where = ["--target", str(_home(kind) / "other"), "--python-version", OTHER_PYTHON]
        what = ["--require-hashes", "--no-deps", "--quiet", "--requirements", str(OTHER)]
        _stage(f"packages for Python {OTHER_PYTHON}", [uv, "pip", "install", *where, *what], complaint)
    if kind in APART:
        quiet = ["--quiet", "--disable-pip-version-check"]
        complaint = f"torch could not be installed. {UNREACHABLE}"
        _stage(TORCH, [*_pip(), "--python", str(python), "install", *quiet, TORCH], complaint)
    _stamp(kind).write_text(_wanted(kind))
    if kind == "dev":  # which contains all of run
        _stamp("run").write_text(_wanted("run"))


def _home(kind: str) -> Path:
    return BESIDE.get(kind, ENVIRONMENT)


def _python(kind: str) -> Path:
    return _home(kind) / "bin" / "python"


def _stamp(kind: str) -> Path:
    return _home(kind) / f".{kind}-installed"


def _overwrites(kind: str) -> bool:
    """Whether a package of this lock has older copies of another one's files."""
    lock = (LOCKS / f"{kind}.txt").read_text()
    return all(f"\n{name}==" in lock for name in (OVERWRITTEN, OVERWRITING))


def _wanted(kind: str) -> str:
    """What a stamp says: the lock that was installed, and for which Python."""
    more = f" {TORCH}" if kind in APART else ""
    alone = f" {_digest(ALONE)} {_digest(OTHER)}" if kind == "engines" else ""
    return f"{_digest(LOCKS / f'{kind}.txt')} {sys.version}{more}{alone}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _uv() -> str:
    """The uv that its lock names, outside the environment, so that syncing does not remove it."""
    home = STATE / "uv"
    uv, stamp = home / "bin" / "uv", home / ".installed"
    wanted = _digest(UV_LOCK)
    if not (uv.exists() and stamp.is_file() and stamp.read_text() == wanted):
        quiet = ["--quiet", "--disable-pip-version-check", "--no-warn-script-location"]
        what = ["--require-hashes", "--upgrade", "--target", str(home), "--requirement", str(UV_LOCK)]
        _stage("uv", [*_pip(), "install", *quiet, *what], f"uv could not be installed. {UNREACHABLE}")
        stamp.write_text(wanted)
    return str(uv)


def _pip() -> list[str]:
    """A pip, from wherever this Python has one; Debian splits it off, and root can add it."""
    ours = [sys.executable, "-m", "pip"]
    if _works([*ours, "--version"]):
        return ours
    scratch = STATE / "pip"
    fresh = [sys.executable, "-m", "venv", "--clear", str(scratch)]
    theirs = [str(scratch / "bin" / "python"), "-m", "pip"]
    if _works(fresh):
        return theirs
    if _can_apt():
        _apt("python3-venv")
        if _works(fresh):
            return theirs
    raise Failed(
        f"{sys.executable} has neither pip nor venv, and something has to install the packages. "
        "On Debian and Ubuntu: apt install python3-venv"
    )


def machine() -> None:
    """A Chromium for the tests of the pages, and for root what makes networks: others can't, anyway."""
    has_browser = any(shutil.which(name) for name in BROWSERS)
    if not has_browser and not _can_apt():
        raise Failed(
            "The tests of the pages need a Chromium, and there is none. Install it (on Debian: "
            "apt install chromium), or leave them out with `make check`."
        )
    missing = [] if has_browser else ["chromium"]
    if _can_apt() and shutil.which("tc") is None:
        missing.append("iproute2")
    if missing:
        with _alone():
            _apt(*missing)


def _can_apt() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _apt(*packages: str) -> None:
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages]
    names = " and ".join(packages)
    complaint = f"{names} could not be installed. Are the package mirrors reachable from here?"
    _stage("package lists", ["apt-get", "update", "-qq"], complaint, quiet)
    _stage(names, install, complaint, quiet)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One installation at a time in one checkout; whoever comes second waits and says so."""
    STATE.mkdir(exist_ok=True)
    with (STATE / "bootstrap.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another `make` that is installing …", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _works(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _stage(
    name: str, command: list[str], complaint: str = "", variables: Mapping[str, str] | None = None
) -> None:
    """Run one command and say how long it took; Failed with its last words if it does."""
    print(f"{name} … ", end="", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        env=variables,
    )
    print(f"{time.monotonic() - began:.1f} s", flush=True)
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-LAST_LINES:])
        raise Failed(f"{last}\n\n{complaint or f'“{name}” failed.'}")


if __name__ == "__main__":
    sys.exit(main())
