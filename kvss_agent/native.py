"""The mover in compiled code, where there is a compiler; everything works without it, only slower.

`native.c` is compiled once, into the project's own directory, by whoever asks for it. Importing this
never compiles anything. `python -m kvss_agent.native` builds it and says what it found.

`KVSS_NATIVE` decides who moves bytes: `auto`, the native mover where there is one and it is faster;
`off`, never; `require`, nothing else. `CC` is the compiler, `cc` if it is not set.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import logging
import os
import random
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import threading
from enum import StrEnum
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Final, Protocol, cast

from xxhash import xxh3_64_intdigest

from kvss_agent.mover import PYTHON, Mover
from kvss_agent.shard.seal import Column, Header, Miss

SOURCE: Final = Path(__file__).with_name("native.c")
FLAGS: Final = ("-std=c11", "-O3", "-fPIC", "-shared")
COMPILE_SECONDS_MAX: Final = 120
BUILDS_MAX: Final = 8  # that are kept: of other sources, compilers and Pythons

_MODULE = "kvss_agent._native"
_LENGTHS_TRIED = (0, 240, 241, 1024, 1025, 70_000)
_log = logging.getLogger(__name__)
_telling: Final = threading.Lock()
_told: Final[set[str]] = set()


class Unavailable(Exception):
    """Why there is no native mover, in a sentence."""


class NativeMover(Mover, Protocol):
    """What the compiled module is, apart from a module. Its arguments have no names."""

    __file__: str

    def write_column(
        self, slot: memoryview, column: Column, tokens: int, payload: memoryview, /
    ) -> None:
        """`seal.write`"""

    def verify_column(self, slot: memoryview, column: Column, /) -> Header | Miss:
        """`seal.verify`"""

    def copy_column(self, slot: memoryview, column: Column, into: memoryview, /) -> Header | Miss:
        """`seal.copy_out`"""

    def _bind(self, *answers: object) -> None: ...

    def levels(self) -> tuple[str, ...]:
        """The kinds of code that this machine can run, best first; the first one is used."""


class Choice(StrEnum):
    """What `KVSS_NATIVE` may say."""

    AUTO = "auto"
    OFF = "off"
    REQUIRE = "require"


def best(*, build: bool = False) -> Mover:
    """The fastest mover there is. Raises Unavailable only if `KVSS_NATIVE` is `require`.

    Compiled code without vector instructions is not the fastest: xxhash has them on more machines.
    """
    if choice() is Choice.REQUIRE:
        return require(build=build)
    mover = load(build=build)
    return PYTHON if mover is None or mover.levels()[0] == "portable" else mover


def load(*, build: bool = False) -> NativeMover | None:
    """The native mover, or None; why is logged, each reason once. Compiles only if `build` says so."""
    try:
        return require(build=build)
    except Unavailable as reason:
        _log_once(str(reason))
        return None


def require(*, build: bool = False) -> NativeMover:
    """The native mover, or Unavailable with the reason. Compiles only if `build` says so.

    What was built before is good enough where it cannot be built anew. A mover that would give other
    checksums than everybody else is unavailable too.
    """
    if choice() is Choice.OFF:
        raise Unavailable("KVSS_NATIVE is off")
    path = _newest()
    if build:
        try:
            path = _build()
        except Unavailable:
            if path is None:
                raise
    if path is None:
        raise Unavailable("it has not been built; `python -m kvss_agent.native` does it")
    return _loaded(path)


def build() -> Path:
    """Compile `native.c`, unless that has been done: where it is. Raises Unavailable.

    Any number of processes may do it at once: each compiles a file of its own and moves it into place.
    """
    return _build()


def choice() -> Choice:
    """Who is to move bytes. ValueError if `KVSS_NATIVE` says something else."""
    said = os.environ.get("KVSS_NATIVE") or Choice.AUTO
    try:
        return Choice(said)
    except ValueError:
        raise ValueError(f"KVSS_NATIVE is one of {', '.join(Choice)}, not {said}") from None


def _directory() -> Path:
    project = Path(__file__).resolve().parent.parent
    return project / (os.environ.get("TIDEGATE_STATE_DIR") or ".tidegate") / "native"


def _name_for_python() -> str:
    """How the names of those builds begin that are of this source and fit this Python."""
    of = SOURCE.read_bytes() + " ".join(FLAGS).encode()
    return f"{sysconfig.get_config_var('SOABI')}-{hashlib.sha256(of).hexdigest()[:16]}"


def _newest() -> Path | None:
    return max(_directory().glob(f"{_name_for_python()}-*.so"), key=_age_rank, default=None)


def _age_rank(path: Path) -> int:
    """The later it was built the higher; the lowest if somebody has just removed it."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _build() -> Path:
    compiler = shlex.split(os.environ.get("CC") or "cc")
    includes = dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude"))
    version = _run([*compiler, "--version"])
    if not any((Path(directory) / "Python.h").exists() for directory in includes):
        raise Unavailable(f"the headers of Python {sys.version.split()[0]} are not installed")
    digest = hashlib.sha256(f"{compiler} {version}".encode()).hexdigest()[:8]
    try:
        path = _directory() / f"{_name_for_python()}-{digest}.so"
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
                made = Path(scratch) / path.name
                where = [f"-I{directory}" for directory in includes]
                _run([*compiler, *FLAGS, *where, str(SOURCE), "-o", str(made)])
                made.replace(path)
            for old in sorted(path.parent.glob("*.so"), key=_age_rank)[:-BUILDS_MAX]:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise Unavailable(f"{error.filename}: {error.strerror}") from error
    return path


