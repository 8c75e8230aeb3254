"""Compiling the C files of the mover into the state directory. One process builds at a time.

A wheel is built with this file alone (`hatch_build.py`), so it imports nothing but the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent
FLAGS: Final = ("-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-shared")
COMPILE_SECONDS_MAX: Final = 120
BUILDS_MAX: Final = 8  # that are kept: of other sources, compilers and Pythons
_SCRATCH: Final = "build-"
_PACKAGED: Final = ".wheel.so"


class Unavailable(Exception):
    """Why there is no compiled mover, in a sentence."""


def build() -> Path:
    """Compile the mover, unless that has been done. Returns where it is. Raises Unavailable.

    Any number of processes may call this at once: one compiles, the others wait for it. The file
    is moved into place when it is complete. Its name ends with a checksum: one that a power cut has
    left half of would kill each process that loads it.
    """
    compiler, version, includes = _toolchain()
    name = f"{_name_for_python()}-{_digest(f'{compiler} {version}'.encode())[:8]}"
    directory = _directory()
    try:
        if path := _newest(f"{name}-*.so"):
            return path
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _only_builder(directory):
            path = _newest(f"{name}-*.so") or _compile(
                compiler, includes, directory, lambda made: f"{name}-{_digest(made)}.so"
            )
            for old in sorted(directory.glob("*.so"), key=_age_rank)[:-BUILDS_MAX]:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise Unavailable(f"{error.filename}: {error.strerror}") from error
    return path


def build_for_wheel(directory: Path) -> Path:
    """Compile the mover into this directory, as `packaged_build` looks for it. Raises Unavailable."""
    compiler, _, includes = _toolchain()
    return _compile(compiler, includes, directory, lambda _: f"{_name_for_python()}{_PACKAGED}")


def packaged_build() -> Path | None:
    """The build that the installed wheel brought. Raises Unavailable if it does not fit."""
    path = SOURCES / f"{_name_for_python()}{_PACKAGED}"
    if path.exists():
        return path
    if other := next(SOURCES.glob(f"*{_PACKAGED}"), None):
        raise Unavailable(f"{other.name} is of another Python or of other sources")
    return None


def newest_build() -> Path | None:
    """The latest build of these sources that fits this Python, of those that this user has made. Raises
    Unavailable where others may have put something there."""
    return _newest(f"{_name_for_python()}-*.so")


def _newest(pattern: str) -> Path | None:
    """Of the builds that are as they were made. Raises Unavailable."""
    directory = _directory()
    if not _is_ours(directory):
        raise Unavailable(f"{directory} belongs to another user, and what is in it would be executed")
    newest_first = sorted(directory.glob(pattern), key=_age_rank, reverse=True)
    return next(filter(_is_whole, newest_first), None)


def _is_whole(path: Path) -> bool:
    try:
        return _is_ours(path) and path.stem.endswith(f"-{_digest(path.read_bytes())}")
    except OSError:  # another process has just removed it
        return False


def _is_ours(path: Path) -> bool:
    """Whether nobody has made it who could not change this program as well."""
    try:
        return path.stat().st_uid in (0, os.geteuid(), SOURCES.stat().st_uid)
    except (FileNotFoundError, NotADirectoryError):
        return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _toolchain() -> tuple[list[str], str, list[str]]:
    """The compiler, what it says of itself, and where Python's headers are. Raises Unavailable."""
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")
    except ValueError as error:
        raise Unavailable(f"CC is no command: {error}") from error
    version = _run([*compiler, "--version"])
    includes = dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude"))
    if not any((Path(directory) / "Python.h").exists() for directory in includes):
        raise Unavailable(f"the headers of Python {sys.version.split()[0]} are not installed")
    return compiler, version, [f"-I{directory}" for directory in includes]


def _directory() -> Path:
    """Below the state directory; where Tidegate is installed and none is named, in the user's cache.

    Not below the working directory, which may be anyone's: what is in this one is executed.
    """
    state = os.environ.get("TIDEGATE_STATE_DIR")
    project = Path(__file__).resolve().parents[2]
    if (project / "pyproject.toml").is_file():
        return project / (state or ".tidegate") / "native"
    if state:
        return Path(state).absolute() / "native"
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise Unavailable(f"there is no directory to build it in: {error}") from error
    return Path(cache) / "tidegate" / "native"


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.c"))


def _name_for_python() -> str:
    """The beginning of the file names of builds of these sources for this Python."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in [*_sources(), SOURCES / "native.h"]:
        digest.update(path.read_bytes())
    return f"{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:16]}"


def _age_rank(path: Path) -> int:
    """Higher for later builds; lowest for one that another process has just removed."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _only_builder(directory: Path) -> Iterator[None]:
    """Hold the lock of this directory. What a killed builder has left in it is removed."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for abandoned in directory.glob(f"{_SCRATCH}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def _compile(
    compiler: list[str], includes: list[str], directory: Path, name_of: Callable[[bytes], str]
) -> Path:
    """Where it is. `name_of` is told what was made."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=_SCRATCH) as scratch:
        made = Path(scratch) / "made.so"
        _run([*compiler, *FLAGS, *includes, *map(str, _sources()), "-o", str(made)])
        path = directory / name_of(made.read_bytes())
        made.replace(path)
    return path


def _run(command: list[str]) -> str:
    """The compiler's output if it succeeds. It does not outlive this process."""
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            atexit.register(process.kill)
            try:
                output, errors = process.communicate(timeout=COMPILE_SECONDS_MAX)
            finally:
                process.kill()
                atexit.unregister(process.kill)
    except OSError as error:
        raise Unavailable(f"there is no compiler: {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} has not finished in {COMPILE_SECONDS_MAX} s") from error
    if process.returncode:
        lines = errors.strip().splitlines() or ["no message"]
        complaint = next((line for line in lines if "error" in line), lines[0])
        raise Unavailable(f"{command[0]} failed: {complaint}")
    return output
