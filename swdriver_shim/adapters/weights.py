"""Which weights an engine has. Two that have other weights must never have an equal name.

A checkpoint is too large to be read twice, so of its files names, sizes, times and samples are compared.
Times alone tell nothing apart in images that are built reproducibly, where all of them are equal.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Final, NamedTuple

from swdriver_shim.adapters.join_config import NameSpec

log = logging.getLogger(__name__)

DIGITS = 32
_PART: Final = re.compile(r"-\d+-of-\d+$")  # of a file that was split, behind its name

# What is read of each file: all of it, in so many pieces at most; or its head, where safetensors and
# GGUF have their index, and samples. Of 100 GB in 20 files that is 6 MiB.
READS_MAX, READS_MIN = 65, 5
READS_OF_ALL: Final = 8192  # if there are more files, fewer of each
PIECE_BYTES: Final = 256 << 10
HEAD_BYTES: Final = 64 << 10
SAMPLE_BYTES: Final = 4 << 10
READERS: Final = 8  # storage that is far away answers several at once


class FileState(NamedTuple):
    """Of a file, or of a link to one. It differs after any change."""

    name: str
    inode: int
    size: int
    modified_ns: int
    changed_ns: int  # which nobody can set


def weights_of(model: str, revision: str | None, commit: str | None, loaded_after: int = 0) -> NameSpec:
    """The name of weights that an engine has loaded. Raises OSError.

    `commit`: of a repository. A directory, or a file such as a GGUF, may be filled anew under the same
    path, so that files are in the name: a copy that does not keep times shares nothing, and misses.
    `loaded_after`: nanoseconds since 1970. If a file has changed since, nobody knows what was loaded,
    and the name is one that only processes of this engine have.
    """
    path = Path(model)
    if path.is_dir():
        files = files_in(path)
    elif path.is_file():
        files = _files_with(path)
    else:
        return NameSpec(name=model, revision=commit or revision or "")
    before = states_of(path, files)
    said = f"files:{digest_of(files)}"
    after = states_of(path, files)
    changed = set(before).symmetric_difference(after)
    if loaded_after:
        changed |= {one for one in before if one.changed_ns >= loaded_after}
    if changed:
        log.warning(
            "%s of %s has changed since this engine was started, so nobody knows which weights it has "
            "loaded. It shares KV with no other engine, nor with its next start. Fetch weights before "
            "its process is started: a script that fetches them must not become the engine by `exec`. "
            "vLLM's connector can be told their name instead, as `model`.",
            min(one.name for one in changed),
            path,
        )
        # Another engine may have loaded others from files that are the same by now.
        only_ours = repr((_session(), before, after)).encode()
        said = f"{said}:{hashlib.sha256(only_ours).hexdigest()[:DIGITS]}"
    return NameSpec(name=path.resolve().name, revision=said)


def files_in(folder: Path) -> list[Path]:
    """Raises OSError."""
    return sorted(file for file in folder.iterdir() if file.is_file())


def _files_with(file: Path) -> list[Path]:
    """This one and those that vLLM loads with it: the other parts of one that was split, and projectors
    of images."""
    whole = _PART.sub("", file.stem)
    return [
        one for one in files_in(file.parent) if _PART.sub("", one.stem) == whole or "mmproj" in one.name
    ]


def states_of(path: Path, files: Iterable[Path]) -> list[FileState]:
    """Of these files, and of the links on the way to `path`: another may be put in the place of one.
    Raises OSError."""
    return [*map(_state, files), *map(_link_state, links_to(path))]


def states_in(folder: str, links: Iterable[Path]) -> list[FileState]:
    """Of all files of a folder, and of the links on the way to it: with one look at each, since this is
    done for each request. Raises OSError."""
    with os.scandir(folder) as entries:
        found = sorted(_state(one) for one in entries if one.is_file())
    return [*found, *map(_link_state, links)]


def links_to(path: Path) -> list[Path]:
    return [one for one in (path, *path.parents) if one.is_symlink()]


def _state(file: Path | os.DirEntry[str]) -> FileState:
    found = file.stat()
    changed_ns = found.st_ctime_ns
    if file.is_symlink():
        changed_ns = max(changed_ns, file.stat(follow_symlinks=False).st_ctime_ns)
    return FileState(file.name, found.st_ino, found.st_size, found.st_mtime_ns, changed_ns)


def _link_state(link: Path) -> FileState:
    found = link.lstat()
    return FileState(link.name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def digest_of(files: Sequence[Path]) -> str:
    """By their names, sizes, times and samples. Raises OSError."""
    reads = max(READS_MIN, min(READS_MAX, READS_OF_ALL // max(1, len(files))))
    digest = hashlib.sha256()
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as readers:
        for file, sample in zip(files, readers.map(_sample, files, repeat(reads)), strict=True):
            found = file.stat()
            digest.update(repr((file.name, found.st_size, found.st_mtime_ns, sample)).encode())
    return digest.hexdigest()[:DIGITS]


def _sample(file: Path, reads: int) -> str:
    """The digest of all of a file, or of so many pieces of it. What this process must not read it does
    not compute with either."""
    digest = hashlib.sha256()
    try:
        with file.open("rb", buffering=0) as opened:
            for place, count in _pieces(os.fstat(opened.fileno()).st_size, reads):
                digest.update(os.pread(opened.fileno(), count, place))
    except PermissionError:
        return "not read"
    return digest.hexdigest()


def _pieces(size: int, reads: int) -> Iterator[tuple[int, int]]:
    """What is read of a file of this size: where, and how many bytes."""
    if size <= reads * PIECE_BYTES:
        yield from ((place, PIECE_BYTES) for place in range(0, size, PIECE_BYTES))
        return
    yield 0, HEAD_BYTES
    last = size - SAMPLE_BYTES
    yield from ((last * at // (reads - 1), SAMPLE_BYTES) for at in range(1, reads))


def process_began() -> int:
    """When this process was started, in nanoseconds since 1970: before it has loaded anything."""
    began = _started_ticks("self") * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + began


def _session() -> tuple[str, int, int, int | None]:
    """The same in all processes of an engine on a machine, and in each start of it another."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    processes = Path("/proc/self/ns/pid").stat().st_ino  # containers number theirs alike
    leader = os.getsid(0)
    try:
        started = _started_ticks(str(leader))
    except OSError:  # it has ended, or is hidden
        started = None
    return boot, processes, leader, started


def _started_ticks(pid: str) -> int:
    """Raises OSError."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat.rpartition(b")")[2].split()[19])  # behind the name of the program
