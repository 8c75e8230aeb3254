"""Building the wheel of this checkout, and environments in which nothing but that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from console.environment import PROJECT
from console.stack.bootstrap import STATE

UV = STATE / "uv" / "bin" / "uv"  # which has made the environment that this runs in
LOCK = PROJECT / "requirements" / "run.txt"
INSTALL_SECONDS_MAX = 110


def build(directory: Path, **variables: str) -> Path:
    """The wheel, as `make wheel` builds it."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    command += ["--directory", str(directory)]
    subprocess.run(command, cwd=PROJECT, env={**os.environ, **variables}, check=True)
    [wheel] = directory.glob("*.whl")
    return wheel


def install(wheel: Path, extras: str, *where: str | Path) -> None:
    """Install the wheel with the packages of the lock, from uv's cache if all of them are there."""
    named = f"tidegate[{extras}] @ {wheel.as_uri()}" if extras else f"tidegate @ {wheel.as_uri()}"
    command = [UV, "pip", "install", "--quiet", "--constraints", LOCK, *where, named]
    offline = subprocess.run([*command, "--offline"], capture_output=True, check=False)
    if offline.returncode:
        subprocess.run(command, check=True, timeout=INSTALL_SECONDS_MAX)


class Installed:
    """An environment with the wheel and one of its extras."""

    def __init__(self, directory: Path, wheel: Path, extra: str) -> None:
        self.directory = directory
        subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, directory], check=True)
        install(wheel, extra, "--python", self.program("python"))

    def program(self, name: str) -> Path:
        return self.directory / "bin" / name

    def run(self, name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of it, in another directory and with nothing of this process' environment."""
        return run([str(self.program(name)), *arguments], self.directory, **variables)

    def evaluate(self, code: str, **variables: str) -> str:
        """What a few lines of Python print there. Fails with what they say."""
        done = self.run("python", "-P", "-c", code, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def run(command: Sequence[str], directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), **variables}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
