"""Weights out of a bucket: in ranges, many at once, resumed where they were, shared on a machine.

    <store>/s3/<address>/            all files, once all of them are there
    <store>/s3/.<address>.part/      until then: files at their full size
    <store>/s3/.<address>.journal/   what of them has been written, by the hash of a file's name
    <store>/s3/.<address>.lock       who brings them

The address is the hash of where they are and of all names, sizes and ETags: other weights have another
one. A journal has a line for each range that was written, with its checksum: after a kill -9, or a loss
of power, ranges whose bytes are as the journal has them are not brought again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from xxhash import xxh3_64, xxh3_64_hexdigest

from kvss_agent.process.durable_file import sync_directory
from telemetry.units import size as shown_size
from workload_manager.single_flight import Cancelled, alone
from workload_manager.weights import etags
from workload_manager.weights.errors import WeightsError
from workload_manager.weights.progress import Counter, Progress
from workload_manager.weights.sources import Bucket, SourceFile, translated

if TYPE_CHECKING:
    from obstore import GetOptions

log = logging.getLogger(__name__)

RANGE_BYTES: Final = 16 << 20
RANGES_AT_ONCE: Final = 8
CHUNK_BYTES: Final = 1 << 20
ATTEMPTS: Final = 5  # for a range, on top of the library's own
BACKOFF_SECONDS: Final = (0.2, 10.0)
SPARE_BYTES: Final = 256 << 20  # that stay free on the disk
LISTINGS: Final = 3  # where files are replaced while they are brought
_LOOK_SECONDS: Final = 0.2


class Range(NamedTuple):
    file: SourceFile
    number: int
    start: int
    size: int


@dataclass(slots=True)
class _Part:
    """A file that is being brought. Lines of its journal are written whole."""

    descriptor: int
    journal: int

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self.journal)


class Download:
    def __init__(
        self,
        bucket: Bucket,
        store: Path,
        hashes: Mapping[str, str],
        report: Callable[[Progress], None],
        is_cancelled: Callable[[], bool],
        range_bytes: int = RANGE_BYTES,
    ) -> None:
        """`hashes`: SHA-256 by name, of files that are checked once they are there."""
        self._bucket, self._hashes, self._report = bucket, hashes, report
        self._folder = store / "s3"
        self._cancelled_by_caller = is_cancelled
        self._range_bytes = range_bytes
        self._given_up = threading.Event()  # another range has failed for good

    def run(self) -> Path:
        """See `preparation.prepare`."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in reversed(range(LISTINGS)):
            files = self._bucket.files()
            if missing := sorted(self._hashes.keys() - {one.name for one in files}):
                raise WeightsError("NotFound", f"{self._bucket.source} has no {missing[0]}.")
            try:
                return self._bring(files)
            except WeightsError as error:
                if error.reason != "Changed" or not left:
                    raise
                self._given_up.clear()
        raise AssertionError("unreachable: the last listing returns or raises")

    def _bring(self, files: Sequence[SourceFile]) -> Path:
        address = self._address(files)
        done, part = self._folder / address, self._folder / f".{address}.part"
        counter = Counter(self._report, sum(one.size for one in files))

        def watch() -> None:
            counter.show(self._brought(part, files))

        if not self._is_there(done, files):
            with alone(self._folder / f".{address}.lock", self._cancelled_by_caller, watch):
                if not self._is_there(done, files):
                    self._bring_here(files, part, counter)
                    self._publish(part, done)
        return done

    def _address(self, files: Sequence[SourceFile]) -> str:
        said = msgspec.json.encode([self._bucket.place, sorted(files), sorted(self._hashes.items())])
        return hashlib.sha256(said).hexdigest()

    @staticmethod
    def _is_there(folder: Path, files: Sequence[SourceFile]) -> bool:
        """A folder that somebody has taken something out of is brought anew."""
        with contextlib.suppress(OSError):
            if all((folder / one.name).stat().st_size == one.size for one in files):
                return True
        return False

    @staticmethod
    def _publish(part: Path, done: Path) -> None:
        if done.exists():
            shutil.rmtree(done)
        part.rename(done)
        sync_directory(done.parent)
        shutil.rmtree(_journals_of(part), ignore_errors=True)

    def _bring_here(self, files: Sequence[SourceFile], part: Path, counter: Counter) -> None:
        part.mkdir(exist_ok=True, mode=0o700)
        _journals_of(part).mkdir(exist_ok=True, mode=0o700)
        wanted = {one: self._left(part, one, counter) for one in files}
        self._check_room(sum(one.size for ranges in wanted.values() for one in ranges))
        with contextlib.ExitStack() as opened:
            parts = {}
            for file, ranges in wanted.items():
                if ranges:
                    parts[file] = _opened(part, file)
                    opened.callback(parts[file].close)
            threads = opened.enter_context(ThreadPoolExecutor(RANGES_AT_ONCE))
            running = [
                threads.submit(self._range, one, parts[file], counter)
                for file, ranges in wanted.items()
                for one in ranges
            ]
            try:
                finished, _ = wait(running, return_when=FIRST_EXCEPTION)
                for one in finished:
                    one.result()
            except BaseException:
                self._given_up.set()
                for one in running:
                    one.cancel()
                raise
            for each in parts.values():
                os.fsync(each.descriptor)
        with ThreadPoolExecutor(RANGES_AT_ONCE) as threads:
            list(threads.map(lambda file: self._verify(part, file), files))

    def _left(self, part: Path, file: SourceFile, counter: Counter) -> list[Range]:
        """What is still to be brought of a file. What was brought is compared with its journal."""
        ranges = [
            Range(file, number, start, min(self._range_bytes, file.size - start))
            for number, start in enumerate(range(0, file.size, self._range_bytes))
        ]
        noted = _journal(part, file, self._range_bytes)
        if not noted or not (part / file.name).exists():
            return ranges
        left = []
        with (part / file.name).open("rb") as there:
            for one in ranges:
                self._check_cancelled()
                if one.number in noted and _digest(there.fileno(), one) == noted[one.number]:
                    counter.add(one.size)
                else:
                    left.append(one)
        return left

    def _check_room(self, size: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if size + SPARE_BYTES > free:
            raise WeightsError(
                "NoSpace",
                f"{self._bucket.source} needs {shown_size(size)} more in {self._folder}, which has "
                f"{shown_size(free)} free.",
            )

    def _range(self, one: Range, part: _Part, counter: Counter) -> None:
        """Bring one range, and note it. Raises WeightsError, Cancelled and OSError."""
        for left in reversed(range(ATTEMPTS)):
            self._check_cancelled()
            try:
                digest = self._received(one, part, counter)
            except WeightsError as error:
                if error.reason != "Unreachable" or not left:
                    raise
                self._pause(ATTEMPTS - left)
            else:
                line = f"{self._range_bytes} {one.number} {digest}\n".encode()
                os.write(part.journal, line)
                return

    def _received(self, one: Range, part: _Part, counter: Counter) -> str:
        import obstore

        digest, at, end = xxh3_64(), one.start, one.start + one.size
        options: GetOptions = {"range": (one.start, end)}
        if one.file.version:  # an object that was replaced since is refused
            options["if_match"] = one.file.version
        try:
            with translated(self._bucket.source):
                found = obstore.get(self._bucket.store, one.file.name, options=options)
                for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
                    self._check_cancelled()
                    raw = memoryview(chunk)[: end - at]
                    digest.update(raw)
                    _write(part.descriptor, raw, at)
                    at += len(raw)
                    counter.add(len(raw))
        except BaseException:
            counter.add(one.start - at)
            raise
        if at != end:
            counter.add(one.start - at)
            raise WeightsError("Unreachable", f"{self._bucket.source} ended in the middle of a range.")
        return digest.hexdigest()

    def _verify(self, part: Path, file: SourceFile) -> None:
        """Against the hash that was given, or the one that the bucket has. One that differs is brought
        anew the next time. Raises WeightsError."""
        path, right = part / file.name, self._hashes.get(file.name)
        if right is not None:
            is_right: bool | None = _sha256(path, self._check_cancelled) == right
            why = "does not have the hash that `weights.files` says"
        else:
            is_right = etags.matches(path, file.version, self._check_cancelled)
            why = (
                "is not what its ETag says. Where a bucket encrypts with a key of its own (SSE-KMS), "
                "ETags are no hashes: say in `weights.files` which SHA-256 it has"
            )
        if is_right is False:
            _journal_of(part, file).unlink(missing_ok=True)
            raise WeightsError("Damaged", f"{file.name} from {self._bucket.source} {why}.")
        if is_right is None:
            log.info("%s was checked by its length and version only: its ETag is no hash", file.name)

    def _brought(self, part: Path, files: Sequence[SourceFile]) -> int:
        """As another process is doing it."""
        done = 0
        for file in files:
            count = len(_journal(part, file, self._range_bytes))
            done += min(count * self._range_bytes, file.size)
        return done

    def _check_cancelled(self) -> None:
        if self._given_up.is_set() or self._cancelled_by_caller():
            raise Cancelled

    def _pause(self, attempt: int) -> None:
        """Longer each time, and not the same for all; at most until it is cancelled."""
        first, most = BACKOFF_SECONDS
        seconds = min(most, first * 2**attempt) * random.uniform(0.5, 1)  # noqa: S311 - no secret
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check_cancelled()
            self._given_up.wait(min(left, _LOOK_SECONDS))


def _opened(part: Path, file: SourceFile) -> _Part:
    path = part / file.name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    os.ftruncate(descriptor, file.size)
    return _Part(descriptor, os.open(_journal_of(part, file), flags | os.O_APPEND, 0o600))


def _journals_of(part: Path) -> Path:
    return part.with_suffix(".journal")


def _journal_of(part: Path, file: SourceFile) -> Path:
    return _journals_of(part) / hashlib.sha256(file.name.encode()).hexdigest()


def _journal(part: Path, file: SourceFile, range_bytes: int) -> Mapping[int, str]:
    """Checksums by the number of the range. A line that is cut off, or of other ranges, is none."""
    try:
        lines = _journal_of(part, file).read_text(errors="replace").split("\n")[:-1]
    except FileNotFoundError:
        return {}
    return dict(_noted(lines, str(range_bytes)))


def _noted(lines: Sequence[str], range_bytes: str) -> Iterator[tuple[int, str]]:
    for line in lines:
        fields = line.split(" ")
        if len(fields) == 3 and fields[0] == range_bytes and fields[1].isdecimal():
            yield int(fields[1]), fields[2]


def _digest(descriptor: int, one: Range) -> str:
    return xxh3_64_hexdigest(os.pread(descriptor, one.size, one.start))


def _write(descriptor: int, raw: memoryview, at: int) -> None:
    while raw:
        written = os.pwrite(descriptor, raw, at)
        raw, at = raw[written:], at + written


def _sha256(path: Path, check: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while raw := file.read(CHUNK_BYTES * 4):
            check()
            digest.update(raw)
    return digest.hexdigest()