def _run(command: list[str]) -> str:
    """What the compiler says if it succeeds."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=COMPILE_SECONDS_MAX,
        )
    except OSError as error:
        raise Unavailable(f"there is no compiler: {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} has not finished in {COMPILE_SECONDS_MAX} s") from error
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines() or ["without a word"]
        complaint = next((line for line in lines if "error" in line), lines[0])
        raise Unavailable(f"{command[0]} failed: {complaint}") from error
    return done.stdout


@functools.cache
def _loaded(path: Path) -> NativeMover:
    """The compiled module, tried. Loaded once: the code of one that is in use cannot be exchanged."""
    loader = ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    if spec is None:
        raise Unavailable(f"{path} is not a module")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise Unavailable(f"it was built but cannot be loaded: {error}") from error
    mover = cast("NativeMover", module)
    mover._bind(Header, Miss.ABSENT, Miss.TORN, Miss.STALE, Miss.FOREIGN, Miss.CORRUPT)  # noqa: SLF001
    _try_out(mover)
    return mover


def _try_out(mover: Mover) -> None:
    """A compiler may be wrong, and then every column would be taken for corrupt by somebody else."""
    source = memoryview(random.Random(0).randbytes(max(_LENGTHS_TRIED)))  # noqa: S311
    into = memoryview(bytearray(len(source)))
    for length in _LENGTHS_TRIED:
        expected = xxh3_64_intdigest(source[:length])
        for copy in (mover.copy_in, mover.copy_out):
            into[:length] = bytes(length)
            if copy(into[:length], source[:length]) != expected or into[:length] != source[:length]:
                raise Unavailable(f"it was built but is wrong about {length} bytes")


def _log_once(reason: str) -> None:
    """Shards are opened in threads, all at the same time."""
    with _telling:
        if reason in _told:
            return
        _told.add(reason)
    _log.info("Bytes are moved without compiled code: %s", reason)


def main() -> int:
    """Build the native mover and say what was found: 0, or why there is none: 1."""
    argparse.ArgumentParser(
        prog="python -m kvss_agent.native",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    try:
        mover = require(build=True)
    except (Unavailable, ValueError) as reason:
        print(f"No native mover: {reason}", file=sys.stderr)
        return 1
    print(f"Native mover for {mover.levels()[0]}: {mover.__file__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
