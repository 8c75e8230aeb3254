"""Make the environment that everything runs in, with nothing but Python 3.11 and its standard library.

`run` installs what the product needs, `dev` what its tests and checks need as well, `browser` Debian's
Chromium where there is none. Each says how long it took and does nothing the second time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = PROJECT / ".venv"
LOCKS = PROJECT / "requirements"
UV_LOCK = LOCKS / "uv.txt"
PYTHON_MIN = (3, 11)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Failed(Exception):
    """What went wrong and what to do, in a sentence."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "dev", "browser"])
    what = parser.parse_args().what
    try:
        if sys.version_info < PYTHON_MIN:
            raise Failed(
                f"Tidegate needs Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer; "
                f"this is {sys.version.split()[0]}. Say which: make PYTHON=/path/to/python3.11 …"
            )
        if what == "browser":
            browser()
        else:
            environment(what)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"Can't make the environment: {error.strerror}: {error.filename}", file=sys.stderr)
        return 1
    return 0


def environment(kind: str) -> None:
    """`.venv` as the lock says. `run` adds what is missing; only `dev` also removes what is not in it."""
    lock = LOCKS / f"{kind}.txt"
    stamp = ENVIRONMENT / f".{kind}-installed"
    wanted = f"{hashlib.sha256(lock.read_bytes()).hexdigest()} {sys.version}"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    uv = _uv()
    if not (ENVIRONMENT / "bin" / "python").exists():
        _stage(
            "environment",
            [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(ENVIRONMENT)],
        )
    verb = ["sync"] if kind == "dev" else ["install", "-r"]
    python = str(ENVIRONMENT / "bin" / "python")
    _stage(
        f"packages ({kind})",
        [uv, "pip", *verb, str(lock), "--require-hashes", "--quiet", "--python", python],
        "The packages could not be installed. Is the package index reachable from here?",
    )
    for other in ENVIRONMENT.glob(".*-installed"):
        other.unlink()  # what was installed before is no longer exactly that
    stamp.write_text(wanted)
    if kind == "dev":
        run_lock = LOCKS / "run.txt"  # a part of dev
        run_stamp = f"{hashlib.sha256(run_lock.read_bytes()).hexdigest()} {sys.version}"
        (ENVIRONMENT / ".run-installed").write_text(run_stamp)


def _uv() -> str:
    """The uv that the lock names, beside the environment, so that syncing does not remove it."""
    home = PROJECT / ".tidegate" / "uv"
    uv = home / "bin" / "uv"
    stamp = home / ".installed"
    wanted = hashlib.sha256(UV_LOCK.read_bytes()).hexdigest()
    if uv.exists() and stamp.is_file() and stamp.read_text() == wanted:
        return str(uv)
    pip = _pip()
    _stage(
        "uv",
        [
            *pip,
            *("install", "--quiet", "--disable-pip-version-check", "--no-warn-script-location"),
            *("--require-hashes", "--upgrade", "--target", str(home), "-r", str(UV_LOCK)),
        ],
        "uv could not be installed. Is the package index reachable from here?",
    )
    stamp.write_text(wanted)
    return str(uv)


def _pip() -> list[str]:
    """A pip, from wherever this Python has one; Debian splits it off, and root can add it."""
    ours = [sys.executable, "-m", "pip"]
    if _works([*ours, "--version"]):
        return ours
    scratch = PROJECT / ".tidegate" / "pip"
    if _works([sys.executable, "-m", "venv", "--clear", str(scratch)]):
        return [str(scratch / "bin" / "python"), "-m", "pip"]
    if os.geteuid() == 0 and shutil.which("apt-get"):
        _apt("python3-venv", "python3-pip")
        if _works([*ours, "--version"]):
            return ours
    raise Failed(
        f"{sys.executable} has neither pip nor venv. On Debian and Ubuntu: apt install python3-venv"
    )


def browser() -> None:
    """A Chromium for the tests of the pages."""
    if any(shutil.which(name) for name in BROWSERS):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Failed(
            "The tests of the pages need a Chromium, and there is none. Install it (on Debian: "
            "apt install chromium), or leave them out with `make check`."
        )
    _apt("chromium")


def _apt(*packages: str) -> None:
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages]
    _stage("package lists", ["apt-get", "update", "-qq"], "apt-get update failed.", quiet)
    _stage(", ".join(packages), install, f"{packages[0]} could not be installed.", quiet)


def _works(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _stage(
    name: str, command: list[str], complaint: str = "", environment: dict[str, str] | None = None
) -> None:
    began = time.monotonic()
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-12:])
        raise Failed(f"{last}\n\n{complaint or f'“{name}” failed.'}")
    print(f"{name}: {time.monotonic() - began:.2f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
