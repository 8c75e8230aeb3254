"""Loading the compiled mover, and trying it before it is used."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import random
import threading
from collections.abc import Sequence
from enum import StrEnum
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Final, Protocol, cast

from xxhash import xxh3_64_intdigest

from kvss_agent.mover import PYTHON, Mover
from kvss_agent.native import builder
from kvss_agent.native.builder import Unavailable
from kvss_agent.shard.seal import Column, Header, Miss, Transfer

BlockMemory = tuple[
    memoryview, int, int, int
]  # a layer's blocks: from where on, every how many, how many
Piece = tuple[
    int, int, int, int, int
]  # of a column: layer, which of its blocks, where in it and in the column
Placed = tuple[int, tuple[int, ...], memoryview]  # a column: which part of its blocks, these, its bytes

_MODULE = "kvss_agent._native"
_LENGTHS_TRIED = (0, 240, 241, 1024, 1025, 70_000)
_log = logging.getLogger(__name__)
_log_lock: Final = threading.Lock()
_logged: Final[set[tuple[str, str]]] = set()


class NativeMover(Mover, Protocol):
    """The interface of the compiled module. Its arguments have no names."""

    __file__: str

    def verify_column(self, slot: memoryview, column: Column, /) -> Header | Miss:
        """`seal.verify`"""

    def transfer_columns(self, transfers: Sequence[Transfer], /) -> list[Header | Miss]:
        """`seal.transfer` for each"""

    def scatter_columns(
        self,
        layers: Sequence[BlockMemory],
        parts: Sequence[Sequence[Piece]],
        columns: Sequence[Placed],
        /,
    ) -> None:
        """Copy columns into blocks, but for blocks of -1. Raises IndexError or ValueError, and has
        copied nothing, if a block is not within its memory or a piece not within its column."""

    def gather_columns(
        self,
        layers: Sequence[BlockMemory],
        parts: Sequence[Sequence[Piece]],
        columns: Sequence[Placed],
        /,
    ) -> None:
        """Copy columns out of blocks. Raises as `scatter_columns` does."""

    def _bind(self, *answers: object) -> None: ...

    def levels(self) -> tuple[str, ...]:
        """The kinds of code that this machine can run, best first; the first one is used."""


class Choice(StrEnum):
    """The values of `KVSS_NATIVE`."""

    AUTO = "auto"
    OFF = "off"
    REQUIRE = "require"


def best(*, build: bool = False) -> Mover:
    """The fastest mover there is. Raises Unavailable only if `KVSS_NATIVE` is `require`.

    Compiled code without vector instructions is not the fastest: xxhash has them on more machines.
    """
    is_required = choice() is Choice.REQUIRE
    mover = require(build=build) if is_required else load(build=build)
    if mover is None or (mover.levels()[0] == "portable" and not is_required):
        return PYTHON
    _log_once("Bytes are moved by the compiled mover: %s", mover.__file__)
    return mover


def load(*, build: bool = False) -> NativeMover | None:
    """The compiled mover, or None. Logs each reason for None once. Compiles only with `build`."""
    try:
        return require(build=build)
    except Unavailable as reason:
        _log_once("Bytes are moved by the Python mover: %s", str(reason))
        return None


def require(*, build: bool = False) -> NativeMover:
    """The compiled mover. Raises Unavailable with the reason. Compiles only with `build`.

    The build of the wheel comes first, then those that were made on this machine; an earlier one is
    good enough where it cannot be built anew. A mover whose checksums differ from those of the Python
    mover is unavailable too.
    """
    if choice() is Choice.OFF:
        raise Unavailable("KVSS_NATIVE is off")
    if packaged := _packaged():
        return packaged
    path = builder.newest_build()
    if build:
        try:
            path = builder.build()
        except Unavailable:
            if path is None:
                raise
    if path is None:
        raise Unavailable("it has not been built yet; `python -m kvss_agent.native` builds it")
    return _loaded(path)


def choice() -> Choice:
    """The value of `KVSS_NATIVE`. Raises ValueError if it is none of those."""
    value = os.environ.get("KVSS_NATIVE") or Choice.AUTO
    try:
        return Choice(value)
    except ValueError:
        raise ValueError(f"KVSS_NATIVE is one of {', '.join(Choice)}, not {value}") from None


def _packaged() -> NativeMover | None:
    """The compiled mover of the installed wheel. Logs once why it is not used."""
    try:
        path = builder.packaged_build()
        return _loaded(path) if path else None
    except Unavailable as reason:
        _log_once("The compiled mover of the wheel is not used: %s", str(reason))
        return None


@functools.cache
def _loaded(path: Path) -> NativeMover:
    """The compiled module, tried. Loaded once: code that is in use cannot be exchanged."""
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
    """Compare with xxhash. A compiler may be wrong, and then other processes would find every column
    corrupt."""
    source = memoryview(random.Random(0).randbytes(max(_LENGTHS_TRIED)))  # noqa: S311
    into = memoryview(bytearray(len(source)))
    for length in _LENGTHS_TRIED:
        expected = xxh3_64_intdigest(source[:length])
        for copy in (mover.copy_in, mover.copy_out):
            into[:length] = bytes(length)
            if copy(into[:length], source[:length]) != expected or into[:length] != source[:length]:
                raise Unavailable(f"it was built but is wrong about {length} bytes")


def _log_once(sentence: str, detail: str) -> None:
    """Shards are opened in threads, all at the same time. What nobody would see yet, since modules are
    imported before there is a log, is left for the next time."""
    if not _log.isEnabledFor(logging.INFO):
        return
    with _log_lock:
        if (sentence, detail) in _logged:
            return
        _logged.add((sentence, detail))
    _log.info(sentence, detail)
