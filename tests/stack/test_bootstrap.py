"""The environment is made by the bare Python, once, and what goes wrong is said in a sentence."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from console.environment import PROJECT
from console.stack import bootstrap


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of a fresh clone as the bootstrap wants."""
    (tmp_path / "console" / "stack").mkdir(parents=True)
    shutil.copy(PROJECT / "console" / "stack" / "bootstrap.py", tmp_path / "console" / "stack")
    shutil.copytree(PROJECT / "requirements", tmp_path / "requirements")
    return tmp_path


def run(checkout: Path, what: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With a Python that has nothing but itself, and no network."""
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    return subprocess.run(
        [python, "-I", "-S", "console/stack/bootstrap.py", what],
        cwd=checkout,
        env={"PATH": os.environ["PATH"], "HOME": str(checkout), **offline, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def installed(checkout: Path) -> None:
    """What an installation leaves, without one."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    for kind in ("run", "dev"):
        lock = checkout / "requirements" / f"{kind}.txt"
        stamp = f"{bootstrap._digest(lock)} {sys.version}"
        (checkout / ".venv" / f".{kind}-installed").write_text(stamp)
    requirements = checkout / "requirements"
    for kind, more in {
        "models": "",
        "engines": "".join(
            f" {bootstrap._digest(requirements / f'engines.{which}.txt')}"
            for which in ("alone", "other")
        ),
    }.items():
        home = checkout / ".tidegate" / kind
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").symlink_to(sys.executable)
        digest = bootstrap._digest(requirements / f"{kind}.txt")
        stamp = f"{digest} {sys.version} {bootstrap.TORCH}{more}"
        (home / f".{kind}-installed").write_text(stamp)
    for kind in ("fuzz", "audit", "routers"):
        home = checkout / ".tidegate" / kind
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").symlink_to(sys.executable)
        stamp = f"{bootstrap._digest(requirements / f'{kind}.txt')} {sys.version}"
        (home / f".{kind}-installed").write_text(stamp)


def test_a_package_whose_files_another_one_brings_too_has_its_own() -> None:
    found = metadata.distribution(bootstrap.OVERWRITTEN).files or []
    hashed = [(one, one.hash.value) for one in found if one.suffix == ".py" and one.hash]
    for one, digest in hashed:
        raw = hashlib.sha256(one.locate().read_bytes()).digest()  # type: ignore[attr-defined]
        assert base64.urlsafe_b64encode(raw).rstrip(b"=").decode() == digest, one
    assert hashed


@pytest.mark.slow
def test_without_a_network_it_is_said_in_a_sentence(checkout: Path) -> None:
    done = run(checkout, "run")
    assert done.returncode == os.EX_UNAVAILABLE
    assert "uv could not be installed. Is the package index reachable from here?" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_installed_is_left_alone(checkout: Path) -> None:
    installed(checkout)
    for kind in ("run", "dev", "models", "engines", "fuzz", "audit", "routers"):
        done = run(checkout, kind)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_another_lock_or_a_python_that_is_gone_is_noticed(checkout: Path) -> None:
    installed(checkout)
    with (checkout / "requirements" / "run.txt").open("a") as lock:
        lock.write("# newer\n")
    assert run(checkout, "run").returncode == os.EX_UNAVAILABLE
    assert run(checkout, "dev").returncode == 0
    (checkout / ".venv" / "bin" / "python").unlink()
    assert run(checkout, "dev").returncode == os.EX_UNAVAILABLE


def test_a_read_only_checkout_is_said_in_a_sentence(checkout: Path) -> None:
    (checkout / ".tidegate").touch()
    done = run(checkout, "run")
    assert done.returncode == os.EX_OSERR
    assert "Can't create the environment: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_two_at_once_wait_for_each_other(checkout: Path) -> None:
    (checkout / ".tidegate").mkdir()
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    with (checkout / ".tidegate" / "bootstrap.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(
            [python, "-I", "-S", "console/stack/bootstrap.py", "run"],
            cwd=checkout,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert second.stdout
        assert second.stdout.readline() == "Waiting for another `make` that is installing …\n"
        installed(checkout)
    assert second.wait(30) == 0, "the other one has done it meanwhile"
    second.stdout.close()
