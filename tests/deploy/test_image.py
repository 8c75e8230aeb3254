"""The steps of deploy/Containerfile, in root file systems: some ten minutes (`make test-image`)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from console.environment import PROJECT
from tests.deploy.containerfile import Builder, Stage, git_files, listing

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]
CONTAINERFILE = PROJECT / "deploy" / "Containerfile"
SUITE = "bookworm"  # whose Python is 3.11
PACKAGES = "python3-venv,python3-dev,gcc,libc6-dev,ca-certificates"
COMMANDS = {
    "kvss-agent": "Keep KV columns in memory",
    "inference-brain": "",
    "cluster-server": "Run the instances and jobs",
    "workload-manager": "",
    "swdriver": "",
    "tidegate": "",
}
# Where packages come from is a matter of the machine.
OF_THE_MACHINE = re.compile(r"(?i)(pip_|uv_|ssl_cert|requests_ca|[a-z]+_proxy$)")


def why_not() -> str:
    if os.geteuid() != 0:
        return "only root may make a root file system"
    missing = [name for name in ("debootstrap", "setpriv", "unshare") if shutil.which(name) is None]
    return f"{', '.join(missing)} is missing: apt install debootstrap" if missing else ""


def of_the_machine() -> dict[str, str]:
    """Settings of pip, as variables: its files are not in the root file system."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    found = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2].replace("-", "_").upper()
        found[f"PIP_{name}"] = value.strip("'")
    return found | {name: value for name, value in os.environ.items() if OF_THE_MACHINE.match(name)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian with Python and a compiler: for both stages."""
    if reason := why_not():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("debian") / "root"
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "Retrieving" not in done.stdout:
        pytest.skip(f"there is no mirror of Debian: {done.stdout[-300:]}")
    assert done.returncode == 0, done.stdout[-2000:]
    for name in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
        shutil.copy(Path("/", name), root / name)
    return root


@pytest.fixture(scope="module")
def image(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return build(base, tmp_path_factory.mktemp("image"))


def build(base: Path, folder: Path) -> Stage:
    bases = {"BUILD": base, "BASE": base}
    return Builder(PROJECT, bases, folder, of_the_machine(), git_files(PROJECT)).build(CONTAINERFILE)


def test_every_command_runs_as_a_user_without_rights(image: Stage) -> None:
    for command, said in COMMANDS.items():
        done = image.run([command, "--help"], user=image.user)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert said in done.stdout
    assert image.user == "10001:10001"
    assert image.run(list(image.command), user=image.user).returncode == 0


def test_it_has_what_is_made_once(image: Stage) -> None:
    """The compiled mover, compiled Python that is not checked, and static files that fit."""
    done = image.run(["python", "-m", "kvss_agent.native"], user=image.user)
    assert done.stdout.startswith("Compiled mover for "), done.stdout + done.stderr
    library = image.root / "opt" / "tidegate" / "lib"
    some = next(library.rglob("cluster_server/__pycache__/settings.*.pyc")).read_bytes()
    assert int.from_bytes(some[4:8], "little") == 0b01  # PEP 552: a hash that nobody checks
    settings = {
        "DATABASE_URL": "postgresql://none/none",
        "REDIS_URL": "redis://none",
        "TIDEGATE_SECRET_KEY": "k" * 64,
        "TIDEGATE_ALLOWED_HOSTS": "localhost",
        "DJANGO_SETTINGS_MODULE": "console.settings",
    }
    code = (
        "import django; django.setup(); from console.shell import static_files; "
        "print(static_files.collect())"
    )
    done = image.run(["python", "-P", "-c", code], user=image.user, **settings)
    assert done.stdout == "False\n", done.stdout + done.stderr


def test_nobody_owns_it_and_no_compiler_made_its_way_into_it(image: Stage) -> None:
    made = image.root / "opt" / "tidegate"
    for path in made.rglob("*"):
        about = path.lstat()
        assert (about.st_uid, about.st_gid) == (0, 0), path
        assert path.is_symlink() or not about.st_mode & 0o022, path
    assert not list(made.glob("lib/python*/site-packages/hatchling"))


def test_twice_makes_the_same_files(image: Stage, base: Path, tmp_path: Path) -> None:
    again = build(base, tmp_path)
    first, second = (one.root / "opt" / "tidegate" for one in (image, again))
    assert listing(first) == listing(second)
    different = [
        str(path.relative_to(first))
        for path in first.rglob("*")
        if path.is_file()
        and not path.is_symlink()
        and _digest(path) != _digest(second / path.relative_to(first))
    ]
    assert different == []


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
